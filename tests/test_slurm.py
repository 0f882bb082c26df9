"""The scripts for Slurm, with stand-ins for its commands: the launcher gets the options of each task."""

import os
import subprocess

import pytest
from conftest import REPO, environment

from large_batch_cifar_10_fast.command_line import read_launch

STAND_INS = {
    "srun": '[ "$1" != --kill-on-bad-exit=1 ] || shift\n'
    'for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@"; done\n',
    "scontrol": '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n',
    "train_cifar_parallel.sh": 'echo "$*"\n',
}


@pytest.fixture
def submit(tmp_path):
    """Return a function that runs a job's script as Slurm does, in a folder with the stand-ins."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)

    def run(script: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        job = environment(PATH=path, SLURM_SUBMIT_DIR=tmp_path, **{"SLURM_JOB_NUM_NODES": 1, **variables})
        command = ["bash", str(REPO / "docs" / script), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=job, capture_output=True, text=True)

    return run


def test_each_task_of_an_array_makes_its_share_and_is_resumed_if_it_has_runs(submit, tmp_path):
    array = {"SLURM_ARRAY_TASK_MAX": 1, "SLURM_ARRAY_TASK_COUNT": 2, "SLURM_ARRAY_JOB_ID": 9}
    for task, made in ((0, ""), (1, "head\nrow\n")):
        out = tmp_path / "campaign_9" / str(task)
        out.mkdir(parents=True)
        (out / "runs.tsv").write_text(made)
        result = submit("slurm_shares.sbatch", "--runs", "5", SLURM_ARRAY_TASK_ID=task, **array)
        _, config = read_launch(result.stdout.split())
        assert (config.runs, config.share, config.out) == (5, f"{task}/2", f"campaign_9/{task}"), result.stderr
        assert config.resume == bool(made)
    with_gaps = submit("slurm_shares.sbatch", SLURM_ARRAY_TASK_ID=3, **array | {"SLURM_ARRAY_TASK_MAX": 3})
    assert (with_gaps.returncode, with_gaps.stdout, with_gaps.stderr.count("\n")) == (2, "", 1)


def test_the_machines_of_a_job_meet_at_the_first(submit):
    job = {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": 12001}
    result = submit("slurm_machines.sbatch", "--runs", "5", **job)
    launches = [read_launch(line.split())[0] for line in result.stdout.splitlines()]
    assert [launch.node_rank for launch in launches] == [0, 1], result.stderr
    assert {(launch.nnodes, launch.rdzv_endpoint) for launch in launches} == {(2, "n1:20001")}
