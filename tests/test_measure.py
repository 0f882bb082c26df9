"""measure_gpu.sh, with the CPU in the GPU's place."""

import subprocess

import pytest
from conftest import REPO, TINY, environment

pytestmark = pytest.mark.slow


def _measure(*arguments, **variables) -> subprocess.CompletedProcess:
    command = ["bash", str(REPO / "measure_gpu.sh"), *map(str, arguments)]
    options = {"MEASURE_OPTIONS": " ".join(TINY), "MEASURE_PRECISION": "fp32"}
    return subprocess.run(command, env=environment(**options, **variables), capture_output=True, text=True, timeout=280)


def test_each_part_has_a_log_and_a_line_of_the_summary(tiny_npz, tmp_path):
    result = _measure("--data", tiny_npz, "--out", tmp_path, "facts", "bench", "first", WORKERS=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "summary.txt").read_text() == result.stdout
    facts, bench, fp32, bf16 = result.stdout.splitlines()
    assert facts.startswith("facts            status   0,")
    assert "torch 2." in facts
    assert "  step  " in bench
    for line, precision in ((fp32, "fp16"), (bf16, "bf16")):
        assert line.startswith(f"first.{precision}       status   0,")
        assert "Train acc" in line
        assert (tmp_path / precision / "runs.tsv").read_text().count("\n") == 3
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        "bench.log",
        "facts.log",
        "first.bf16.log",
        "first.fp16.log",
    ]


def test_a_part_that_fails_costs_the_others_nothing(tmp_path):
    result = _measure("--data", tmp_path / "absent.npz", "--out", tmp_path, "first", "facts")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["facts", "first.fp16", "first.bf16"]
    assert [line.split()[2] for line in lines] == ["0,", "2,", "2,"]
    assert "absent.npz: no such file" in (tmp_path / "first.fp16.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"), [(("everything",), "everything is no part"), (("--out",), "a value")]
)
def test_bad_arguments_are_refused(arguments, message):
    result = _measure(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
