"""Shares of a campaign, made by launches that know nothing of each other, and what `merge` makes of them."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import TINY, train_here
from disturbances import DIFFERENT

from large_batch_cifar_10_fast import campaign as merge
from large_batch_cifar_10_fast import checks as request_advice
from large_batch_cifar_10_fast import devices
from large_batch_cifar_10_fast.campaign import COLUMNS, INTEGERS
from large_batch_cifar_10_fast.checks import check_out
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.launch import progress_of
from large_batch_cifar_10_fast.options import ConfigError, RunConfig
from large_batch_cifar_10_fast.read_logs import read_log
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

RUNS, SHARES = 5, ("0/1", "0/3", "2/3")
RESULT = [name for name in COLUMNS if name not in (*DIFFERENT, "share")]


def _train(folder: Path, npz: Path, *arguments: object) -> Path:
    train_here("--demo", *TINY, "--epochs", 1, "--no_compile", "--data", npz, "--out", folder, "--seed", 7, *arguments)
    return folder / "runs.tsv"


@pytest.fixture(scope="module")
def tables(tiny_npz, tmp_path_factory) -> dict[str, Path]:
    """The whole campaign's, its two shares', and that of a share with other options."""
    folder = tmp_path_factory.mktemp("shares")
    whole = _train(folder / "whole", tiny_npz, "--runs", RUNS)
    shares = {share: _train(folder / share[0], tiny_npz, "--runs", RUNS, "--share", share) for share in ("0/2", "1/2")}
    other = _train(folder / "other", tiny_npz, "--runs", RUNS, "--share", "1/3", "--lr_scaler", 2)
    return {"whole": whole, "other": other, **shares}


def _merge(out: Path, *files: Path) -> None:
    merge.main([*map(str, files), "--out", str(out)])


def _result(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", dtype=str)[RESULT]


@pytest.mark.slow
def test_a_share_has_every_nth_run_and_the_curve_of_its_first(tables):
    for share, runs in {"0/2": [0, 2, 4], "1/2": [1, 3]}.items():
        assert pd.read_csv(tables[share], sep="\t")["run"].tolist() == runs
        assert len(pd.read_csv(tables[share].parent / "timing_log.tsv", sep="\t")) == 1
        note = f"{tables[share]} holds {len(runs)} of the campaign's {RUNS} runs"
        assert read_log(str(tables[share])).notes == (note,)


@pytest.mark.slow
def test_shares_in_any_order_are_the_campaign_that_one_launch_makes(tables, tmp_path, capsys):
    _merge(tmp_path, tables["1/2"], tables["0/2"])
    pd.testing.assert_frame_equal(_result(tmp_path / "runs.tsv"), _result(tables["whole"]))
    log = read_log(str(tmp_path / "runs.tsv"))
    assert (len(log.accuracy), log.notes) == (RUNS, ())
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path}/runs.tsv: 5 of campaign ")
    assert told.endswith("'s 5 runs\n")


@pytest.mark.slow
def test_what_is_missing_is_named_and_made_by_resume(tables, tmp_path, capsys):
    _merge(tmp_path, tables["0/2"])
    assert capsys.readouterr().out.endswith(
        f"; not made yet: 1, 3 (train_cifar_parallel.sh --resume --out {tmp_path} makes them)\n"
    )
    train_here("--resume", "--out", tmp_path)
    pd.testing.assert_frame_equal(
        _result(tmp_path / "runs.tsv").sort_values("run", ignore_index=True), _result(tables["whole"])
    )


@pytest.mark.slow
def test_a_broken_share_is_resumed_as_what_it_is(tables, tmp_path, capsys):
    lines = tables["0/2"].read_text().splitlines(keepends=True)
    (tmp_path / "runs.tsv").write_text("".join(lines[:2]))
    train_here("--resume", "--out", tmp_path)
    assert "# campaign" in (told := capsys.readouterr().out)
    assert ", 1 of 3 runs made before\n" in told
    assert told.endswith(" out of 3\n")
    pd.testing.assert_frame_equal(_result(tmp_path / "runs.tsv"), _result(tables["0/2"]))
    with pytest.raises(ConfigError, match="has all its 3 runs"):
        read_request(["--resume", "--out", str(tmp_path), "--save", "w.pt"])
    (tmp_path / "runs.tsv").write_text(lines[0] + lines[3])
    with pytest.raises(ConfigError, match="--save keeps run 4's weights, which is made: leave out --save"):
        read_request(["--resume", "--out", str(tmp_path), "--save", "w.pt"])
    campaign = lines[1].split("\t")[0]
    assert progress_of(str(tmp_path), campaign) == "1 of its 3 runs are made, continue with --resume"
    with pytest.raises(ConfigError, match=r"had other share \(0/2 then, 1/2 now\)"):
        read_request(["--resume", "--out", str(tmp_path), "--share", "1/2"])


@pytest.mark.slow
def test_times_of_several_machines_are_told_apart(tables, tmp_path):
    elsewhere = tmp_path / "elsewhere.tsv"
    pd.read_csv(tables["1/2"], sep="\t", dtype=str, keep_default_na=False).assign(
        device="abacus", processes="7"
    ).to_csv(elsewhere, sep="\t", index=False)
    _merge(tmp_path / "merged", tables["0/2"], elsewhere)
    facts = read_log(str(tmp_path / "merged" / "runs.tsv")).conditions
    assert facts["device"].endswith(" threads and abacus")
    assert facts["processes"] == "1 and 7"


@pytest.mark.slow
def test_of_each_table_the_last_campaign_is_merged_and_what_unlike_machines_lack_is_theirs_to_make(
    tables, tmp_path, capsys
):
    table = pd.read_csv(tables["0/2"], sep="\t", dtype=str, keep_default_na=False).assign(device="abacus")
    older = table.assign(campaign="older", run=["0", "2", "4"], validation_count="1")
    pd.concat([older, table.iloc[:1]]).to_csv(tmp_path / "two.tsv", sep="\t", index=False)
    _merge(tmp_path / "merged", tmp_path / "two.tsv", tables["1/2"])
    assert capsys.readouterr().out.endswith("; not made yet: 2, 4 (--resume in the shares' own folders makes them)\n")
    assert "1" not in pd.read_csv(tmp_path / "merged" / "runs.tsv", sep="\t", dtype=str)["validation_count"].tolist()


INVALID = {
    "another recipe": (["0/2", "other"], r"other/runs\.tsv has other options \(.*lr_scaler=2\.0.*\) than .*not one"),
    "the same run": (["whole", "1/2"], r"run 1 is in .*whole/runs\.tsv and in .*1/runs\.tsv: leave out one of them"),
    "the same file": (["0/2", "0/2"], "a table is empty or was given twice"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "message"), INVALID.values(), ids=INVALID)
def test_tables_that_are_not_one_campaign_are_refused(tables, tmp_path, capsys, names, message):
    _refuse(tmp_path / "merged", capsys, message, *(tables[name] for name in names))


ALIKE = ["runs", "seed", "recipe", "options", "workers", "precision", "micro_batches", "compile", "no_warmup"]
ALIKE += ["digest", "validation_images", "code", "torch"]


@pytest.mark.slow
@pytest.mark.parametrize("column", ALIKE)
def test_shares_of_other_images_code_or_settings_are_refused(tables, tmp_path, capsys, column):
    table = pd.read_csv(tables["1/2"], sep="\t", dtype=str, keep_default_na=False)
    number = column in INTEGERS
    table[column] = [str(int(value) + 1) for value in table[column]] if number else "other"
    table.to_csv(tmp_path / "edited.tsv", sep="\t", index=False)
    message = rf"edited\.tsv has other {column}[ a-z]* \(.*, not .*\) than "
    _refuse(tmp_path / "merged", capsys, message, tables["0/2"], tmp_path / "edited.tsv")


def test_whether_to_compile_is_decided_for_all_shares_alike(monkeypatch):
    """A share that alone would not take ten minutes."""
    monkeypatch.setattr(request_advice, "work", lambda recipe, images: 250 * request_advice.CORE)
    monkeypatch.setattr(request_advice, "count_cores", lambda: 1)
    ctx = DistContext(0, 1, torch.device("cpu"), 8)
    settled = [
        request_advice.resolve_defaults(RunConfig(runs=3, share=share), Apple2019(), ctx, 50_000) for share in SHARES
    ]
    assert [config.compile for config in settled] == [True, True, True]


@pytest.mark.parametrize(
    ("seconds", "bf16", "asked", "precision", "hours"),
    [
        (700, True, "", "bf16", 3.5),
        (700, True, "fp32", "fp32", 7),
        (700, False, "", "fp32", 7),
        (700, False, "bf16", "bf16", 7),
        (500, True, "", "fp32", 5),
    ],
)
def test_half_precision_is_for_long_runs_on_a_cpu_that_has_it(
    seconds, bf16, asked, precision, hours, monkeypatch, capsys
):
    """However many runs and cores there are: the seed is to decide a run."""
    monkeypatch.setattr(request_advice, "work", lambda recipe, images: seconds * request_advice.CORE)
    monkeypatch.setattr(request_advice, "gains_by_bf16", lambda: bf16)
    ctx = DistContext(0, 1, torch.device("cpu"), 8)
    for cores in (1, 8):
        monkeypatch.setattr(request_advice, "count_cores", lambda cores=cores: cores)
        config = RunConfig(runs=36, precision=asked)
        assert request_advice.resolve_defaults(config, Apple2019(), ctx, 50_000).precision == precision
        assert f"this takes about {hours / cores:.1f} hours" in capsys.readouterr().err


def test_half_precision_is_for_all_processes_or_none(monkeypatch):
    """Machines with other CPUs are not to refuse one another."""
    monkeypatch.setattr(request_advice, "gains_by_bf16", lambda: True)
    ctx = DistContext(0, 1, torch.device("cpu"), 8)
    assert request_advice.precision_on(ctx, "", Apple2019(), 50_000) == "bf16"
    monkeypatch.setattr(DistContext, "all_gather_words", lambda ctx, subject, word: [word, "False"])
    assert request_advice.precision_on(ctx, "", Apple2019(), 50_000) == "fp32"


def test_a_torch_that_cannot_tell_computes_in_float32(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert not devices.gains_by_bf16.__wrapped__()


@pytest.mark.parametrize(
    ("instructions", "rates", "gains"),
    [
        (True, {"bf16": 3e11, "fp32": 1.5e11}, True),
        (True, {"bf16": 1.5e11, "fp32": 2.5e11}, False),
        (True, {"bf16": 2e11, "fp32": 1.9e11}, False),
        (False, {}, False),
    ],
)
def test_a_cpu_has_to_multiply_faster_in_bfloat16_than_in_float32(instructions, rates, gains, monkeypatch):
    """Where it has no instructions for it, no product is tried: one would take seconds."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    monkeypatch.setattr(devices, "matrix_rate", lambda precision, device: rates[precision])
    assert devices.gains_by_bf16.__wrapped__() is gains


