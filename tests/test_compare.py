"""Conclusions, statuses and the choice of the reference, of any two logs."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from conftest import REPO
from test_read_logs import PUBLISHED, our_form, published_form, runs_rows, two_campaigns, written

from large_batch_cifar_10_fast import compare
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.options import as_pairs
from large_batch_cifar_10_fast.read_logs import read_log


@pytest.fixture
def run_compare(capsys):
    """Run the command; return its exit status, STDOUT and STDERR."""

    def run(*arguments) -> tuple[int, str, str]:
        try:
            status = compare.main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def conclusion(run_compare):
    """Run it with --json; return its output and the exit status."""

    def run(*arguments) -> tuple[dict, int]:
        status, out, err = run_compare(*arguments, "--json")
        assert err == ""
        return json.loads(out), status

    return run


@pytest.fixture
def log(tmp_path):
    def write(name: str, content: str):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write


def verdicts(found: dict) -> list[str]:
    return [found["conclusions"][name]["verdict"] for name in ("accuracy", "time", "goal")]


def test_published_against_itself_is_equivalent(conclusion):
    found, status = conclusion("published", "published")
    assert (verdicts(found), status) == (["equivalent", "equivalent", "significant"], 0)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["reached 94%"]["mine"] == "41 of 50, 82% [69%, 90%]"
    np.testing.assert_allclose(rows["accuracy mean, %"]["interval"], [-0.073, 0.073], atol=5e-4)
    np.testing.assert_allclose(rows["seconds mean"]["interval"], [0.982, 1.019], atol=5e-4)


def test_three_tenths_of_a_point_less_is_worse(log, conclusion):
    path = log("log.txt", published_form(shift=0.003, summary=""))
    found, status = conclusion(path, "published")
    assert (verdicts(found)[0], status) == ("worse", 1)
    found, status = conclusion("published", path)
    assert (verdicts(found)[0], status) == ("better", 0)


def test_slower_counts_only_on_the_same_hardware(log, conclusion):
    fast = log("fast", our_form(0.9410 + 0.0001 * np.arange(20)))
    slow = log("slow", fast.read_text().replace("time 4.", "time 8."))
    other = log("other", slow.read_text().replace("H200", "A100"))
    found, status = conclusion(slow, fast)
    assert (verdicts(found)[:2], status) == (["equivalent", "worse"], 1)
    assert conclusion(other, fast)[1] == 0
    assert conclusion(fast, slow)[1] == 0


def test_three_runs_are_too_few_and_it_says_how_many_are_needed(log, run_compare, conclusion):
    path = log("log.txt", published_form(PUBLISHED[:3], summary=""))
    found, status = conclusion(path, "published")
    assert (verdicts(found)[0], status) == ("open", 0)
    text = run_compare(path, "published")[1]
    assert re.search(r"95% confidence interval \[-\d.*\], n = 3 and 50\. Equivalence .* about \d+ runs on each", text)
    assert "has no summary: its campaign did not finish" in text


def test_unreadable_logs_end_with_status_2_and_one_line(log, run_compare):
    status, out, err = run_compare(log("log.tsv", "epoch\thours\ttop1Accuracy\n1\tlong\t94\n"), "published")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "log.tsv, line 2: hours is 'long'" in err
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.compare", "absent.txt"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert "absent.txt: cannot be read" in result.stderr


def test_a_count_that_rounding_hides_is_bounded_not_guessed(log, conclusion):
    rows = conclusion(log("log.txt", published_form(summary="")), "published")[0]["rows"]
    assert (rows[1]["mine"], rows[1]["difference"]) == ("38 to 47 of 50 (rounded)", None)


def test_differing_conditions_are_listed_above_the_table(log, run_compare):
    mine = log("log.txt", our_form(0.9410 + 0.0002 * np.arange(20)).replace("H200", "A100"))
    other = our_form(0.9411 + 0.0002 * np.arange(20)).replace("0123456789ab", "ffff").replace("=18", "=20")
    head = run_compare(mine, log("other.txt", other))[1].partition("accuracy mean")[0]
    for part in ("digest: 0123456789ab (mine), ffff", "device: 1 x NVIDIA A100", "epochs: 18 (mine), 20"):
        assert part in head
    entry = REPO / "published" / "dawnbench" / "basenet.tsv"
    assert "clock: set-up and training, not validation (mine), training and validation" in run_compare(mine, entry)[1]


def test_diverged_runs_are_counted_and_left_out_of_the_mean_loss(log, conclusion):
    lines = our_form([0.9410, 0.9412, 0.1000]).splitlines()
    lines[-1] = lines[-1].replace("loss 0.991", "loss nan")
    found, _ = conclusion(log("log.txt", "\n".join(lines) + "\n"), "published")
    rows = {row["name"]: row for row in found["rows"]}
    assert (rows["loss mean"]["mine"], rows["accuracy lowest, %"]["mine"]) == ("0.991", "10.000")
    assert any("1 runs diverged" in note for note in found["notes"])
    path = log("log.txt", our_form([0.1, 0.1, 0.1]).replace("loss 0.991", "loss nan"))
    found, status = conclusion(path, "published")
    assert (found["conclusions"]["accuracy"]["text"], status) == ("Accuracy: all 3 runs of mine diverged.", 1)
    found, status = conclusion("published", path)
    assert (verdicts(found)[0], status) == ("open", 0)
    assert found["conclusions"]["accuracy"]["text"] == "Accuracy: all 3 runs of the reference diverged."


def test_a_timing_log_has_the_conditions_of_the_table_beside_it(tmp_path, run_compare):
    for name in ("timing_log.tsv", "runs.tsv"):
        shutil.copy(REPO / "logs" / "basenet_bf16" / name, tmp_path)
    mine, entry = tmp_path / "timing_log.tsv", REPO / "published" / "dawnbench" / "basenet.tsv"
    text = run_compare(mine, entry)[1]
    assert "  images: cifar10.npz (mine), CIFAR-10 (reference)\n  epochs: 2 (mine), 40 (reference)\n" in text
    table = (tmp_path / "runs.tsv").read_text()
    for unlike in (table.replace("\t1301.69", "\t1301.7"), "no table", ""):
        (tmp_path / "runs.tsv").write_text(unlike)
        assert f"mine ({mine}): unknown images, device, clock\n" in run_compare(mine, entry)[1]


def row_of(*arguments: str, **fields) -> dict:
    """Return the row that a run of these options would leave."""
    _, recipe = read_request([*arguments], {})
    options = {"recipe": recipe.name, "options": as_pairs(asdict(recipe)), "workers": str(recipe.workers)}
    return runs_rows("c", ["9400"], **options, **fields)[0]


def test_the_reference_of_the_demo_is_the_demos_log(tmp_path, run_compare):
    log = REPO / "logs" / "demo" / "runs.tsv"
    demo = row_of("--demo", images="synthetic", digest=read_log(str(log)).conditions["digest"])
    path = written(tmp_path / "runs.tsv", [demo])
    status, out, _ = run_compare(path)
    assert out.startswith(f"Reference: {log} (apple2019 with the same options on")
    assert status == 0
    for other in ({"digest": "another"}, {"options": demo["options"].replace("epochs=7", "epochs=8")}):
        path = written(tmp_path / "runs.tsv", [demo | other])
        status, out, err = run_compare(path)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "name a REFERENCE" in err


def test_the_reference_of_apple2019_on_cifar10_is_the_published_campaign(tmp_path, conclusion, run_compare):
    path = written(tmp_path / "runs.tsv", [row_of(images="CIFAR-10")])
    found, _ = conclusion(path)
    assert (found["reference"], found["why"]) == ("published", "apple2019 on CIFAR-10, the 50 published runs")
    path = written(tmp_path / "runs.tsv", [row_of("--recipe", "basenet", images="CIFAR-10", digest="0")])
    assert run_compare(path)[0] == 2
    assert "does not say its recipe and images" in run_compare(REPO / "published" / "dawnbench" / "basenet.tsv")[2]


def test_the_reference_on_other_images_is_the_most_similar_log_of_ours(tmp_path, conclusion, monkeypatch):
    monkeypatch.setattr(compare, "LOGS", tmp_path / "logs")
    conditions = {"images": "cifar10.npz", "digest": "d", "recipe": "muon", "precision": "bf16", "device": "A"}
    (tmp_path / "logs").mkdir()
    for name, runs, more in (
        ("fp32", 9, {"precision": "fp32"}),
        ("few", 2, {}),
        ("more", 3, {"options": "epochs=18.0 tail_epochs=0.0 activation=gelu"}),
        ("tail", 9, {"options": "epochs=18 tail_epochs=0.5"}),
        ("pixels", 9, {"options": "epochs=18 pixels=24"}),
        ("images", 9, {"digest": "e"}),
    ):
        written(tmp_path / "logs" / f"runs_{name}.tsv", runs_rows(name, ["9400"] * runs, **(conditions | more)))
    mine = written(tmp_path / "mine.tsv", runs_rows("mine", ["9400"] * 2, **conditions))
    assert conclusion(mine)[0]["reference"].endswith("runs_more.tsv"), "same precision, most runs"
    mine = tmp_path / "logs" / "runs_more.tsv"
    assert conclusion(mine)[0]["reference"].endswith("runs_few.tsv"), "another log than mine"


def test_shares_are_compared_as_one_campaign(tmp_path, conclusion):
    for i in range(2):
        rows = [row | {"share": f"{i}/2", "campaign": f"c{i}"} for row in two_campaigns()[1:][i::2]]
        written(tmp_path / f"share{i}.tsv", rows)
    assert conclusion(f"{tmp_path}/share0.tsv,{tmp_path}/share1.tsv", "published")[0]["rows"][0]["mine"] == "3"
