"""Every form of a log is read, whole or damaged, into the numbers that were written."""

import contextlib
import math
import random

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast.campaign import COLUMNS
from large_batch_cifar_10_fast.options import ConfigError
from large_batch_cifar_10_fast.read_logs import read_log

PUBLISHED = pd.read_csv(REPO / "published" / "apple_8xv100_50_runs.tsv", sep="\t")
SUMMARY = (REPO / "published" / "apple_8xv100_summary.txt").read_text()
RUN = "Train acc 0.9 loss 0.9, validation acc 0.9 loss 0.9 wall time 4.0s\n"
EPOCHS = "epoch\thours\ttop1Accuracy\n"
TABLE = "run\ttrain_acc\ttrain_loss\tvalid_acc\tvalid_loss\tseconds\n"
OUR_HEAD = """# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z
# 8 workers on 1 process, 1 x NVIDIA H200
# data CIFAR-10: 50000 training and 10000 test images, SHA-256 0123456789ab
# recipe apple2019 lr_scaler=1.5 epochs=18 width=64
# settings runs=1 precision=fp16 out=.
"""


def published_form(rows: pd.DataFrame = PUBLISHED, shift: float = 0.0, summary: str = SUMMARY) -> str:
    """The published lines, made from the published table."""
    lines = ["Uploaded data to GPUs 0.086s", "Compute patch whitening statistics:     0.465s"]
    lines += [
        f"Train acc {row.train_acc:.3f} loss {row.train_loss:.3f}, validation acc {row.valid_acc - shift:.3f} "
        f"loss {row.valid_loss:.3f} wall time {row.seconds:.3f}s"
        for row in rows.itertuples()
    ]
    return "\n".join(lines) + "\n" + summary


def our_form(accuracies, campaign: str = "") -> str:
    lines = [f"# campaign {campaign}, 0 of 4 runs made before"] if campaign else []
    lines += [
        f"Train acc 0.9880 loss 0.920, validation acc {accuracy:.4f} loss 0.991 wall time 4.{i:03d}s"
        for i, accuracy in enumerate(accuracies)
    ]
    return OUR_HEAD + "\n".join(lines) + "\n"


def runs_rows(campaign: str, counts, **fields) -> list[dict]:
    base = dict.fromkeys(COLUMNS, "1") | {"share": "0/1", "campaign": campaign, "runs": str(len(counts))}
    base |= {"compile": "True", "validation_images": "10000", "images": "CIFAR-10", "options": "epochs=18"} | fields
    numbered = enumerate(counts)
    return [
        base | {"run": f"{i}", "seed": f"{7 + i}", "seconds": f"{5 + i}", "validation_count": n} for i, n in numbered
    ]


def written(path, rows: list[dict], **how) -> str:
    pd.DataFrame(rows).to_csv(path, **({"sep": "\t", "index": False} | how))
    return str(path)


def two_campaigns(**fields) -> list[dict]:
    rows = runs_rows("a", ["9300"]) + runs_rows("b", ["9399", "9400", "9401"], **fields)
    for row, goal in zip(rows, ("", "", "4.5", "4.7"), strict=True):
        row["goal_seconds"] = goal
    return rows


def error_of(source) -> str:
    with pytest.raises(ConfigError) as refused:
        read_log(str(source))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_published_lines_are_read(tmp_path):
    path = tmp_path / "run_log.txt"
    path.write_text(published_form())
    log = read_log(str(path))
    np.testing.assert_allclose(log.accuracy, PUBLISHED["valid_acc"])
    np.testing.assert_allclose(log.loss, PUBLISHED["valid_loss"])
    np.testing.assert_allclose(log.seconds, PUBLISHED["seconds"])
    assert (log.rounding, log.reached, log.lowest, log.median) == (0.0005, (41, 41), 0.9374, 0.9419)
    assert read_log("published").reached == (41, 41)
    path.write_text(published_form(summary=""))
    surely, at_most = int((PUBLISHED["valid_acc"] > 0.9405).sum()), int((PUBLISHED["valid_acc"] > 0.9395).sum())
    assert read_log(str(path)).reached == (surely, at_most) == (38, 47), "rounding hides which reached 0.94"


