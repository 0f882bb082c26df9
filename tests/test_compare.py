"""Conclusions, statuses and the choice of the reference, of any two logs."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from conftest import REPO, python
from test_read_logs import WITHOUT_SUMMARY, our_form, runs_rows, written

from large_batch_cifar_10_fast import compare
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.options import as_pairs
from large_batch_cifar_10_fast.read_logs import read_log

DEMO = REPO / "logs" / "demo" / "runs.tsv"


@pytest.fixture
def conclusion(capsys):
    """Return a function that runs the command with --json; it returns the output and the exit status."""

    def run(*arguments) -> tuple[dict, int]:
        status = compare.main([*map(str, arguments), "--json"])
        found = json.loads(capsys.readouterr().out)
        found["verdicts"] = [found["conclusions"][name]["verdict"] for name in ("accuracy", "time", "goal")]
        return found | {"rows": {row["name"]: row for row in found["rows"]}}, status

    return run


@pytest.fixture
def log(tmp_path):
    def write(name: str, content: str):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write


def test_published_against_itself_is_equivalent(conclusion):
    found, status = conclusion("published", "published")
    assert (found["verdicts"], status) == (["equivalent", "equivalent", "significant"], 0)
    assert found["rows"]["reached 94%"]["mine"] == "41 of 50, 82% [69%, 90%]"
    np.testing.assert_allclose(found["rows"]["accuracy mean, %"]["interval"], [-0.073, 0.073], atol=5e-4)
    np.testing.assert_allclose(found["rows"]["seconds mean"]["interval"], [0.982, 1.019], atol=5e-4)


def test_three_tenths_of_a_point_less_is_worse_and_three_runs_are_too_few(log, conclusion):
    less = re.sub(r"(?<=validation acc )\S+", lambda accuracy: f"{float(accuracy[0]) - 0.003:.3f}", WITHOUT_SUMMARY)
    mine, few = log("less.txt", less), log("few.txt", "".join(WITHOUT_SUMMARY.splitlines(keepends=True)[:7]))
    for pair, expected in (((mine, "published"), ("worse", 1)), (("published", mine), ("better", 0))):
        found, status = conclusion(*pair)
        assert (found["verdicts"][0], status) == expected
    found, status = conclusion(few, "published")
    assert (found["rows"]["runs"]["mine"], found["verdicts"][0], status) == ("3", "open", 0)


def test_slower_counts_only_on_the_same_hardware(log, conclusion):
    fast = log("fast", our_form(0.9410 + 0.0001 * np.arange(20)))
    slow = log("slow", fast.read_text().replace("time 4.", "time 8."))
    other = log("other", slow.read_text().replace("H200", "A100"))
    found, status = conclusion(slow, fast)
    assert (found["verdicts"][:2], status) == (["equivalent", "worse"], 1)
    assert (conclusion(other, fast)[1], conclusion(fast, slow)[1]) == (0, 0)


def test_a_picture_a_folder_or_an_empty_file_ends_with_status_2_and_one_line(tmp_path, log, error_line):
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\n,\0")
    for path in (tmp_path / "p.png", tmp_path, log("empty", ""), "absent.txt", "absent/*.tsv"):
        assert str(path) in error_line(compare.main, [str(path)])


def test_differing_conditions_are_listed_above_the_table(log):
    mine = log("log.txt", our_form(0.9410 + 0.0002 * np.arange(20)).replace("H200", "A100"))
    other = our_form(0.9411 + 0.0002 * np.arange(20)).replace("0123456789ab", "ffff").replace("=18", "=20")
    result = python("-m", "large_batch_cifar_10_fast.compare", mine, log("other.txt", other), cwd=REPO)
    head = result.stdout.partition("accuracy mean")[0]
    for part in ("digest: 0123456789ab (mine), ffff", "device: 1 x NVIDIA A100", "epochs: 18 (mine), 20"):
        assert part in head


def test_diverged_runs_are_counted_and_left_out_of_the_mean_loss(log, conclusion):
    good = our_form([0.9410, 0.9412, 0.1000])
    found, _ = conclusion(log("log.txt", "loss nan".join(good.rsplit("loss 0.991", 1))), "published")
    rows = found["rows"]
    assert (rows["loss mean"]["mine"], rows["accuracy lowest, %"]["mine"]) == ("0.991", "10.000")
    assert any("1 runs diverged" in note for note in found["notes"])
    path = log("log.txt", our_form([0.1, 0.1, 0.1]).replace("loss 0.991", "loss nan"))
    for arguments, expected in (((path, "published"), ("worse", 1)), (("published", path), ("open", 0))):
        found, status = conclusion(*arguments)
        assert (found["verdicts"][0], status) == expected


def test_the_reference_is_made_under_the_same_conditions(tmp_path, conclusion, monkeypatch):
    """For apple2019 on CIFAR-10 the published runs; else our log of the same options, images, then precision, runs."""
    demo = {"images": "synthetic", "digest": read_log(str(DEMO)).conditions["digest"]}
    for arguments, fields, reference in (([], {"images": "CIFAR-10"}, "published"), (["--demo"], demo, str(DEMO))):
        _, recipe = read_request(arguments, {})
        fields |= {"recipe": recipe.name, "options": as_pairs(asdict(recipe)), "workers": str(recipe.workers)}
        path = written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields))
        assert conclusion(path)[0]["reference"] == reference
    path = written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields | {"digest": "another"}))
    assert conclusion(path)[0]["reference"] == str(DEMO), "synthetic images differ in a few bits between CPUs"
    with pytest.raises(SystemExit):
        conclusion(written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields | {"images": "cifar10.npz"})))
    conditions = {"images": "cifar10.npz", "recipe": "muon", "precision": "bf16"}
    (tmp_path / "logs").mkdir()
    for name, runs, more in (
        *(("fp32", 9, {"precision": "fp32"}), ("few", 2, {}), ("images", 9, {"digest": "e"})),
        *(("tail", 9, {"options": "epochs=18 tail_epochs=0.5"}), ("pixels", 9, {"options": "epochs=18 pixels=24"})),
        ("more", 3, {"options": "epochs=18.0 tail_epochs=0.0 activation=gelu"}),  # removed options, inactive
    ):
        written(tmp_path / "logs" / f"runs_{name}.tsv", runs_rows(name, ["9400"] * runs, **(conditions | more)))
    monkeypatch.setattr(compare, "LOGS", tmp_path / "logs")
    mine = written(tmp_path / "mine.tsv", runs_rows("mine", ["9400"] * 2, **conditions))
    assert conclusion(mine)[0]["reference"].endswith("runs_more.tsv"), "same precision, most runs"
    assert conclusion(tmp_path / "logs" / "runs_more.tsv")[0]["reference"].endswith("runs_few.tsv"), "not mine itself"
