"""Every form of a log is read, whole or damaged, into the numbers that were written."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import REPO
from large_batch_cifar_10_fast.campaign import COLUMNS, EPOCHS
from large_batch_cifar_10_fast.options import ConfigError

from large_batch_cifar_10_fast.read_logs import read_log

PUBLISHED = pd.read_csv(REPO / "published" / "apple_8xv100_50_runs.tsv", sep="\t")
PUBLISHED_LOG = (REPO / "run_log.txt").read_text()
WITHOUT_SUMMARY = PUBLISHED_LOG.partition("Maximum training time")[0]
RUN = "Train acc 0.9 loss 0.9, validation acc 0.9 loss 0.9 wall time 4.0s\n"
TABLE = "run\ttrain_acc\ttrain_loss\tvalid_acc\tvalid_loss\tseconds\n"
OUR_HEAD = """# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z
# 8 workers on 1 process, 1 x NVIDIA H200
# data CIFAR-10: 50000 training and 10000 test images, SHA-256 0123456789ab
# recipe apple2019 lr_scaler=1.5 epochs=18 width=64
# settings runs=1 precision=fp16 out=.
"""


def our_form(accuracies, campaign: str = "") -> str:
    lines = [f"# campaign {campaign}, 0 of 4 runs finished before\n"] if campaign else []
    form = "Train acc 0.9880 loss 0.920, validation acc {:.4f} loss 0.991 wall time 4.{:03d}s\n"
    return OUR_HEAD + "".join([*lines, *(form.format(accuracy, i) for i, accuracy in enumerate(accuracies))])


def runs_rows(campaign: str, counts, **fields) -> list[dict]:
    base = dict.fromkeys(COLUMNS, "1") | {"share": "0/1", "campaign": campaign, "runs": str(len(counts))}
    base |= {"compile": "True", "validation_images": "10000", "images": "CIFAR-10", "options": "epochs=18"} | fields
    numbers = [{"run": str(i), "seed": str(7 + i), "seconds": str(5 + i)} for i in range(len(counts))]
    return [base | row | {"validation_count": count} for row, count in zip(numbers, counts, strict=True)]


def written(path: Path, rows: list[dict], **how) -> str:
    pd.DataFrame(rows).to_csv(path, **({"sep": "\t", "index": False} | how))
    return str(path)


def two_campaigns(**fields) -> list[dict]:
    rows = runs_rows("a", ["9300"]) + runs_rows("b", ["9399", "9400", "9401"], **fields)
    return [row | {"goal_seconds": goal} for row, goal in zip(rows, ("", "", "4.5", "4.7"), strict=True)]


@pytest.fixture
def log(tmp_path):
    def read(text: str):
        (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape"))
        return read_log(str(tmp_path / "log"))

    return read


def test_rounded_accuracies_are_known_within_bounds_and_a_summary_is_exact(log):
    for found in (log(PUBLISHED_LOG), read_log("published")):
        for column, expected in {"accuracy": "valid_acc", "loss": "valid_loss", "seconds": "seconds"}.items():
            np.testing.assert_array_equal(getattr(found, column), PUBLISHED[expected])
        assert (found.rounding, found.reached, found.lowest, found.median) == (0.0005, (41, 41), 0.9374, 0.9419)
    surely, at_most = int((PUBLISHED["valid_acc"] > 0.9405).sum()), int((PUBLISHED["valid_acc"] > 0.9395).sum())
    assert log(WITHOUT_SUMMARY).reached == (surely, at_most) == (38, 47)
    contradicting = log(PUBLISHED_LOG.replace("41 runs", "48 runs"))
    assert (contradicting.reached, "contradicts" in contradicting.notes[0]) == ((38, 47), True)
    four_decimals = our_form([0.9399, 0.9400, 0.9401])
    assert (log(four_decimals).reached, log(four_decimals).rounding) == ((2, 2), 0.0)
    assert log(four_decimals.replace(OUR_HEAD, "")).reached == (1, 2), "the number of images is unknown"


def test_every_log_in_the_repository_is_read():
    paths = [path for folder in ("logs", "notebook/logs") for path in (REPO / folder).rglob("run*")]
    tables, logs = ([path for path in paths if path.match(name)] for name in ("runs*.tsv", "run_log*.txt"))
    assert min(len(tables), len(logs)) > 50
    for path in tables:
        table, found = pd.read_csv(path, sep="\t"), read_log(str(path))
        np.testing.assert_allclose(found.accuracy, table["validation_accuracy"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found.seconds, table["seconds"])
    assert all("digest" in read_log(str(path)).conditions for path in logs)
    table, lines = (read_log(str(REPO / "logs" / "demo" / name)) for name in ("runs.tsv", "run_log.txt"))
    assert (table.accuracy.tolist(), table.conditions) == (lines.accuracy.tolist(), lines.conditions)


def test_the_last_campaign_is_read_or_the_named_one_without_a_half_written_row(tmp_path):
    path = Path(written(tmp_path / "runs.tsv", two_campaigns(runs="5")))
    last = read_log(str(path))
    assert (last.accuracy.tolist(), last.reached, last.seconds.tolist()) == ([0.9399, 0.94, 0.9401], (2, 2), [5, 6, 7])
    np.testing.assert_equal(last.goal_seconds, [math.nan, 4.5, 4.7])
    assert last.notes == (f"{path} holds 3 of the campaign's 5 runs",)
    assert read_log(str(path), "a").accuracy.tolist() == [0.93]
    path.write_text(path.read_text()[: path.read_text().rindex("CIFAR-10")])
    assert read_log(str(path)).accuracy.tolist() == [0.9399, 0.94]


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8-sig"), (";", "utf-8-sig"), (";", "utf-16")])
def test_tables_saved_by_a_spreadsheet_are_read(tmp_path, separator, encoding):
    rows = two_campaigns(options="epochs=9 pixels=24,24,32")
    clean = read_log(written(tmp_path / "clean.tsv", rows))
    rows = [row | {"compile": "TRUE"} for row in rows] + [dict.fromkeys(COLUMNS, "")]
    how = {"sep": separator, "encoding": encoding, "lineterminator": "\r\n", "quoting": 1}
    saved = read_log(written(tmp_path / "saved.csv", rows, **how))
    assert (saved.conditions, saved.accuracy.tolist()) == (clean.conditions, clean.accuracy.tolist())
    assert (clean.conditions["compile"], clean.conditions["pixels"]) == ("True", "24,24,32")


def test_windows_and_srun_change_nothing(tmp_path):
    text = our_form([0.94, 0.95])
    (tmp_path / "srun.txt").write_text("".join(f"0: {line}\n" for line in text.splitlines()))
    (tmp_path / "windows.txt").write_text(text.replace("\n", "\r\n"), "utf-16")
    for path in tmp_path.iterdir():
        assert read_log(str(path)).accuracy.tolist() == [0.94, 0.95]


def test_dawnbench_tables_are_read(log):
    found = log("epochs\thours\ttop1Accuracy\n0\t0\t12.5\n1\t0.002\t94.05\n\n2\t0.003\t94.19\n\n")
    assert (found.accuracy.tolist(), found.reached, found.conditions) == ([0.9419], (1, 1), {"epochs": "3"})
    np.testing.assert_allclose([found.seconds[0], found.goal_seconds[0]], [10.8, 7.2])
    np.testing.assert_allclose(found.epochs, [[0, 7.2, 10.8], [0.125, 0.9405, 0.9419]])
    assert all(read_log(str(path)).reached == (1, 1) for path in REPO.glob("published/dawnbench/*.tsv"))


def test_shares_are_one_log_and_the_curve_is_the_median_over_all_runs(tmp_path):
    """The accuracy of run r after epoch e is (r + e) / 10, its time 10 e + r; what a kill left does not count."""
    rows = two_campaigns()[1:]
    for i in range(2):
        (tmp_path / f"{i}").mkdir()
        share = [row | {"share": f"{i}/2", "campaign": f"c{i}"} for row in rows[i::2]]
        written(tmp_path / f"{i}" / "runs.tsv", share)
        epochs = [("older", 0, 1, 99, 0.9), (f"c{i}", i, 1, 50, 0.8)]
        epochs += [(f"c{i}", run, e, 10 * e + run, (run + e) / 10) for run in range(i, 3, 2) for e in (1, 2)]
        table = pd.DataFrame(epochs, columns=["campaign", "run", "epoch", "seconds", "validation_accuracy"])
        table.reindex(columns=EPOCHS, fill_value=1).to_csv(tmp_path / f"{i}" / "epochs.tsv", sep="\t", index=False)
    for source in (f"{tmp_path}/1/runs.tsv,{tmp_path}/0/runs.tsv", f"{tmp_path}/*/runs.tsv"):
        found = read_log(source)
        assert (found.accuracy.tolist(), found.reached, found.notes) == ([0.9399, 0.94, 0.9401], (2, 2), ())
        assert [values.tolist() for values in found.epochs] == [[11, 21], [0.2, 0.3]]
        assert [values.tolist() for values in found.spread] == [[0.1, 0.2], [0.3, 0.4]]
    written(tmp_path / "1" / "runs.tsv", [row | {"options": "epochs=20"} for row in share])
    with pytest.raises(ConfigError, match="not one campaign"):
        read_log(f"{tmp_path}/*/runs.tsv")


DAMAGED = {
    "": "",
    "\x89PNG\r\n\x1a\n\0\udcff,,\n,,,,": "line 1",
    "epoch\thours\ttop1Accuracy\n": "line 1",
    "epoch\thours\ttop1Accuracy\n1\t0.1\t93\n\n2\t0.2\t93\t94\n": "line 4",
    "epoch\thours\ttop1Accuracy\n1\tlong\t94\n": "line 2: hours is 'long'",
    "epoch\thours\n1\t0.1\n": "line 2: top1Accuracy is ''",
    RUN + RUN.replace("acc 0.9 loss 0.9 w", "acc 94.1 loss 0.9 w"): "line 2: accuracy is '94.1'",
    RUN + RUN.replace("4.0s", "0.0s"): "line 2: seconds is '0.0'",
    pd.DataFrame(runs_rows("a", ["9300", "10001"])).to_csv(sep=";"): "line 3: validation_count is '10001'",
    pd.DataFrame(runs_rows("a", ["9300"], train_loss="")).to_csv(sep=";"): "line 2: train_loss is ''",
}


@pytest.mark.parametrize(("text", "place"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_line_that_names_file_and_line(log, tmp_path, text, place):
    with pytest.raises(ConfigError) as error:
        log(text)
    message = str(error.value)
    assert (message.startswith(f"{tmp_path}/log"), place in message, "\n" in message) == (True, True, False)


@pytest.mark.parametrize(("train", "validation"), [("nan", "0.9"), ("0.9", "inf")])
def test_a_diverged_run_has_nan_loss_and_never_reached_the_goal(tmp_path, log, train, validation):
    damage = {"train_loss": train, "validation_loss": validation}
    found = read_log(written(tmp_path / "runs.tsv", [*two_campaigns()[:3], two_campaigns()[3] | damage]))
    assert (found.reached, found.diverged, math.isnan(found.goal_seconds[2])) == ((1, 1), 1, True)
    line = f"Train acc 0.9 loss {train}, validation acc 0.9500 loss {validation} wall time 4.0s\n"
    for text in (RUN + line, f"{TABLE}0\t0.9\t0.9\t0.9\t0.9\t4.0\n1\t0.9\t{train}\t0.9500\t{validation}\t4.0\n"):
        found = log(text)
        assert (found.reached, found.diverged, math.isnan(found.loss[1])) == ((0, 0), 1, True)


def test_of_several_launches_in_one_log_the_last_counts(log):
    killed, resumed = our_form([0.91, 0.92], "a"), our_form([0.91, 0.92, 0.93, 0.94], "a")
    found = log(killed + "Train acc 0.98\n" + resumed + our_form([], "a"))
    assert (found.accuracy.tolist(), len(found.notes)) == ([0.91, 0.92, 0.93, 0.94], 1), "it has no summary"
    assert "holds 1 other campaigns" in log(our_form([0.91], "b") + resumed).notes[0]
    assert log(killed + "Train acc 0.98").accuracy.tolist() == [0.91, 0.92], "the last line is still being written"
