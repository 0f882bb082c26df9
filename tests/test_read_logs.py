"""Every form of a log is read, whole or damaged, into the numbers that were written."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.results import PUBLISHED, read_log

RUNS = pd.read_csv(PUBLISHED / "apple_8xv100_50_runs.tsv", sep="\t")
PUBLISHED_LOG = (REPO / "run_log.txt").read_text()
RUN = "Train acc 0.9 loss 0.9, validation acc 0.9 loss 0.9 wall time 4.0s\n"
HEAD = "# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z\n"


def run_lines(accuracies) -> str:
    """Return a log of our form, whose runs take 4 s, 4.001 s, ... on an H200."""
    form = "Train acc 0.9880 loss 0.920, validation acc {:.4f} loss 0.991 wall time 4.{:03d}s\n"
    head = HEAD + "# 8 workers on 1 process, 1 x NVIDIA H200\n# recipe apple2019 lr_scaler=1.5 epochs=18\n"
    return head + "".join(form.format(accuracy, i) for i, accuracy in enumerate(accuracies))


def write_runs(path, counts, campaign="b", seed=0, sep="\t", table=(), **fields) -> str:
    """Write a runs.tsv of runs with so many of 10,000 images right, which take 5 s, 6 s, ...; return its path.

    `table` has columns, `fields` values of all rows.
    """
    row = {
        "campaign": campaign,
        "recipe": "muon",
        "options": "epochs=8 kept=1,0.5",
        "compile": "True",
        "device": "A100",
    }
    row |= {"processes": 1, "train_loss": 1, "validation_loss": 0.9, "validation_images": 10000} | fields
    rows = [row | {"run": i, "seed": seed + i, "seconds": 5 + i, "validation_count": n} for i, n in enumerate(counts)]
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).assign(**dict(table)).to_csv(path, sep=sep, index=False)
    return str(path)


@pytest.fixture
def log(tmp_path):
    """Return a function that reads a log from its text."""

    def read(text: str, **how):
        (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape", **how))
        return read_log(str(tmp_path / "log"))

    return read


def test_published_runs_are_the_same_in_both_forms_and_only_a_summary_counts_them(log):
    for found in (log(PUBLISHED_LOG), read_log("published")):
        columns = ["accuracy", "validation_loss", "seconds"]
        np.testing.assert_array_equal(found.runs[columns], RUNS[["valid_acc", "valid_loss", "seconds"]])
        assert found.reached == 41
    assert log(PUBLISHED_LOG.partition("Maximum")[0]).reached is None, "0.940 stands for 0.9395, too"
    assert log(run_lines([0.9399, 0.94, 0.9401])).reached == 2


def test_every_log_in_the_repository_is_read():
    paths = [path for folder in ("logs", "notebook/logs") for path in (REPO / folder).rglob("run*")]
    tables, logs = ([path for path in paths if path.match(name)] for name in ("runs*.tsv", "run_log*.txt"))
    assert min(len(tables), len(logs)) > 50
    for path in tables:
        table, found = pd.read_csv(path, sep="\t"), read_log(str(path)).runs
        np.testing.assert_allclose(found["accuracy"], table["validation_accuracy"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found["seconds"], table["seconds"])
    assert all("digest" in read_log(str(path)).conditions for path in logs)
    table, lines = (read_log(str(REPO / "logs" / "demo" / name)) for name in ("runs.tsv", "run_log.txt"))
    assert table.runs["accuracy"].tolist() == lines.runs["accuracy"].tolist()
    assert table.conditions == {"environment": "-"} | lines.conditions, "which this log does not say"
    assert all(read_log(str(path)).reached == 1 for path in PUBLISHED.glob("dawnbench/*.tsv"))


@pytest.mark.parametrize(
    ("sep", "encoding"), [("\t", "utf-8"), (",", "utf-8-sig"), (";", "utf-8-sig"), (";", "utf-16")]
)
def test_the_last_campaign_or_the_named_one_of_a_table_is_read_as_a_spreadsheet_saves_it(log, tmp_path, sep, encoding):
    for campaign, counts in (("a", [9300]), ("b", [9399, 9400, 9401])):
        write_runs(tmp_path / campaign, counts, campaign, compile="TRUE", goal_seconds="", sep=sep)
    rows = (tmp_path / "b").read_text().partition("\n")[2]
    text = (tmp_path / "a").read_text() + rows.replace("\n", "\r\n") + rows[:40]  # a row that is still being written
    found = log(text, encoding=encoding)
    assert found.runs["accuracy"].tolist() == [0.9399, 0.94, 0.9401]
    assert (found.runs["seconds"].tolist(), found.reached) == ([5, 6, 7], 2)
    assert (found.conditions["compile"], found.conditions["kept"]) == ("True", "1,0.5")
    assert read_log(str(tmp_path / "log:a")).runs["accuracy"].tolist() == [0.93]
    assert len(read_log(f"{tmp_path}/log*:b").runs) == 3


def test_campaigns_of_a_file_are_named_after_it_though_both_have_colons(tmp_path):
    day, night = (write_runs(tmp_path / name, [9400], name, seed) for name, seed in (("day", 0), ("night:1", 5)))
    rows = Path(night).read_text().partition("\n")[2]
    (file := tmp_path / "9:30").write_text(Path(day).read_text() + rows)
    named = {f"{file}": [5], f"{file}:day": [0], f"{file}:night:1": [5], f"{file}:day,{file}:night:1": [0, 5]}
    assert {source: read_log(source).runs["seed"].tolist() for source in named} == named


def test_lines_from_srun_or_of_several_launches_are_read(log):
    assert log("".join(f" 0: {line}\r\n" for line in run_lines([0.94]).splitlines())).conditions["device"]
    found = log(run_lines([0.91]) + run_lines([0.92, 0.93]) + HEAD)
    assert found.runs["accuracy"].tolist() == [0.92, 0.93]
    assert log(RUN + "Train acc 0.98").runs["accuracy"].tolist() == [0.9], "the last line is still being written"


def test_a_dawnbench_table_is_one_run_with_its_time_to_94_percent(log):
    found = log("epochs\thours\ttop1Accuracy\n0\t0\t12.5\n1\t0.002\t94.05\n\n2\t0.003\t94.19\n\n")
    np.testing.assert_allclose(found.runs[["accuracy", "seconds", "goal_seconds"]], [[0.9419, 10.8, 7.2]])
    np.testing.assert_allclose(found.epochs[["seconds", "accuracy"]], [[0, 0.125], [7.2, 0.9405], [10.8, 0.9419]])


def test_several_tables_are_one_log_with_the_epochs_of_all_runs(tmp_path):
    """The accuracy of seed s after epoch e is (s + e) / 10, its time 10 e + s; what a kill left does not count."""
    for folder, seeds in (("0", [0, 1]), ("1", [2])):
        write_runs(tmp_path / folder / "runs.tsv", [9400] * len(seeds), seed=seeds[0], device=folder)
        epochs = [("a", 0, 1, 99, 0.9), ("b", 0, 1, 50, 0.8), ("b", 7, 1, 50, 0.8)]
        epochs += [("b", i, e, 10 * e + s, (s + e) / 10) for i, s in enumerate(seeds) for e in (1, 2)]
        table = pd.DataFrame(epochs, columns=["campaign", "run", "epoch", "seconds", "validation_accuracy"])
        table.to_csv(tmp_path / folder / "epochs.tsv", sep="\t", index=False)
    for source in (f"{tmp_path}/0/runs.tsv,{tmp_path}/1/runs.tsv", f"{tmp_path}/*/runs.tsv"):
        found = read_log(source)
        by_epoch = found.epochs.groupby("epoch")[["seconds", "accuracy"]].mean()
        np.testing.assert_allclose(by_epoch, [[11, 0.2], [21, 0.3]])
        assert (found.reached, found.conditions["processes"], "device" in found.conditions) == (3, "1", False)


def test_without_epochs_tsv_the_epochs_of_one_run_are_those_of_its_timing_log(tmp_path):
    source = write_runs(tmp_path / "runs.tsv", [9400, 9410])
    for seconds, found in ((6, [0.5, 0.941]), (7, None)):  # of the second run, and of another campaign
        table = f"epoch\thours\ttop1Accuracy\n1\t0.001\t50\n2\t{seconds / 3600}\t94.1\n"
        (tmp_path / "timing_log.tsv").write_text(table)
        epochs = read_log(source).epochs
        assert epochs is found or epochs["accuracy"].tolist() == pytest.approx(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 1}, "seed 1 is in .*/a, line 3 and in .*/b, line 2: leave out one"),
        ({"seed": 9, "precision": "fp16"}, r"b, line 2 differs from .*/a, line 2 in precision \(fp16, not bf16\)"),
        ({"seed": 9, "options": "epochs=9"}, r"epochs \(9, not 8\)"),
    ],
)
def test_tables_that_cannot_be_taken_together_are_refused(tmp_path, fields, message):
    sources = write_runs(tmp_path / "a", [9400, 9400], precision="bf16"), write_runs(tmp_path / "b", [9400], **fields)
    unknown = write_runs(tmp_path / "unknown", [9400], seed=99, precision="")
    with pytest.raises(ConfigError, match=message):
        read_log(",".join(sources))
    with pytest.raises(ConfigError):
        read_log(",".join([unknown, *sources]))


DAMAGED = {
    "": "",
    "\x89PNG\r\n\x1a\n\0\udcff,,\n,,,,": "line 1",
    "epoch\thours\ttop1Accuracy\n": "line 1",
    "epoch\thours\ttop1Accuracy\n1\t0.1\t93\n\n2\t0.2\t93\t94\n": "line 4",
    "epoch\thours\ttop1Accuracy\n1\tlong\t94\n": "line 2: hours is 'long'",
    "epoch\thours\n1\t0.1\n": "line 2: top1Accuracy is ''",
    RUN + RUN.replace("acc 0.9 loss 0.9 w", "acc 94.1 loss 0.9 w"): "line 2: accuracy is '94.1'",
    RUN + RUN.replace("4.0s", "0.0s"): "line 2: seconds is '0.0'",
    "campaign,seed,seconds,validation_count,validation_images,train_loss,validation_loss\n"
    "a,0,5,9300,10000,1,1\na,1,5,10001,10000,1,1\n": "line 3: validation_count is '10001'",
}


@pytest.mark.parametrize(("text", "place"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_line_that_names_file_and_line(log, tmp_path, text, place):
    with pytest.raises(ConfigError) as error:
        log(text)
    message = str(error.value)
    assert (message.startswith(f"{tmp_path}/log"), place in message, "\n" in message) == (True, True, False)


@pytest.mark.parametrize(("train", "validation"), [("nan", "0.9"), ("0.9", "inf")])
def test_a_diverged_run_has_no_loss_and_never_reached_the_goal(tmp_path, log, train, validation):
    line = f"Train acc 0.9 loss {train}, validation acc 0.9500 loss {validation} wall time 4.0s\n"
    losses = {"train_loss": train, "validation_loss": validation, "goal_seconds": 3}
    for found in (log(line), read_log(write_runs(tmp_path / "runs.tsv", [9500], **losses))):
        assert (found.reached, found.notes) == (0, [f"{found.name}: 1 runs diverged"])
        assert found.runs[["validation_loss", "seconds", "goal_seconds"]].isna().all(axis=None)
