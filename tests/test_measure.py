"""The parts of measure_gpu.sh, with a stand-in for Python that records the programs instead of starting them."""

import subprocess
import sys

import pytest
from conftest import REPO, environment

from large_batch_cifar_10_fast.command_line import read_request

pytestmark = pytest.mark.slow

PARTS = ["facts", "tests", "bench", "first", "compare", "profile", "nccl", "campaign", "modern", "lineage", "teams"]
STAND_IN = f"""#!/bin/bash
case $* in
    -c*torch.profiler*) shift 2; set -- profile "$@" ;;
    -m*ruff*) exit 1 ;;
    -m*) shift ;;
    *) exec {sys.executable} "$@" ;;
esac
(IFS=$'\\t'; echo "$*" >>"$CALLS")
case $* in $FAILING) exit $STATUS ;; esac
"""


@pytest.fixture
def measure(tmp_path, tiny_npz):
    """Return a function that runs parts; it returns the process and the programs with their arguments."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*parts: str, failing: str = "", status: int = 1) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        calls.write_text("")
        command = ["bash", str(REPO / "measure_gpu.sh"), "--data", str(tiny_npz), "--out", str(tmp_path), *parts]
        variables = environment(PYTHON=python, CALLS=calls, FAILING=failing, STATUS=status)
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
        text = calls.read_text().replace("large_batch_cifar_10_fast.", "")
        return result, [line.split("\t") for line in text.splitlines()]

    return run


def test_each_part_calls_programs_with_options_that_they_have(measure, tiny_npz):
    result, calls = measure(*PARTS)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(dict.fromkeys(line.split()[0].split(".")[0] for line in result.stdout.splitlines())) == PARTS
    programs = [program for program, *_ in calls]
    assert {*programs} == {"pytest", "bench", "launch", "compare", "profile", "torch.distributed.run"}
    assert programs.count("launch") == 12
    for program, *arguments in calls:
        if program == "torch.distributed.run":
            arguments = arguments[arguments.index("train") + 1 :]
        if program not in ("pytest", "compare", "bench"):
            assert read_request(arguments)[0].data == str(tiny_npz)


@pytest.mark.parametrize(
    ("table", "status", "resumes"),
    [("", 0, [False]), ("rows", 0, [True]), ("rows", 1, [True]), ("rows", 2, [True, False])],
)
def test_a_campaign_is_resumed_or_begun_anew_and_if_it_fails_other_parts_run(measure, tmp_path, table, status, resumes):
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign" / "runs.tsv").write_text(table)
    result, calls = measure("campaign", "modern.bench", failing="*--resume", status=status)
    assert result.returncode == (status == 1)
    assert [line.split()[2] for line in result.stdout.splitlines()] == [f"{status % 2},", "0,"]
    assert ["--resume" in call for call in calls[:-1]] == resumes


@pytest.mark.parametrize("argument", ["everything", "first.fp8", "facts tests", "--out"])
def test_an_invalid_part_is_refused_in_one_line(measure, argument):
    result, calls = measure(argument)
    assert (result.returncode, result.stdout, result.stderr.count("\n"), calls) == (2, "", 1, [])
