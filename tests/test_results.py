"""Every form of results is read into the numbers that were written."""

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab.compare import compare
from large_batch_cifar_10_fast.lab.results import PUBLISHED, read_log, short_names

LINE = "Train acc 0.9880 loss 0.920, validation acc {:.4f} loss 0.9 wall time 4.0s\n"
RUN = LINE.format(0.9)
HEAD = "# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z\n"
DAWNBENCH = "epoch\thours\ttop1Accuracy\n"


def write_runs(path, counts, campaign="b", seed=0, table=(), **fields) -> str:
    """Write a runs.tsv of runs with so many of 10,000 images right, which take 5 s, 6 s, ...; return its path."""
    row = {"campaign": campaign, "recipe": "muon", "options": "epochs=8 kept=1,0.5", "device": "A100", "processes": 1}
    row |= {"train_loss": 1, "validation_loss": 0.9, "validation_images": 10000} | fields
    rows = [row | {"run": i, "seed": seed + i, "seconds": 5 + i, "validation_count": n} for i, n in enumerate(counts)]
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).assign(**dict(table)).to_csv(path, sep="\t", index=False, quoting=3)
    return str(path)


def write_epochs(folder, rows) -> None:
    names = ["campaign", "run", "epoch", "seconds", "validation_accuracy", "validation_loss", "train_loss"]
    pd.DataFrame(rows, columns=names[: len(rows[0])]).to_csv(folder / "epochs.tsv", sep="\t", index=False)


@pytest.fixture
def log(tmp_path):
    """Return a function that reads a log from its text."""

    def read(text: str):
        (tmp_path / "log").write_text(text)
        return read_log(str(tmp_path / "log"))

    return read


def test_published_runs_are_alike_in_both_forms_and_counted_by_a_summary(log):
    table = pd.read_csv(PUBLISHED / "apple_8xv100_50_runs.tsv", sep="\t")
    text = (REPO / "run_log.txt").read_text()
    for found in (log(text), read_log("published")):
        for name, column in (("accuracy", "valid_acc"), ("validation_loss", "valid_loss"), ("seconds", "seconds")):
            assert found.runs[name].tolist() == table[column].tolist()
        assert found.reached == 41
    assert log(text.partition("Maximum")[0]).reached is None, "0.940 stands for 0.9395, too"


@pytest.mark.slow
def test_every_campaign_in_the_repository_is_read_and_compared():
    table = pd.read_csv(REPO / "results" / "runs.tsv", sep="\t", quoting=3)
    logs = {}
    for name, rows in table.groupby("campaign"):
        logs[name] = found = read_log(f"{REPO}/results/runs.tsv:{name}")
        np.testing.assert_allclose(found.runs["accuracy"], rows["validation_accuracy"], rtol=0, atol=1e-12)
    assert len(logs) > 100
    assert len(compare(logs, name).accuracy) == len(logs) - 1


def test_lines_on_stdout_and_rows_of_a_campaign_agree():
    printed = read_log(f"{REPO}/results/run_log-apple2019-h200.txt")
    found = read_log(f"{REPO}/results/runs.tsv:apple2019-h200")
    assert printed.runs["accuracy"].tolist() == found.runs["accuracy"].tolist()
    np.testing.assert_allclose(printed.runs["seconds"], found.runs["seconds"], rtol=0, atol=5e-4)
    assert found.epochs.groupby("epoch").size().tolist() == [50] * 18


def test_a_last_row_that_was_cut_is_no_row(tmp_path):
    runs, epochs = tmp_path / "runs.tsv", tmp_path / "epochs.tsv"
    write_runs(runs, [9411, 9422])
    write_epochs(tmp_path, [("b", 0, 1, 1.5, 0.25), ("b", 0, 2, 3.5, 0.75)])
    texts = runs.read_text(), epochs.read_text()
    for cut in (1, 2, 5):
        for path, text in zip((runs, epochs), texts, strict=True):
            path.write_text(text[:-cut])
        found = read_log(str(runs))
        assert (found.runs["accuracy"].tolist(), found.epochs["accuracy"].tolist()) == ([0.9411], [0.25])


def test_the_last_campaign_or_the_named_one_is_read(log, tmp_path):
    """Names of files and campaigns may have colons, and that of images a quotation mark."""
    write_runs(tmp_path / "a", [9300, 9400], "a", seed=0, images='"')
    write_runs(tmp_path / "b", [9400, 9300], "b:1", seed=5, images='"')
    found = log((tmp_path / "a").read_text() + (tmp_path / "b").read_text().partition("\n")[2])
    assert found.runs["accuracy"].tolist() == [0.94, 0.93]
    assert found.runs["seconds"].tolist() == [5, 6]
    assert (found.conditions["images"], found.conditions["kept"]) == ('"', "1,0.5")
    file = (tmp_path / "log").rename(tmp_path / "9:30")
    named = {f"{file}": [5, 6], f"{file}:a": [0, 1], f"{tmp_path}/9*:b:1": [5, 6], f"{file}:a,{file}:b:1": [0, 1, 5, 6]}
    assert {source: read_log(source).runs["seed"].tolist() for source in named} == named


