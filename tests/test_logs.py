"""What is read of logs and tables that were cut, joined or edited by hand: the last campaign's runs, or one line."""

import math

import pytest
from test_compare import OUR_HEAD, our_form, runs_table

from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.results.campaign import LARGEST
from large_batch_cifar_10_fast.results.logs import read_log
from large_batch_cifar_10_fast.results.tables import COLUMNS, reached_goal, read_rows
from large_batch_cifar_10_fast.settings.settings import Refusal

RUN = "Train acc 0.9 loss 0.9, validation acc 0.9 loss 0.9 wall time 4.0s\n"
EPOCHS = "epoch\thours\ttop1Accuracy\n"
PUBLISHED = "run\ttrain_acc\ttrain_loss\tvalid_acc\tvalid_loss\tseconds\n"


def refusal(read, *arguments) -> str:
    with pytest.raises(Refusal) as refused:
        read(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RUN + RUN.replace("acc 0.9 loss 0.9 w", "acc 94.1 loss 0.9 w"), ", line 2: validation acc is '94.1', not"),
        (RUN + RUN.replace("acc 0.9 loss 0.9 w", "acc nan loss 0.9 w"), ", line 2: validation acc is 'nan', not"),
        (RUN.replace("Train acc 0.9", "Train acc 98.8"), ", line 1: train acc is '98.8', not a number from 0 to 1"),
        *((RUN.replace("4.0s", f"{time}s"), f", line 1: wall time is '{time}'") for time in ("0.000", "nan", "inf")),
        *((EPOCHS + f"1\t1\t{top}\n", f", line 2: top1Accuracy is '{top}'") for top in ("100.5", "-1", "nan")),
        *((EPOCHS + f"1\t{hours}\t94\n", f", line 2: hours is '{hours}'") for hours in ("-1", "nan", "inf", "1e300")),
        (EPOCHS.replace("epoch", "epoch\thours") + "1\t1\t1\t94\n", ", line 1: more than one column hours"),
        (EPOCHS + "1\t0\t94\n", ": hours of the last epoch is '0', not a number above 0"),
        (PUBLISHED + "0\t98\t1\t0.94\t1\t7\n1\t0.98\t1\t94\t1\t7\n", ", line 3: valid_acc is '94', not"),
        (PUBLISHED + "0\t0.98\t1\t0.94\t1\t-7\n", ", line 2: seconds is '-7', not a number above 0"),
        (PUBLISHED, ", line 1: a header and nothing below it"),
        ("\t".join(COLUMNS), ", line 1: a header and nothing below it"),
        ("\t".join(COLUMNS) + "\n", ", line 1: a header and nothing below it"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "log"
    path.write_text(content)
    assert refusal(read_log, str(path)).startswith(f"{path}{message}")


def test_an_epoch_before_the_training_may_take_no_time(tmp_path):
    path = tmp_path / "entry.tsv"
    path.write_text(EPOCHS + "0\t0\t94.5\n1\t0.5\t94.6\n")
    log = read_log(str(path))
    assert (log.seconds.tolist(), log.goal_seconds.tolist()) == ([1800], [1800])


def edited(path, line: int, **fields: str) -> str:
    """The runs.tsv of two campaigns with some fields of one line changed."""
    runs_table(path)
    rows = [row.split("\t") for row in path.read_text().splitlines()]
    for name, text in fields.items():
        rows[line - 1][COLUMNS.index(name)] = text
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(path)


SPOILT = [
    *((name, "many", "a whole number") for name in ("run", "seed", "validation_count", "peak_memory")),
    *((name, "0", "a whole number above 0") for name in ("workers", "processes", "validation_images")),
    *(("runs", text, "a whole number from 1 to 100000") for text in ("", "0", "1000000000000000")),
    *(("validation_count", "9" * digits, "a whole number") for digits in (20, 400, 5000)),
    ("micro_batches", "1.5", "a whole number above 0"),
    ("train_accuracy", "98.8", "a number from 0 to 1"),
    ("validation_accuracy", "nan", "a number from 0 to 1"),
    ("train_loss", "", "a number"),
    ("validation_loss", "low", "a number"),
    *((name, "-1", "a number from 0 up, and finite") for name in ("upload", "training", "last_validation")),
    *(("seconds", text, "a number above 0, and finite") for text in ("0", "nan", "inf", "fast")),
    ("goal_epoch", "second", "a whole number above 0"),
    ("goal_seconds", "0", "a number above 0, and finite"),
]


@pytest.mark.parametrize(("column", "text", "kind"), SPOILT)
def test_a_spoilt_field_of_runs_tsv_is_named_to_compare_and_to_resume(tmp_path, column, text, kind):
    path = edited(tmp_path / "runs.tsv", 4, **{column: text})
    expected = f"{path}, line 4: {column} is {text[:40]!r}, not {kind}"
    assert refusal(read_log, path) == expected
    assert refusal(read_request, ["--resume", "--out", str(tmp_path)], {}) == expected


@pytest.mark.parametrize(
    ("line", "fields", "message"),
    [
        (3, {"validation_count": "10001"}, "validation_count is 10001, of 10000 validation_images"),
        (4, {"run": "0", "seed": "7"}, "run 0 of campaign b is there a second time: take one of them out"),
        (5, {"seed": "8"}, "seed is 8, but 9 by campaign b's first row"),
        (4, {"share": "0/2"}, "run 1 is none of share 0/2 of 3 runs"),
        (5, {"run": "3", "seed": "10"}, "run 3 is none of share 0/1 of 3 runs"),
        (
            3,
            {"share": "half"},
            "share half has none of 3 runs: give I/N, I from 0, below N and below the number of runs",
        ),
    ],
)
def test_rows_of_runs_tsv_that_contradict_each_other_are_named(tmp_path, line, fields, message):
    path = edited(tmp_path / "runs.tsv", line, **fields)
    assert refusal(read_log, path) == f"{path}, line {line}: {message}"
    assert refusal(read_request, ["--resume", "--out", str(tmp_path)], {}) == f"{path}, line {line}: {message}"


def test_a_quote_that_nobody_closes_is_refused(tmp_path):
    path = edited(tmp_path / "runs.tsv", 3, options='"' + "x" * 200_000)
    assert refusal(read_log, path).startswith(f"{path} is not a table (field larger")


@pytest.mark.parametrize("column", ["train_loss", "validation_loss"])
@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_run_whose_loss_is_not_finite_has_not_reached_the_goal(tmp_path, column, loss):
    path = tmp_path / "runs.tsv"
    log = read_log(edited(path, 5, **{column: loss}))
    assert (log.reached, log.diverged) == ((1, 1), 1)
    assert math.isnan(log.goal_seconds[2])
    assert [reached_goal(row) for row in read_rows(path)] == [False, False, True, False]
    losses = {"train_loss": "0.9", "validation_loss": "0.9"} | {column: loss}
    line = "Train acc 0.9 loss {train_loss}, validation acc 0.9500 loss {validation_loss} wall time 4.0s\n"
    row = "0\t0.9\t{train_loss}\t0.9500\t{validation_loss}\t4.0\n"
    for head, form in (("", line), (PUBLISHED, row)):
        path.write_text(head + form.format(train_loss="0.9", validation_loss="0.9") + form.format(**losses))
        log = read_log(str(path))
        assert (log.reached, log.diverged) == ((1, 1), 1), form


def launched(campaign: str, accuracies, made: int = 0, digest: str = "0123456789ab") -> str:
    head = OUR_HEAD.replace("0123456789ab", digest) + f"# campaign {campaign}, {made} of 4 runs made before\n"
    return our_form(accuracies).replace(OUR_HEAD, head)


def test_of_a_campaigns_launches_in_one_log_the_last_tells_its_runs(tmp_path):
    path = tmp_path / "log.txt"
    killed, told = launched("a", [0.91, 0.92]), launched("a", [0.91, 0.92, 0.93, 0.94], made=2)
    path.write_text(killed + "Train acc 0.98\n" + told + launched("a", [], made=4))
    log = read_log(str(path))
    assert log.accuracy.tolist() == [0.91, 0.92, 0.93, 0.94]
    assert not any("other campaigns" in note for note in log.notes)


def test_of_several_campaigns_in_one_log_the_last_is_read_and_the_others_are_told_of(tmp_path):
    path = tmp_path / "log.txt"
    first, last = launched("a", [0.91]) + "1 runs reached 0.94 out of 1\n", launched("c", [0.94])
    path.write_text(first + launched("b", [0.92, 0.93]) + launched("b", [0.92, 0.93], made=2) + last)
    log = read_log(str(path))
    assert log.accuracy.tolist() == [0.94]
    assert log.notes[0] == f"{path} holds 2 other campaigns: only the last one's runs are read"
    assert "has no summary" in log.notes[1], "another campaign's summary is not this one's"
    path.write_text(launched("a", [0.91], digest="ffff") + last)
    log = read_log(str(path))
    assert "holds 1 other campaigns, not all of the same digest: only" in log.notes[0]
    assert log.facts["digest"] == "0123456789ab"
    path.write_text(our_form([0.91]) + our_form([0.92]))
    assert "holds 1 other campaigns: only" in read_log(str(path)).notes[0], "a head without a name is one of its own"


def test_a_launch_that_healed_itself_is_one_launch(tmp_path):
    path = tmp_path / "log.txt"
    before, after = launched("a", [0.91, 0.92]), our_form([0.93, 0.94]).replace(OUR_HEAD, "")
    path.write_text(before + "# restart 1 of 2: 2 of 4 runs made before\n" + after)
    log = read_log(str(path))
    assert log.accuracy.tolist() == [0.91, 0.92, 0.93, 0.94]
    assert len(log.notes) == 1
    assert "has no summary" in log.notes[0]


@pytest.mark.parametrize(
    ("summary", "note"),
    [
        ("5 runs reached 0.94 out of 2", "1 to 1 reached 94%, its summary speaks of 5: not used"),
        ("0 runs reached 0.94 out of 2", "1 to 1 reached 94%, its summary speaks of 0: not used"),
        ("nan runs reached 0.94 out of 2", "has no summary"),
    ],
)
def test_a_summary_that_its_runs_contradict_is_not_used(tmp_path, summary, note):
    path = tmp_path / "log.txt"
    path.write_text(our_form([0.91, 0.95]) + summary + "\n")
    log = read_log(str(path))
    assert log.reached == (1, 1)
    assert note in log.notes[0]


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_reason_is_refused(tmp_path, digits):
    path = tmp_path / "log.txt"
    for line in (
        f"{'9' * digits} runs reached 0.94 out of 2",
        our_form([0.91, 0.95]).replace(" 10000 test", f" {'9' * digits} test"),
    ):
        path.write_text(our_form([0.91, 0.95]) + line + "\n")
        with pytest.raises(Refusal, match=r"(runs at 94%|test images) is '9+', not a whole number"):
            read_log(str(path))


def test_a_file_too_large_for_a_log_is_refused(tmp_path):
    path = tmp_path / "log.txt"
    with open(path, "wb") as file:
        file.truncate(LARGEST + 1)
    assert refusal(read_log, str(path)).startswith(f"{path}: larger than 64 MiB")
    assert refusal(read_log, "/dev/zero").startswith("/dev/zero: larger than 64 MiB")
