"""measure_gpu.sh, with the CPU in the GPU's place."""

import re
import subprocess
import sys

import pytest
from conftest import REPO, TINY, environment

from large_batch_cifar_10_fast.command_line import read_request

pytestmark = pytest.mark.slow

PARTS = ["facts", "tests", "bench", "first", "compare", "profile", "nccl", "campaign", "modern", "lineage", "teams"]
STAND_IN = f"""#!/bin/bash
# A Python that starts none of the programs, but writes down how it was asked to.
case $* in
    -c*torch.profiler*) shift 2; set -- profile "$@" ;;
    -m*ruff*) exit 1 ;;
    -m*) shift ;;
    *) exec {sys.executable} "$@" ;;
esac
(IFS=$'\\t'; echo "$*" >>"$CALLS")
case $* in *--resume) exit $INVALID ;; esac
"""


@pytest.fixture
def stand_in(tmp_path):
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return {"PYTHON": python, "CALLS": tmp_path / "calls"}


def _measure(*arguments, **variables) -> subprocess.CompletedProcess:
    command = ["bash", str(REPO / "measure_gpu.sh"), *map(str, arguments)]
    options = {"MEASURE_OPTIONS": " ".join([*TINY, "--epochs", "1"]), "MEASURE_PRECISION": "fp32"}
    return subprocess.run(command, env=environment(**options, **variables), capture_output=True, text=True, timeout=280)


def test_each_part_has_a_log_and_a_line_and_one_that_fails_costs_the_others_nothing(tiny_npz, tmp_path):
    parts = ("compare.said", "first.fp16", "profile")
    result = _measure("--data", tiny_npz, "--out", tmp_path, *parts, NPROC=1)
    assert result.returncode == 1, "there is nothing to compare"
    assert (tmp_path / "summary.txt").read_text() == result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["first.fp16", "compare.said", "profile"]
    assert [line.split()[2] for line in lines] == ["0,", "1,", "0,"]
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == sorted(parts)
    assert "Train acc" in lines[0]
    assert "compiled/runs.tsv: cannot be read" in (tmp_path / "compare.said.log").read_text()
    assert "CPU time total" in lines[2]
    assert (tmp_path / "fp16" / "runs.tsv").read_text().count("\n") == 3


def test_every_part_asks_the_programs_for_what_they_have(tiny_npz, tmp_path, stand_in):
    out = tmp_path / "out"
    out.mkdir()
    of_an_earlier_call = "gone   status   1,    0 s\n"
    (out / "summary.txt").write_text(of_an_earlier_call)
    result = _measure("--data", tiny_npz, "--out", out, *PARTS, **stand_in)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(dict.fromkeys(line.split()[0].split(".")[0] for line in result.stdout.splitlines())) == PARTS
    assert re.search("^facts .* torch 2[.]", result.stdout, re.MULTILINE)
    calls = stand_in["CALLS"].read_text().replace("large_batch_cifar_10_fast.", "")
    asked = [line.split("\t") for line in calls.splitlines()]
    programs = [program for program, *_ in asked]
    assert programs.count("launch") == 12
    assert {*programs} == {"pytest", "bench", "launch", "compare", "profile", "torch.distributed.run"}
    for program, *arguments in asked:
        if program == "torch.distributed.run":
            arguments = arguments[arguments.index("train") + 1 :]
        if "--against" in arguments:
            assert arguments == ["--recipe", "muon", "--against", "apple2019", "--rounds", "20"]
        elif program not in ("pytest", "compare"):
            config, _ = read_request([word for word in arguments if word != "--input_pipelines"])
            assert config.data == str(tiny_npz) or program == "bench"


def test_a_campaign_that_was_broken_off_is_gone_on_with_and_a_part_may_be_of_a_part(tiny_npz, tmp_path, stand_in):
    calls = stand_in["CALLS"]
    (tmp_path / "campaign").mkdir()
    asked = {}
    for table, refused in (("", 0), ("rows", 0), ("rows", 1), ("rows", 2)):
        (tmp_path / "campaign" / "runs.tsv").write_text(table)
        parts = ("--data", tiny_npz, "--out", tmp_path, "campaign", "first.bf16")
        status = _measure(*parts, INVALID=refused, **stand_in).returncode
        first, *campaign = calls.read_text().splitlines()
        calls.unlink()
        assert "bf16" in first
        asked[table, refused] = [line.endswith("--resume") for line in campaign], status
    assert asked == {
        ("", 0): ([False], 0),
        ("rows", 0): ([True], 0),
        ("rows", 1): ([True], 1),
        ("rows", 2): ([True, False], 0),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("everything",), "everything is no part"),
        (("first.fp8",), "first.fp8 is no part"),
        (("facts tests",), "facts tests is no part"),
        (("--out",), "a value"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    result = _measure(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
