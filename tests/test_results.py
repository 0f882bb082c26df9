"""Every form of results is read into the numbers that were written."""

import re

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab.results import PUBLISHED, read_log

LINE = "Train acc 0.9880 loss 0.920, validation acc {:.4f} loss 0.9 wall time 4.0s\n"
RUN = LINE.format(0.9)
HEAD = "# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z\n"


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


def test_exactly_94_percent_is_reached(log, tmp_path):
    assert log("".join(map(LINE.format, [0.9399, 0.94, 0.9401]))).reached == 2
    assert read_log(write_runs(tmp_path / "runs.tsv", [9399, 9400, 9401])).reached == 2


def test_every_log_in_the_repository_is_read():
    paths = [path for folder in ("logs", "notebook/logs") for path in (REPO / folder).rglob("run*")]
    tables, logs = ([path for path in paths if path.match(name)] for name in ("runs*.tsv", "run_log*.txt"))
    assert min(len(tables), len(logs)) > 50
    for path in tables:
        table = pd.read_csv(path, sep="\t")
        if "campaign" in table:
            table = table[table["campaign"] == table["campaign"].iloc[-1]]
        found = read_log(str(path)).runs
        np.testing.assert_allclose(found["accuracy"], table["validation_accuracy"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found["seconds"], table["seconds"])
    for path in logs:
        found = read_log(str(path))
        printed = [float(text) for text in re.findall("validation acc (\\S+)", path.read_text())]
        assert found.runs["accuracy"].tolist() == printed[-len(found.runs) :]
    table, lines = (read_log(str(REPO / "logs" / "demo" / name)) for name in ("runs.tsv", "run_log.txt"))
    assert table.conditions == {"environment": "-"} | lines.conditions, "which this log does not say"


def test_a_last_row_cut_at_any_byte_is_no_row(tmp_path):
    runs, epochs = tmp_path / "runs.tsv", tmp_path / "epochs.tsv"
    write_runs(runs, [9411, 9422])
    write_epochs(tmp_path, [("b", 0, 1, 1.5, 0.25), ("b", 0, 2, 3.5, 0.75)])
    text = epochs.read_text()
    for size in range(text.index("\n"), len(text) + 1):
        epochs.write_text(text[:size])
        found = read_log(str(runs)).epochs
        rows = [] if found is None else found["accuracy"].tolist()
        assert rows == [0.25, 0.75][: max(0, text[:size].count("\n") - 1)]
    text = runs.read_text()
    for size in range(text.rindex("\n", 0, -1) + 1, len(text)):
        runs.write_text(text[:size])
        assert read_log(str(runs)).runs["accuracy"].tolist() == [0.9411]


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
    for size in range(1, len(RUN) - 1):
        assert log(RUN + RUN[:size]).runs["accuracy"].tolist() == [0.9]


def test_a_dawnbench_table_is_one_run_with_its_time_to_94_percent(log):
    found = log("epochs\thours\ttop1Accuracy\n0\t0\t93.99\n1\t0.002\t94\n\n2\t0.003\t94.19\n\n")
    np.testing.assert_allclose(found.runs[["accuracy", "seconds", "goal_seconds"]], [[0.9419, 10.8, 7.2]])
    np.testing.assert_allclose(found.epochs["accuracy"], [0.9399, 0.94, 0.9419])


def test_several_tables_are_one_log(tmp_path):
    """What a kill left does not count."""
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
        table = f"epoch\thours\ttop1Accuracy\n1\t0.001\t50\n2\t{seconds / 3600}\t94.1\n"
        (tmp_path / "timing_log.tsv").write_text(table)
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


DAMAGED = {
    "": "",
    "epoch\thours\ttop1Accuracy\n1\t0.1\t93\n\n2\t0.2\t93\t94\n": "line 4",
    "epoch\thours\ttop1Accuracy\n1\tlong\t94\n": "line 2: hours is 'long'",
    RUN + LINE.format(94.1): "line 2: accuracy is '94.1000'",
    "campaign\tseed\tseconds\tvalidation_images\tvalidation_count\ttrain_loss\tvalidation_loss\n"
    "a\t0\t5\t10000\t10001\t1\t1\n": "line 2: validation_count is '10001'",
}


@pytest.mark.parametrize(("text", "place"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_line_that_names_file_and_line(log, tmp_path, text, place):
    with pytest.raises(ConfigError, match=f"^{tmp_path}/log[^\n]*{place}[^\n]*$"):
        log(text)


@pytest.mark.parametrize(("train", "validation"), [("nan", "0.9"), ("0.9", "inf")])
def test_a_diverged_run_has_no_loss_no_time_and_did_not_reach_the_goal(tmp_path, log, train, validation):
    line = LINE.format(0.95).replace("0.920", train).replace("loss 0.9 ", f"loss {validation} ")
    runs = write_runs(tmp_path / "runs", [9500], train_loss=train, validation_loss=validation, goal_seconds=3)
    for found in (log(line), read_log(runs)):
        assert (found.reached, found.notes) == (0, [f"{found.name}: 1 runs diverged"])
        assert found.runs[["validation_loss", "seconds", "goal_seconds"]].isna().all(axis=None)
