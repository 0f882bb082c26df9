"""The examples for Slurm, with stand-ins for its commands: what they ask for arrives. No Slurm has run them yet."""

import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, TINY, environment

from large_batch_cifar_10_fast import campaign as merge

pytestmark = pytest.mark.slow

SRUN = """#!/usr/bin/env bash
[ "$1" != --kill-on-bad-exit=1 ] || shift
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node "$@" &
    tasks="${tasks:-} $!"
done
for task in $tasks; do wait "$task" || exit; done
"""
SCONTROL = '#!/usr/bin/env bash\n[ "$*" = "show hostnames n[1-2]" ] && printf "127.0.0.1\\nn2\\n"\n'


def _submit(script: str, folder: Path, *arguments: object, **variables: object) -> subprocess.CompletedProcess:
    """Run a job's script in `folder`, as Slurm does: with what its header says already done."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": REPO, "SLURM_JOB_NUM_NODES": 1, **variables}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(REPO / "docs" / script), *map(str, arguments)]
    told = {"capture_output": True, "text": True, "timeout": 200}
    return subprocess.run(command, cwd=folder, env=environment(PATH=path, OMP_NUM_THREADS=1, **job), **told)


def test_an_array_makes_a_campaign_a_task_that_is_put_off_goes_on_and_merge_finds_all(tiny_npz, tmp_path, capsys):
    campaign = f"{tmp_path}/campaign"
    small = ["--demo", *TINY, "--epochs", 1, "--no_compile", "--data", tiny_npz, "--runs", 3]

    def task(number: int, last: int = 1) -> subprocess.CompletedProcess:
        array = {"SLURM_ARRAY_TASK_ID": number, "SLURM_ARRAY_TASK_MAX": last, "SLURM_ARRAY_TASK_COUNT": 2}
        array |= {"SLURM_ARRAY_JOB_ID": 9, "SLURM_SUBMIT_DIR": tmp_path, "PYTHONPATH": REPO}
        return _submit("slurm_shares.sbatch", tmp_path, *small, **array)

    train = '#!/bin/sh\nexec "$PYTHON" -m large_batch_cifar_10_fast.train "$@"\n'
    (tmp_path / "train_cifar_parallel.sh").write_text(train)  # as the launcher would, but for its own start
    with_gaps = task(3, last=3)
    assert (with_gaps.returncode, with_gaps.stdout) == (2, "")
    assert with_gaps.stderr == "--array must be 0-1, or SHARES say of how many shares these are\n"
    for number in (0, 1):
        assert (result := task(number)).returncode == 0, result.stderr
    first = tmp_path / "campaign_9" / "0" / "runs.tsv"
    whole = first.read_text().splitlines(keepends=True)
    first.write_text("".join(whole[:2]))
    assert (result := task(0)).returncode == 0, result.stderr
    assert ", 1 of 2 runs made before" in result.stdout
    merge.main([*map(str, sorted(tmp_path.glob("campaign_9/*/runs.tsv"))), "--out", campaign])
    assert re.search("3 of campaign .*'s 3 runs\n$", capsys.readouterr().out)
    assert pd.read_csv(f"{campaign}/runs.tsv", sep="\t")["seed"].tolist() == [0, 1, 2]


def test_a_job_of_two_machines_trains_one_campaign(tiny_npz, tmp_path):
    job = {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": os.getpid()}
    out = ["--out", tmp_path / "out"]
    result = _submit("slurm_machines.sbatch", tmp_path, "--demo", *TINY, "--nproc", 1, "--data", tiny_npz, *out, **job)
    assert result.returncode == 0, result.stderr
    assert "# 8 workers on 2 processes, " in result.stdout
    assert pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")["processes"].tolist() == [2]