def test_four_decimals_of_ten_thousand_images_are_exact(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(our_form([0.9399, 0.9400, 0.9401]))
    log = read_log(str(path))
    assert (log.reached, log.rounding) == ((2, 2), 0.0)
    expected = {"device": "1 x NVIDIA H200", "epochs": "18", "digest": "0123456789ab", "precision": "fp16"}
    assert expected.items() <= log.conditions.items()
    path.write_text(our_form([0.9399, 0.9400, 0.9401]).replace(OUR_HEAD, ""))
    assert read_log(str(path)).reached == (1, 2), "without the number of images 0.9400 may be 0.93995"


def test_every_log_in_the_repository_is_read():
    tables, logs = sorted(REPO.glob("logs/**/runs*.tsv")), sorted(REPO.glob("logs/**/run_log*.txt"))
    assert min(len(tables), len(logs)) > 50
    for path in tables:
        table, log = pd.read_csv(path, sep="\t"), read_log(str(path))
        np.testing.assert_allclose(log.accuracy, table["validation_accuracy"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(log.seconds, table["seconds"])
        assert "device" in log.conditions
    assert all(read_log(str(path)).conditions["digest"] for path in logs)
    demo = [read_log(str(REPO / "logs" / "demo" / name)) for name in ("runs.tsv", "run_log.txt")]
    np.testing.assert_allclose(demo[0].accuracy, demo[1].accuracy)
    assert demo[0].conditions.items() >= demo[1].conditions.items()


def test_of_runs_tsv_the_last_campaign_is_read_or_the_named(tmp_path):
    path = written(tmp_path / "runs.tsv", two_campaigns())
    last = read_log(path)
    np.testing.assert_allclose(last.accuracy, [0.9399, 0.94, 0.9401])
    assert (last.reached, last.notes, last.seconds.tolist()) == ((2, 2), (), [5, 6, 7])
    np.testing.assert_equal(last.goal_seconds, [math.nan, 4.5, 4.7])
    assert read_log(path, "a").accuracy.tolist() == [0.93]
    with pytest.raises(ConfigError, match="no campaign c, only a, b"):
        read_log(path, "c")
    unfinished = read_log(written(tmp_path / "runs.tsv", two_campaigns(runs="5")))
    assert "3 of the campaign's 5 runs" in unfinished.notes[0]
    content = (tmp_path / "runs.tsv").read_text()
    (tmp_path / "runs.tsv").write_text(content[: content.rindex("CIFAR-10")])
    assert read_log(path).accuracy.tolist() == [0.9399, 0.94], "a row that is being written is not read"


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
def test_tables_saved_by_a_spreadsheet_are_read(tmp_path, separator):
    rows = two_campaigns(options="epochs=9 pixels=24,24,32")
    clean = read_log(written(tmp_path / "clean.tsv", rows))
    how = {"sep": separator, "encoding": "utf-8-sig", "lineterminator": "\r\n", "quoting": 1}
    saved = [dict.fromkeys(row, "") if not row else row | {"compile": row["compile"].upper()} for row in [*rows, {}]]
    saved = read_log(written(tmp_path / "saved.csv", saved, **how))
    assert saved.conditions == clean.conditions
    assert clean.conditions["compile"] == "True"
    assert clean.conditions["pixels"] == "24,24,32"
    np.testing.assert_array_equal(saved.accuracy, clean.accuracy)
    path = tmp_path / "timing_log.tsv"
    path.write_bytes(("\ufeff" + EPOCHS + '"1"\t0.5\t"94.5"\n').replace("\n", "\r\n").replace("\t", separator).encode())
    assert read_log(str(path)).seconds.tolist() == [1800]
    path.write_text("\ufeff" + RUN, newline="\r\n")
    assert read_log(str(path)).seconds.tolist() == [4]


@pytest.mark.parametrize("header", ["epoch", "epochs"])
def test_dawnbench_tables_are_read(tmp_path, header):
    path = tmp_path / "entry.tsv"
    path.write_text(f"{header}\thours\ttop1Accuracy\n0\t0\t12.5\n1\t0.002\t94.05\n\n2\t0.003\t94.19\n\n\n")
    log = read_log(str(path))
    assert (log.accuracy.tolist(), log.reached) == ([0.9419], (1, 1))
    np.testing.assert_allclose([log.seconds[0], log.goal_seconds[0]], [10.8, 7.2])
    np.testing.assert_allclose(log.epochs, [[0, 7.2, 10.8], [0.125, 0.9405, 0.9419]])


def test_published_entries_are_read():
    files = sorted((REPO / "published" / "dawnbench").glob("*.tsv"))
    assert len(files) == 10
    assert all(read_log(str(path)).reached == (1, 1) for path in files)


def test_shares_of_a_campaign_are_read_as_one_log(tmp_path):
    rows = two_campaigns()[1:]
    whole = read_log(written(tmp_path / "whole.tsv", rows))
    for i in range(2):
        share = [row | {"share": f"{i}/2", "campaign": f"c{i}"} for row in rows[i::2]]
        written(tmp_path / f"share{i}.tsv", share)
    for source in (f"{tmp_path}/share1.tsv,{tmp_path}/share0.tsv", f"{tmp_path}/share*.tsv"):
        log = read_log(source)
        np.testing.assert_array_equal(log.accuracy, whole.accuracy)
        assert (log.reached, log.conditions, log.notes) == (whole.reached, whole.conditions, ())
    written(tmp_path / "share2.tsv", share)
    assert "run 1 is in " in error_of(f"{tmp_path}/share*.tsv")
    written(tmp_path / "share1.tsv", [row | {"options": "epochs=20"} for row in share])
    told = error_of(f"{tmp_path}/share0.tsv,{tmp_path}/share1.tsv")
    assert "other options (epochs=20, not epochs=18)" in told
    written(tmp_path / "share1.tsv", [row | {"seed": "7.5"} for row in share])
    assert "line 2: seed is '7.5'" in error_of(f"{tmp_path}/share0.tsv,{tmp_path}/share1.tsv")


DAMAGED = [
    ("", ", line 1: neither"),
    ("hello\n", ", line 1: neither"),
    (EPOCHS + "1\t0.1\n", ", line 2: top1Accuracy is '', not a number of 0 to 100"),
    (EPOCHS + "1\t0.1\t93\n2\tlong\t94\n", ", line 3: hours is 'long', not a number"),
    (EPOCHS + "1\t0.1\t93\n\n2\t0.2\t93\t94\n", ", line 4: neither"),
    ("epoch\thours\n1\t0.1\n", ", line 1: no column top1Accuracy"),
    (EPOCHS, ", line 1: a header and nothing below"),
    ("\t".join(COLUMNS) + "\n", ", line 1: a header and nothing below"),
    (EPOCHS.replace("epoch", "epoch\thours") + "1\t1\t1\t94\n", ", line 1: more than one column hours"),
    ("x\nTrain acc 0.9 loss 0.9, validation acc 0.9", ", line 2: not a whole run line"),
    (RUN + RUN.replace("acc 0.9 loss 0.9 w", "acc 94.1 loss 0.9 w"), ", line 2: accuracy is '94.1', not"),
    (RUN + RUN.replace("4.0s", "0.0s"), ", line 2: seconds is '0.0', not"),
    (RUN.replace("loss 0.9,", "loss low,"), ", line 1: train_loss is 'low', not"),
    (TABLE + "0\t98\t1\t0.94\t1\t7\n1\t0.98\t1\t94\t1\t7\n", ", line 3: accuracy is '94', not"),
    *((EPOCHS + f"1\t1\t{top}\n", f", line 2: top1Accuracy is '{top}'") for top in ("100.5", "-1", "nan")),
    *((EPOCHS + f"1\t{hours}\t94\n", f", line 2: hours is '{hours}'") for hours in ("-1", "nan", "inf", "1e300")),
    (EPOCHS + "1\t0\t94\n", ", line 2: hours of the last epoch is 0"),
    (EPOCHS + '1\t"1\t94\n', ", line 2: neither"),
    (EPOCHS + "1\t\udcff\t94\n", ", line 2: cannot be read"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED)
def test_a_damaged_file_is_named_with_its_line(tmp_path, content, message):
    path = tmp_path / "log"
    path.write_bytes(content.encode(errors="surrogateescape"))
    told = error_of(path)
    assert told.startswith(str(path))
    assert message in told


@pytest.mark.parametrize(
    ("column", "text"),
    [
        *(("seconds", text) for text in ("0", "nan", "inf", "fast", "")),
        *(("validation_count", text) for text in ("10001", "many", "-1", "9" * 400, "9" * 5000)),
        *(("train_loss", ""), ("validation_loss", "low"), ("goal_seconds", "0"), ("validation_images", "0")),
    ],
)
def test_a_damaged_field_of_runs_tsv_is_named_with_its_line(tmp_path, column, text):
    rows = two_campaigns()
    rows[2][column] = text
    path = written(tmp_path / "runs.tsv", rows)
    assert error_of(path).startswith(f"{path}, line 4: {column} is {text[:40]!r}, not a number")


def test_a_run_that_is_there_twice_is_named_with_its_line(tmp_path):
    rows = two_campaigns()
    rows[3]["run"] = "0"
    assert ", line 5: run 0 is there a second time" in error_of(written(tmp_path / "runs.tsv", rows))


@pytest.mark.parametrize("name", ["logs/demo/runs.tsv", "logs/demo/timing_log.tsv", "run_log.txt"])
def test_random_damage_is_read_or_refused(tmp_path, name):
    content, dice = (REPO / name).read_bytes(), random.Random(0)
    path = tmp_path / "log"
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(dice.randrange(1, 20)):
            damaged[dice.randrange(len(damaged))] = dice.choice([0, 9, 10, 34, 44, 46, 49, 57, 120, 255])
        path.write_bytes(damaged[: dice.randrange(len(damaged))] if dice.random() < 0.3 else damaged)
        with contextlib.suppress(ConfigError):
            log = read_log(str(path))
            assert len(log.accuracy) == len(log.seconds) > 0


@pytest.mark.parametrize("column", ["train_loss", "validation_loss"])
@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_diverged_run_has_not_reached_the_goal(tmp_path, column, loss):
    rows = two_campaigns()
    rows[3][column] = loss
    log = read_log(written(tmp_path / "runs.tsv", rows))
    assert (log.reached, log.diverged) == ((1, 1), 1)
    assert math.isnan(log.goal_seconds[2])
    assert math.isnan(log.loss[2])
    losses = {"train_loss": "0.9", "validation_loss": "0.9"} | {column: loss}
    line = "Train acc 0.9 loss {train_loss}, validation acc 0.9500 loss {validation_loss} wall time 4.0s\n"
    row = "0\t0.9\t{train_loss}\t0.9500\t{validation_loss}\t4.0\n"
    for head, form in (("", line), (TABLE, row)):
        path = tmp_path / "log"
        path.write_text(head + form.format(train_loss="0.9", validation_loss="0.9") + form.format(**losses))
        log = read_log(str(path))
        assert (log.reached, log.diverged) == ((1, 1), 1), form


def test_of_several_launches_in_one_log_the_last_counts(tmp_path):
    path = tmp_path / "log.txt"
    killed, resumed = our_form([0.91, 0.92], "a"), our_form([0.91, 0.92, 0.93, 0.94], "a")
    path.write_text(killed + "Train acc 0.98\n" + resumed + our_form([], "a"))
    log = read_log(str(path))
    assert log.accuracy.tolist() == [0.91, 0.92, 0.93, 0.94]
    assert not any("other campaigns" in note for note in log.notes)
    other = our_form([0.91], "b").replace("0123456789ab", "ffff") + "1 runs reached 0.94 out of 1\n"
    path.write_text(other + resumed)
    log = read_log(str(path))
    assert "holds 1 other campaigns, with different digest" in log.notes[0]
    assert "has no summary" in log.notes[1], "the summary is another campaign's"
    path.write_text(our_form([0.91, 0.92], "a") + "# restart 1 of 2: 2 of 4 runs made before\n" + RUN)
    assert read_log(str(path)).accuracy.tolist() == [0.91, 0.92, 0.9], "a restart within a launch"


@pytest.mark.parametrize("counts", [(5, 2), (0, 2), (1, 3)])
def test_a_summary_that_contradicts_its_runs_is_not_used(tmp_path, counts):
    path = tmp_path / "log.txt"
    path.write_text(
        our_form([0.91, 0.95]) + "Lowest accuracy 0.5 median 0.5\n{} runs reached 0.94 out of {}\n".format(*counts)
    )
    log = read_log(str(path))
    assert (log.reached, "not used" in log.notes[0], math.isnan(log.lowest)) == ((1, 1), True, True)


def test_epochs_beside_a_table_give_the_median_curve_and_its_range(tmp_path):
    """Of the last campaign; what a killed run left of itself does not count."""
    table = pd.read_csv(REPO / "logs" / "demo" / "runs.tsv", sep="\t", dtype=str, keep_default_na=False)
    table.to_csv(tmp_path / "runs.tsv", sep="\t", index=False)
    campaign = table["campaign"].iloc[-1]
    rows = [("older", 0, 1, 99, 0.9), (campaign, 0, 1, 50, 0.8)]
    rows += [(campaign, run, epoch, 10 * epoch + run, (epoch + run) / 10) for run in range(3) for epoch in (1, 2)]
    epochs = pd.DataFrame(rows, columns=["campaign", "run", "epoch", "seconds", "validation_accuracy"])
    epochs.to_csv(tmp_path / "epochs.tsv", sep="\t", index=False)
    log = read_log(str(tmp_path / "runs.tsv"))
    assert [values.tolist() for values in log.epochs] == [[11, 21], [0.2, 0.3]]
    assert [values.tolist() for values in log.spread] == [[0.1, 0.2], [0.3, 0.4]]
