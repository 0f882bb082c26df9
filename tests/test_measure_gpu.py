"""The script that measures this code on a GPU, and writes a page on it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from attack import processes_of
from conftest import REPO, environment, run_program, write_program

from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

STAND_IN = f"""case $* in
    *count_gpus*) echo $GPUS_HERE; exit $((GPUS_HERE == 0)) ;;
    *may_share*) exit 0 ;;
    -m\\ large*) (IFS=$'\\t'; echo "$*" >>calls); case $* in *$FAILING*) exit 1 ;; esac; echo started; $RUNS ;;
    *profile_steps*) echo "$*" >>../../profiled; case $* in *$FAILING*) exit 1 ;; esac ;;
    *test_gpu.py*) echo "tests/test_gpu.py::test_a PASSED" ;;
    -m*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
CARDS = """echo "1980, 650.5, 98"
echo "1200, 700.0, 99"
echo "345, 70.0, 0"
case $* in *-lms*) exec sleep 60 ;; esac
"""


@pytest.fixture
def measure(tmp_path):
    """Return the command, and its environment with stand-ins for Python and nvidia-smi."""
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "nvidia-smi", CARDS)
    stand_in = write_program(tmp_path / "python", STAND_IN)
    command = ["bash", REPO / "measure_gpu.sh", "--out", "m", "--data", "x.npz"]
    variables = {"PYTHON": stand_in, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "FAILING": "nothing", "RUNS": ":"}
    return command, variables


def test_it_calls_programs_with_options_that_they_have_and_a_failing_one_does_not_stop_the_others(measure, tmp_path):
    command, variables = measure
    failing = {"GPUS_HERE": 8, "FAILING": "profile_steps.py --recipe apple2019"}
    result = run_program(*command, cwd=tmp_path, **variables | failing)
    report = (tmp_path / "m" / "report.md").read_text()
    parts = dict(re.findall(r"^\| ([\w-]+) \| (\d+) \| \d+ \|", report, re.M))
    in_turn = [f"{recipe}_{turn}" for turn in range(1, 5) for recipe in ("muon", "muon2024")]
    profiles = ["profile_apple2019", "profile_apple2019-no_graph", "profile_muon", "profile_muon-no_graph"]
    compared = ["compare_apple2019", "compare_in_turn", "compare_apple2019_on_all"]
    named = ["machine", "tests", "apple2019", *in_turn, "apple2019_on_all", *profiles, "eight_processes", *compared]
    assert [*parts] == [*named, "clocks"]
    assert [name for name, status in parts.items() if status != "0"] == profiles[:2]
    assert result.returncode == 1
    assert re.search(r"## machine\n\n```\n.*torch \d", report, re.S), "versions"
    assert "test_a PASSED" in report
    assert re.search(r"in_turn.clocks.*\nmin +1200.0 +650.5 +98.0\n", report, re.S), "an idle GPU does not count"
    asked = []
    for line in (tmp_path / "calls").read_text().splitlines():
        _, _, name, *arguments = line.split("\t")
        if name == "train":
            recipe, options, _ = read_command(load_program(recipe_of(arguments, "")), arguments)
            assert options.data == "x.npz"
            asked.append((recipe, options.runs, options.nproc))
    turns = [(recipe, 5 * turn, 1) for turn in range(1, 5) for recipe in ("muon", "muon2024")]
    assert asked == [("apple2019", 20, 1), *turns, ("apple2019", 50, 0), ("apple2019", 1, 8)]
    profiled = [line.split()[1:] for line in (tmp_path / "profiled").read_text().splitlines()]
    assert [words[1] for words in profiled] == ["apple2019", "apple2019", "muon", "muon"]
    for words in profiled:
        assert read_command(load_program(words[1]), words)[1].data == "x.npz"


def test_without_a_gpu_it_is_one_line_at_once(measure, tmp_path):
    command, variables = measure
    result = run_program(*command, cwd=tmp_path, **variables, GPUS_HERE=0)
    line = "measure_gpu.sh: no GPU that torch can use: nothing to measure\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)
    assert not (tmp_path / "m").exists()


def test_a_signal_ends_it_and_all_that_it_started(measure, tmp_path):
    """Also the watch over clocks and power, beside runs."""
    command, variables = measure
    own = {**variables, "GPUS_HERE": "1", "RUNS": "sleep 300", "TMPDIR": str(tmp_path)}
    log = tmp_path / "m" / "apple2019.log"
    with subprocess.Popen([*map(str, command)], cwd=tmp_path, env=environment(**own)) as process:
        while not log.exists() or "started" not in log.read_text():
            time.sleep(0.05)
            assert process.poll() is None
        time.sleep(0.5)  # the stand-in has begun its sleep: a shell that is starting a program can miss a signal
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    time.sleep(0.5)
    assert not processes_of(tmp_path)
