"""The script that measures this code on a GPU, and writes a page on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, environment, write_program

from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

STAND_IN = f"""case $* in
    *count_gpus*) echo $GPUS; exit $((GPUS == 0)) ;;
    -m\\ large*\\ train* | *profile_steps*)
        echo "$*" >>"$(dirname "$0")/calls"
        case $* in *profile*apple2019*) exit 1 ;; esac
        [ $GPUS != 1 ] || sleep 300 ;;
    -m* | *may_share*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
CARDS = """echo "1200, 700.0, 99"
echo "345, 70, 40"
case $* in *-lms*) exec sleep 60 ;; esac
"""


def start(folder: Path, gpus: int) -> subprocess.Popen:
    """Start the script with stand-ins for Python and nvidia-smi. With one GPU its first run takes minutes."""
    write_program(folder / "nvidia-smi", CARDS)
    python = write_program(folder / "python", STAND_IN)
    command = ["bash", REPO / "measure_gpu.sh", "--out", "m", "--data", "x.npz"]
    variables = {"PYTHON": python, "PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": folder, "GPUS": gpus}
    return subprocess.Popen(command, cwd=folder, env=environment(**variables), stderr=subprocess.PIPE, text=True)


def test_it_calls_programs_with_options_that_they_have_and_a_failing_one_does_not_stop_the_others(tmp_path):
    assert start(tmp_path, gpus=8).wait() == 1
    report = (tmp_path / "m" / "report.md").read_text()
    parts = re.findall(r"^\| ([\w-]+) \| (\d+) \| \d+ \|", report, re.M)
    assert len(parts) == 21
    failed = [name for name, status in parts if status != "0"]
    assert failed == ["profile_apple2019", "profile_apple2019-no_graph"]
    assert re.search(r"in_turn.clocks.*\nmin +1200.0 +700.0 +99.0\n", report, re.S)  # no idle GPU counts
    asked = []
    for line in (tmp_path / "calls").read_text().splitlines():
        words = line[line.index(" --") :].split()
        recipe, options, _ = read_command(load_program(recipe_of(words)), words)
        assert options.data == "x.npz"
        asked.append((recipe, options.runs, options.nproc))
    turns = [(recipe, 5 * turn, 1) for turn in range(1, 5) for recipe in ("muon", "muon2024")]
    profiles = [(recipe, 1, 0) for recipe in ("apple2019", "apple2019", "muon", "muon")]
    assert asked == [("apple2019", 20, 1), *turns, ("apple2019", 50, 0), *profiles, ("apple2019", 1, 8)]
