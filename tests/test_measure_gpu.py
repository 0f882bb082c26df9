"""The script that measures this code on a GPU, and the profile that it takes."""

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
    -m\\ large*) (IFS=$'\\t'; echo "$*" >>calls); case $* in *$FAILING*) exit 1 ;; esac; mkdir -p m/muon m/apple2019
        echo started; $RUNS ;;
    *test_gpu.py*) echo "tests/test_gpu.py::test_a PASSED"; echo "[gw0] PASSED tests/test_gpu.py::test_b"; $TESTS ;;
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
    """Return the command, and a function that runs it with stand-ins for Python and nvidia-smi."""
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "nvidia-smi", CARDS)
    stand_in = write_program(tmp_path / "python", STAND_IN)
    command = ["bash", REPO / "measure_gpu.sh", "--out", "m", "--data", "x.npz"]
    variables = {"PYTHON": stand_in, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "FAILING": "nothing"}
    variables |= {"TESTS": ":", "RUNS": ":"}

    def run(gpus: int, **more):
        return run_program(*command, cwd=tmp_path, **variables | {"GPUS_HERE": gpus} | more)

    return command, variables, run


@pytest.mark.parametrize("gpus", [1, 8])
def test_it_calls_programs_with_options_that_they_have_and_a_failing_one_does_not_stop_the_others(
    gpus, measure, tmp_path
):
    result = measure[-1](gpus, FAILING="apple2019 --profile")
    report = (tmp_path / "m" / "report.md").read_text()
    parts = re.findall(r"^\| (\w+) \| (\d+) \| \d+ \|", report, re.M)
    names = ["machine", "tests", "apple2019", "muon", *["apple2019_on_all"] * (gpus > 1)]
    names += ["profile_apple2019", "profile_muon", "compare_apple2019", "compare_muon", "clocks"]
    assert [name for name, _ in parts] == names
    assert [name for name, status in parts if status != "0"] == ["profile_apple2019"]
    assert result.returncode == 1
    assert report.startswith(f"# Measured on {gpus} GPU(s)\n")
    assert re.search(r"## machine\n\n```\n.*torch \d", report, re.S), "versions"
    assert re.search(r"## Tests that ended\n\n```\n.*test_a PASSED\n.*PASSED .*test_b\n```", report)
    assert re.search(r"muon.clocks.*\nmax +1980.0 +700.0 +99.0\n", report, re.S)
    assert re.search(r"\nmin +1200.0 +650.5 +98.0\n", report), "an idle GPU does not count"
    calls = [line.split("\t")[1:] for line in (tmp_path / "calls").read_text().splitlines()]
    asked = []
    for program, *arguments in calls:
        if program.endswith("launch"):
            name, options, _ = read_command(load_program(recipe_of(arguments, "")), arguments)
            assert options.data == "x.npz"
            asked.append((name, options.runs, options.profile, options.nproc))
    on_all = [("apple2019", 50, 0, 0)] * (gpus > 1)
    campaigns = [("apple2019", 20, 0, 1), ("muon", 20, 0, 1), *on_all]
    assert asked == [*campaigns, ("apple2019", 1, 20, 1), ("muon", 1, 20, 1)]


def test_without_a_gpu_it_is_one_line_at_once(measure, tmp_path):
    result = measure[-1](0)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "measure_gpu.sh: no GPU that torch can use: nothing to measure\n"
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("part", "during", "word"), [("tests", "TESTS", "test_b"), ("apple2019", "RUNS", "started")])
def test_a_signal_ends_it_and_all_that_it_started(part, during, word, number, measure, tmp_path):
    """Also the watch over clocks and power, beside runs."""
    command, variables, _ = measure
    marked = {**variables, "GPUS_HERE": "1", during: "sleep 300", "TMPDIR": str(tmp_path)}
    log = tmp_path / "m" / f"{part}.log"
    with subprocess.Popen([*map(str, command)], cwd=tmp_path, env=environment(**marked)) as process:
        while not log.exists() or word not in log.read_text():
            time.sleep(0.05)
            assert process.poll() is None
        time.sleep(0.5)  # the stand-in has begun its sleep: a shell that is starting a program can miss a signal
        process.send_signal(number)
        assert process.wait(timeout=20) == 130
    time.sleep(0.5)
    assert not processes_of(tmp_path)