def test_the_last_launch_with_runs_counts_and_no_half_line(log):
    found = log("".join([HEAD, RUN, HEAD, LINE.format(0.92), LINE.format(0.93), HEAD]))
    assert found.runs["accuracy"].tolist() == [0.92, 0.93]
    for half in ("T", "Train acc ", RUN[:40], RUN[:-2]):
        assert log(RUN + half).runs["accuracy"].tolist() == [0.9]


def test_a_dawnbench_table_is_one_run_with_its_time_to_94_percent(log):
    found = log(f"{DAWNBENCH}0\t0\t93.99\n1\t0.002\t94\n\n2\t0.003\t94.19\n\n")
    np.testing.assert_allclose(found.runs[["accuracy", "seconds", "goal_seconds"]], [[0.9419, 10.8, 7.2]])
    np.testing.assert_allclose(found.epochs["accuracy"], [0.9399, 0.94, 0.9419])


def test_several_tables_are_one_log(tmp_path):
    """Epochs of runs without a row, which a kill left, do not count."""
    for folder, seeds in (("0", [0, 1]), ("1", [2])):
        write_runs(tmp_path / folder / "runs.tsv", [9400] * len(seeds), seed=seeds[0], device=folder)
        rows = [("a", 0, 1, 9, 0.9), ("b", 0, 1, 9, 0.8), ("b", 7, 1, 9, 0.8)]
        rows += [("b", i, e, e, (s + e) / 10) for i, s in enumerate(seeds) for e in (1, 2)]
        write_epochs(tmp_path / folder, rows)
    for source in (f"{tmp_path}/0/runs.tsv,{tmp_path}/1/runs.tsv", f"{tmp_path}/*/runs.tsv"):
        found = read_log(source)
        np.testing.assert_allclose(found.epochs.groupby("epoch")["accuracy"].mean(), [0.2, 0.3])
        assert (found.reached, "device" in found.conditions) == (3, False)


def test_without_epochs_tsv_a_timing_log_has_the_epochs_of_one_run(tmp_path):
    source = write_runs(tmp_path / "runs.tsv", [9400, 9410])
    for seconds, found in ((6, [0.5, 0.941]), (7, None)):  # of the second run, and of another campaign
        (tmp_path / "timing_log.tsv").write_text(f"{DAWNBENCH}1\t0.001\t50\n2\t{seconds / 3600}\t94.1\n")
        epochs = read_log(source).epochs
        assert epochs is found or epochs["accuracy"].tolist() == pytest.approx(found)


def test_tables_of_equal_seeds_or_other_conditions_are_not_taken_together(tmp_path):
    one = write_runs(tmp_path / "a", [9400, 9400], precision="bf16")
    with pytest.raises(ConfigError, match=r"seed 1 is in .*/a, line 3 and in .*/b, line 2"):
        read_log(",".join([one, write_runs(tmp_path / "b", [9400], seed=1)]))
    other = write_runs(tmp_path / "b", [9400], seed=9, precision="fp16")
    unknown = write_runs(tmp_path / "unknown", [9400], seed=99, precision="")
    for sources in ([one, other], [unknown, one, other]):
        with pytest.raises(ConfigError, match=r"b, line 2 differs from .* in precision \(fp16, not bf16\)"):
            read_log(",".join(sources))


def test_a_damaged_file_is_one_line_that_names_file_and_line(log, tmp_path):
    for text, place in (
        ("", ""),
        (f"{DAWNBENCH}1\t0.1\t93\n\n2\t0.2\t93\t94\n", "line 4"),
        (RUN + LINE.format(94.1), "line 2: accuracy is '94.1000'"),
    ):
        with pytest.raises(ConfigError, match=f"^{tmp_path}/log[^\n]*{place}[^\n]*$"):
            log(text)


def test_a_diverged_run_is_counted_and_is_no_result(tmp_path, log):
    diverged = LINE.format(0.95).replace("0.920", "nan")
    runs = write_runs(tmp_path / "runs", [9500, 9000], table={"validation_loss": ["inf", "0.9"]})
    for found in (log(diverged + RUN), read_log(runs)):
        assert found.runs["accuracy"].tolist() == [0.9]
        assert (found.reached, found.diverged, found.count) == (0, 1, 2)
    assert read_log(write_runs(tmp_path / "runs", [9399, 9400, 9401])).reached == 2


def test_names_are_shortened_to_the_part_in_which_they_differ(tmp_path):
    paths = [write_runs(tmp_path / folder / "runs.tsv", [9400], "night") for folder in ("a", "b")]
    assert short_names([read_log(path) for path in paths]) == ["a", "b"]
    assert short_names([read_log(paths[0])]) in (["a"], ["runs.tsv"], ["a/runs.tsv"], paths[:1])
