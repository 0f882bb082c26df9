"""Conclusions that hold, of any two logs."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast import compare
from large_batch_cifar_10_fast.results.logs import read_log
from large_batch_cifar_10_fast.results.tables import COLUMNS

PUBLISHED = pd.read_csv(REPO / "published" / "apple_8xv100_50_runs.tsv", sep="\t")
SUMMARY = (REPO / "published" / "apple_8xv100_summary.txt").read_text()


def published_form(rows: pd.DataFrame = PUBLISHED, shift: float = 0.0, summary: str = SUMMARY) -> str:
    """The published lines, made from the published table."""
    lines = ["Uploaded data to GPUs 0.086s", "Compute patch whitening statistics:     0.465s"]
    lines += [
        f"Train acc {row.train_acc:.3f} loss {row.train_loss:.3f}, validation acc {row.valid_acc - shift:.3f} "
        f"loss {row.valid_loss:.3f} wall time {row.seconds:.3f}s"
        for row in rows.itertuples()
    ]
    return "\n".join(lines) + "\n" + summary


OUR_HEAD = """# large_batch_cifar_10_fast 0.1.0, commit 0, code 0, 2026-11-21T00:00:00Z
# 8 workers on 1 process, 1 x NVIDIA H200
# data CIFAR-10: 50000 training and 10000 test images, SHA-256 0123456789ab
# recipe apple2019 lr_scaler=1.5 epochs=18 width=64
# settings runs=1 precision=fp16 out=.
"""


def our_form(accuracies) -> str:
    lines = [
        f"Train acc 0.9880 loss 0.920, validation acc {accuracy:.4f} loss 0.991 wall time 4.{i:03d}s"
        for i, accuracy in enumerate(accuracies)
    ]
    return OUR_HEAD + "\n".join(lines) + "\n"


@pytest.fixture
def run_compare(capsys):
    """Run the command; its exit status, STDOUT and STDERR."""

    def run(*arguments) -> tuple[int, str, str]:
        try:
            status = compare.main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def conclusion(run_compare):
    """Run it with --json; what it told, and the exit status."""

    def run(*arguments) -> tuple[dict, int]:
        status, out, err = run_compare(*arguments, "--json")
        assert err == ""
        return json.loads(out), status

    return run


def test_a_count_that_rounding_hides_is_bounded_not_guessed(tmp_path, conclusion):
    path = tmp_path / "log.txt"
    path.write_text(published_form(summary=""))
    surely, at_most = int((PUBLISHED["valid_acc"] > 0.9405).sum()), int((PUBLISHED["valid_acc"] > 0.9395).sum())
    assert (surely, at_most) == (38, 47)
    assert read_log(str(path)).reached == (surely, at_most)
    rows = {row["name"]: row for row in conclusion(path, "published")[0]["rows"]}
    assert rows["reached 94%"]["mine"] == "38 to 47 of 50 (hidden by rounding)"
    assert rows["reached 94%"]["difference"] is None


def runs_table(path, **columns):
    """A runs.tsv of two campaigns, a of one run and b of three."""
    base = {**dict.fromkeys(COLUMNS, "1"), "share": "0/1"}
    rows = [
        {
            **base,
            "campaign": "a",
            "run": "0",
            "validation_count": "9300",
            "validation_images": "10000",
            "goal_seconds": "",
        },
        *(
            {
                **base,
                "campaign": "b",
                "runs": "3",
                "run": str(i),
                "seed": str(7 + i),
                "seconds": str(5 + i),
                "goal_seconds": goal,
                "validation_count": str(9399 + i),
                "validation_images": "10000",
            }
            for i, goal in enumerate(("", "4.5", "4.7"))
        ),
    ]
    table = pd.DataFrame(rows, columns=COLUMNS).assign(**columns)
    table.to_csv(path, sep="\t", index=False)
    return str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: neither"),
        ("hello\n", "line 1: neither"),
        ("epoch\thours\ttop1Accuracy\n1\t0.1\n", "line 2: 2 fields where the header has 3"),
        ("epoch\thours\ttop1Accuracy\n1\t0.1\t93\n2\tlong\t94\n", "line 3: hours is 'long', not a number"),
        ("epoch\thours\n1\t0.1\n", "line 1: no column top1Accuracy"),
        ("epoch\thours\ttop1Accuracy\n", "line 1: a header and nothing below"),
        ("x\nTrain acc 0.9 loss 0.9, validation acc 0.9", "line 2: not a whole run line"),
    ],
)
def test_unreadable_logs_end_with_status_2_file_line_and_reason(tmp_path, content, message, run_compare):
    path = tmp_path / "some.tsv"
    path.write_text(content)
    status, out, err = run_compare(path, "published")
    assert (status, out) == (2, "")
    assert err.startswith(f"compare: {path}, {message}")
    assert err.count("\n") == 1


def test_the_command_ends_with_its_status():
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.compare", "absent.txt"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert "absent.txt: cannot be read" in result.stderr


def test_published_against_itself_is_equivalent(conclusion):
    told, status = conclusion("published", "published")
    assert (told["conclusions"]["accuracy"]["verdict"], told["conclusions"]["time"]["verdict"], status) == (
        "equivalent",
        "equivalent",
        0,
    )


@pytest.mark.slow
def test_three_tenths_of_a_point_less_is_a_shortfall(tmp_path, conclusion):
    path = tmp_path / "log.txt"
    path.write_text(published_form(shift=0.003, summary=""))
    told, status = conclusion(path, "published")
    assert (told["conclusions"]["accuracy"]["verdict"], status) == ("worse", 1)
    told, status = conclusion("published", path)
    assert (told["conclusions"]["accuracy"]["verdict"], status) == ("better", 0)


def test_three_runs_tell_nothing_and_it_says_how_many_would(tmp_path, conclusion, run_compare):
    path = tmp_path / "log.txt"
    path.write_text(published_form(PUBLISHED[:3], summary=""))
    told, status = conclusion(path, "published")
    accuracy = told["conclusions"]["accuracy"]
    assert (accuracy["verdict"], status) == ("open", 0)
    assert "too few runs to tell" in accuracy["text"]
    assert "runs on each side" in accuracy["text"]
    _, text, _ = run_compare(path, "published")
    assert "has no summary: its campaign did not finish" in text


def test_other_conditions_are_pointed_out_above_the_table(tmp_path, run_compare):
    path = tmp_path / "log.txt"
    path.write_text(our_form(0.9410 + 0.0002 * np.arange(20)).replace("H200", "A100"))
    other = tmp_path / "other.txt"
    other.write_text(our_form(0.9411 + 0.0002 * np.arange(20)).replace("0123456789ab", "ffff").replace("=18", "=20"))
    _, text, _ = run_compare(path, other)
    head, _, rest = text.partition("runs  ")
    for part in ("digest: 0123456789ab (mine), ffff", "device: 1 x NVIDIA A100", "epochs: 18 (mine), 20"):
        assert part in head
    assert "seconds median" in rest


@pytest.mark.slow
def test_slower_counts_only_on_the_same_hardware(tmp_path, conclusion):
    slow, fast, other = (tmp_path / name for name in ("slow", "fast", "other"))
    fast.write_text(our_form(0.9410 + 0.0001 * np.arange(20)))
    slow.write_text(fast.read_text().replace("time 4.", "time 8."))
    other.write_text(slow.read_text().replace("H200", "A100"))
    told, status = conclusion(slow, fast)
    assert (told["conclusions"]["accuracy"]["verdict"], told["conclusions"]["time"]["verdict"], status) == (
        "equivalent",
        "worse",
        1,
    )
    assert conclusion(other, fast)[1] == 0
    assert conclusion(fast, slow)[1] == 0


def test_diverged_runs_are_counted_and_their_loss_set_aside(tmp_path, conclusion):
    path = tmp_path / "log.txt"
    lines = our_form([0.9410, 0.9412, 0.1000]).splitlines()
    lines[-1] = lines[-1].replace("loss 0.991", "loss nan")
    path.write_text("\n".join(lines) + "\n")
    told, _ = conclusion(path, "published")
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["loss mean"]["mine"] == "0.991"
    assert rows["accuracy lowest, %"]["mine"] == "10.000"
    assert any("1 runs without a finite loss" in note for note in told["notes"])


def test_where_all_runs_diverged_it_says_so(tmp_path, conclusion):
    path = tmp_path / "log.txt"
    path.write_text(our_form([0.1, 0.1, 0.1]).replace("loss 0.991", "loss nan"))
    told, status = conclusion(path, "published")
    assert told["conclusions"]["accuracy"]["text"] == "Accuracy: all 3 runs of mine diverged."
    assert {row["name"]: row for row in told["rows"]}["loss mean"]["mine"] == "unknown"
    assert status == 1
    told, status = conclusion("published", path)
    assert told["conclusions"]["accuracy"]["text"] == "Accuracy: all 3 runs of the reference diverged."
    assert (told["conclusions"]["accuracy"]["verdict"], status) == ("open", 0)
    entry = REPO / "published" / "dawnbench" / "basenet.tsv"
    assert "diverged" not in conclusion(entry, "published")[0]["conclusions"]["accuracy"]["text"], "no loss is told"


def test_a_clock_that_counts_validation_is_named(tmp_path, capsys):
    mine = REPO / "logs" / "demo" / "runs.tsv"
    compare.main([str(mine), str(REPO / "published" / "dawnbench" / "basenet.tsv")])
    told = capsys.readouterr().out
    expected = "clock: set-up and training, not validation (mine), training and validation, not set-up (reference)"
    assert expected in told
    compare.main([str(mine)])
    told = capsys.readouterr().out
    assert "clock:" not in told
    assert "does not say what its clock counts" not in told


def test_a_timing_log_tells_what_the_table_beside_it_does(tmp_path, capsys):
    entry = str(REPO / "published" / "dawnbench" / "basenet.tsv")
    for name in ("timing_log.tsv", "runs.tsv"):
        shutil.copy(REPO / "logs" / "basenet_bf16" / name, tmp_path)
    mine = tmp_path / "timing_log.tsv"
    compare.main([str(mine), entry])
    told = capsys.readouterr().out
    assert "  images: cifar10.npz (mine), CIFAR-10 (reference)\n  epochs: 2 (mine), 40 (reference)\n" in told
    assert "  clock: set-up and training, not validation (mine), training and validation" in told
    table = (tmp_path / "runs.tsv").read_text()
    for unlike in (table.replace("\t1301.69", "\t1301.7"), "no table", ""):
        (tmp_path / "runs.tsv").write_text(unlike)
        compare.main([str(mine), entry])
        told = capsys.readouterr().out
        assert "mine (" + str(mine) + ") does not say on which images and device\n" in told
        assert "does not say what its clock counts\n" in told
