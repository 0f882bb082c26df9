"""The script that measures this code on a GPU, and the profile that it takes."""

import re
import sys

import pytest
from conftest import REPO, run_program, write_program

from large_batch_cifar_10_fast.core.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

STAND_IN = f"""case $* in
    -m\\ large*) (IFS=$'\\t'; echo "$*" >>calls); case $* in *$FAILING*) exit 1 ;; esac ;;
    -m*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_it_calls_programs_with_options_that_they_have_and_a_failing_one_does_not_stop_the_others(tmp_path):
    stand_in = write_program(tmp_path / "python", STAND_IN)
    command = ["bash", REPO / "measure_gpu.sh", "--out", "m", "--data", "x.npz"]
    result = run_program(*command, cwd=tmp_path, PYTHON=stand_in, FAILING="apple2019 --profile")
    report = (tmp_path / "m" / "report.md").read_text()
    parts = re.findall(r"^\| (\w+) \| (\d+) \| \d+ \|", report, re.M)
    names = ["machine", "tests", "apple2019", "muon", "profile_apple2019", "profile_muon", "compare"]
    assert [name for name, _ in parts] == names
    assert [name for name, status in parts if status != "0"] == ["profile_apple2019"]
    assert result.returncode == 1
    assert re.search(r"## machine\n\n```\n.*torch \d", report, re.S), "versions"
    assert re.findall("^## (.*)", report, re.M) == ["machine", "compare", "profile_apple2019", "profile_muon"]
    calls = [line.split("\t")[1:] for line in (tmp_path / "calls").read_text().splitlines()]
    assert [program.rpartition(".")[2] for program, *_ in calls] == [*["launch"] * 4, "compare"]
    asked = []
    for _, *arguments in calls[:4]:
        name, options, _ = read_command(load_program(recipe_of(arguments, "")), arguments)
        assert options.data == "x.npz"
        asked.append((name, options.runs, options.profile))
    assert asked == [("apple2019", 20, 0), ("muon", 20, 0), ("apple2019", 1, 20), ("muon", 1, 20)]