@pytest.mark.slow
def test_a_table_from_before_there_were_shares_is_a_whole_campaign_and_not_written_to(tables, tmp_path):
    table = pd.read_csv(tables["whole"], sep="\t", dtype=str, keep_default_na=False)
    table.drop(columns="share").to_csv(tmp_path / "runs.tsv", sep="\t", index=False)
    log = read_log(str(tmp_path / "runs.tsv"))
    assert (len(log.accuracy), log.notes) == (RUNS, ())
    with pytest.raises(ConfigError, match="other columns than this version writes"):
        check_out(tmp_path, "")


@pytest.mark.slow
def test_what_is_there_is_not_written_over(tables, tmp_path, capsys):
    (tmp_path / "runs.tsv").write_text("mine")
    _refuse(tmp_path, capsys, "has tables already: choose another --out", tables["0/2"])
    assert (tmp_path / "runs.tsv").read_text() == "mine"
    _refuse(tmp_path / "runs.tsv", capsys, "the tables cannot be merged: ", tables["0/2"])


def _refuse(out: Path, capsys, message: str, *files: Path) -> None:
    with pytest.raises(SystemExit) as end:
        _merge(out, *files)
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert re.search(message, told.err), told.err


@pytest.mark.parametrize("share", ["2/2", "1", "1/", "-1/2", "1/2/3", "a/b", "1/0", "9/99", "1/9999999", " 0/1"])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match=r"share .* has none of 5 runs: give I/N"):
        RunConfig(runs=5, share=share)
