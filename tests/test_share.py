"""Shares of a campaign, made by launches that know nothing of each other, and what `merge` makes of them."""

import re
import shutil
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import DIFFERENT, TINY, edit_table, train_here

from large_batch_cifar_10_fast import campaign
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.options import ConfigError, RunConfig

pytestmark = pytest.mark.slow

RUNS = 5


@pytest.fixture(scope="module")
def tables(tiny_npz, tmp_path_factory) -> dict[str, Path]:
    """Return the runs.tsv of a whole campaign and of its two shares."""
    folder = tmp_path_factory.mktemp("shares")
    small = ["--demo", *TINY, "--epochs", 1, "--no_compile", "--data", tiny_npz, "--seed", 7, "--runs", RUNS]
    for name, share in {"whole": "0/1", "even": "0/2", "odd": "1/2"}.items():
        train_here(*small, "--share", share, "--out", folder / name)
        time.sleep(1)  # the name of a campaign has its second
    return {path.parent.name: path for path in folder.glob("*/runs.tsv")}


def _rows(path: Path) -> pd.DataFrame:
    rows = pd.read_csv(path, sep="\t", dtype=str).sort_values("run", kind="stable", ignore_index=True)
    return rows.drop(columns=[*DIFFERENT, "share"], errors="ignore")


def test_merged_shares_equal_the_tables_of_one_launch(tables, tmp_path, capsys):
    campaign.main([str(tables["odd"]), str(tables["even"]), "--out", str(tmp_path)])
    pd.testing.assert_frame_equal(_rows(tmp_path / "runs.tsv"), _rows(tables["whole"]))
    pd.testing.assert_frame_equal(_rows(tmp_path / "epochs.tsv"), _rows(tables["whole"].with_name("epochs.tsv")))
    assert pd.read_csv(tmp_path / "epochs.tsv", sep="\t")["campaign"].nunique() == 1
    assert re.fullmatch(f"{tmp_path}/runs.tsv: 5 of campaign .*'s 5 runs\n", capsys.readouterr().out)


def test_missing_runs_are_named_and_made_by_resume(tables, tmp_path, capsys):
    campaign.main([str(tables["even"]), "--out", str(tmp_path)])
    assert f"; missing: 1, 3 (train_cifar_parallel.sh --resume --out {tmp_path} " in capsys.readouterr().out
    train_here("--resume", "--out", tmp_path)
    pd.testing.assert_frame_equal(_rows(tmp_path / "runs.tsv"), _rows(tables["whole"]))


def test_an_interrupted_share_is_resumed_as_this_share(tables, tmp_path):
    (tmp_path / "runs.tsv").write_text("".join(tables["even"].read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=r"had other share \(0/2 then, 1/2 now\)"):
        read_request(["--resume", "--out", str(tmp_path), "--share", "1/2"])
    train_here("--resume", "--out", tmp_path)
    pd.testing.assert_frame_equal(_rows(tmp_path / "runs.tsv"), _rows(tables["even"]))


@pytest.mark.parametrize("column", [*campaign.ALIKE, "seed"])
def test_tables_of_other_images_code_or_options_are_refused(tables, tmp_path, error_line, column):
    rows = pd.read_csv(tables["odd"], sep="\t")
    other = rows[column] + 1 if column in campaign.INTEGERS else "other"
    edit_table(edited := shutil.copy(tables["odd"], tmp_path), **{column: other})
    merge = [str(tables["even"]), str(edited), "--out", str(tmp_path / "merged")]
    assert f"runs.tsv has other {column}" in error_line(campaign.main, merge)


def test_tables_with_the_same_run_and_a_folder_with_tables_are_refused(tables, tmp_path, error_line):
    whole, even, odd = (str(tables[name]) for name in ("whole", "even", "odd"))
    assert "campaign: run 1 is in " in error_line(campaign.main, [whole, odd, "--out", str(tmp_path)])
    assert "was given twice" in error_line(campaign.main, [even, even, "--out", str(tmp_path)])
    (tmp_path / "epochs.tsv").write_text("mine")
    assert "has tables already: choose another --out" in error_line(campaign.main, [even, "--out", str(tmp_path)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("epochs.tsv", "mine")]


@pytest.mark.parametrize("share", ["2/2", "1", "1/", "-1/2", "1/2/3", "a/b", "1/0", "9/99", "1/9999999", " 0/1"])
def test_an_invalid_share_is_refused(share):
    with pytest.raises(ConfigError, match=r"share .* has none of 5 runs: give I/N"):
        RunConfig(runs=5, share=share)
