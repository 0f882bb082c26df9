"""The programs: equal to the package that they replace, a run of a campaign equal to the run alone, ideas in copies."""

import functools
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import REPO, TINY, launch, run_here, train_here, train_together

from large_batch_cifar_10_fast import PACKAGE, ConfigError, compare
from large_batch_cifar_10_fast.core import source
from large_batch_cifar_10_fast.core.fast import restart
from large_batch_cifar_10_fast.core.program import load_program, read_command

pytestmark = pytest.mark.slow

OWN = REPO / "tests" / "tiny.py"
RESULTS = ["run", "seed", "train_accuracy", "train_loss", "validation_count", "validation_loss"]
MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 20, "--epochs", 3, "--pixels", "24,32", "--kept", "1,0.5"]
SMALL = {
    "muon": [*MUON, "--runs", 2],
    "muon with workers": [*MUON, "--workers", 4, "--micro_batches", 2, "--views", "two"],
    "muon2024": ["--recipe", "muon2024", "--width", 4, "--batch_size", 50, "--epochs", 2, "--views", "one"],
    "apple2019": ["--demo", *TINY, "--runs", 2],
    "apple2019 with averaged statistics": ["--demo", *TINY[:-1], "--eval_stats", "average", "--micro_batches", 4],
    "apple2019 in bf16": ["--demo", *TINY, "--precision", "bf16"],
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "w.pt", weights_only=True)["weights"]


@pytest.mark.parametrize("name", SMALL)
def test_a_program_makes_the_weights_and_rows_of_the_package_to_the_last_bit(name, tiny_npz, tmp_path):
    for door, folder in ((train_here, tmp_path / "package"), (run_here, tmp_path / "program")):
        options = ["--data", tiny_npz, "--out", folder, "--save", folder / "w.pt", "--no_compile"]
        door("--precision", "fp32", *SMALL[name], *options, "--seed", 3, "--campaign", "c")
    expected, found = weights_of(tmp_path / "package"), weights_of(tmp_path / "program")
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    of_time = {"upload", "preprocessing", "whitening", "training", "seconds", "cpu_seconds", "last_validation"}
    for table in ("runs.tsv", "epochs.tsv"):
        rows, others = (pd.read_csv(tmp_path / f / table, sep="\t", dtype=str) for f in ("package", "program"))
        for column in set(rows) - of_time - {"code", "peak_memory"}:
            assert rows[column].equals(others[column]), column


@pytest.mark.parametrize(("name", "processes"), [("apple2019", 2), ("apple2019", 8), ("muon with workers", 2)])
def test_the_result_does_not_depend_on_the_number_of_processes(name, processes, tiny_npz, tmp_path):
    for count in (1, processes):
        (folder := tmp_path / str(count)).mkdir()
        options = [*SMALL[name], "--epochs", 1, "--micro_batches", 1, "--precision", "fp64", "--data", tiny_npz]
        result = train_together(count, *options, "--save", "w.pt", cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
    expected, found = weights_of(tmp_path / "1"), weights_of(tmp_path / str(processes))
    for key, value in expected.items():
        assert torch.dist(found[key], value) <= 1e-9 * value.norm(), key


KINDS = {
    "AdamW": ["--optimizer", "AdamW", "--norm", "no"],
    "batch norm": ["--norm", "batch"],
    "dropout": ["--dropout", "0.5", "--norm", "no"],
    "an optimizer whose state does not begin with zeros": ["--optimizer", "NAdam", "--dropout", "0.3"],
    "an optimizer whose state is there before its first step": ["--optimizer", "Adagrad"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_of_a_campaign_equals_the_run_alone(kind, processes, tiny_npz, tmp_path):
    """Nothing leaks from run to run: of weights, norms, optimizers, rates, or what a network draws itself."""
    found = {}
    for name, words in (("alone", ["--seed", 6]), ("second", ["--seed", 5, "--runs", 2])):
        (folder := tmp_path / name).mkdir()
        options = ["--recipe", OWN, *KINDS[kind], *words, "--data", tiny_npz, "--precision", "fp32"]
        result = train_together(processes, *options, "--save", "w.pt", cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
        found[name] = weights_of(folder), pd.read_csv(folder / "runs.tsv", sep="\t").iloc[-1]
    weights, row = found["second"]
    expected, expected_row = found["alone"]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert row[RESULTS[2:]].tolist() == expected_row[RESULTS[2:]].tolist()


def test_a_restart_keeps_memory_and_what_is_named():
    def fresh():
        network = torch.nn.Linear(2, 2)
        return network, [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)]

    network, optimizers = fresh()
    places = [weight.data_ptr() for weight in network.parameters()]
    kept = network.bias.clone()
    restart(network, optimizers, fresh, seed=1, keep=["bias"])
    assert [weight.data_ptr() for weight in network.parameters()] == places
    torch.manual_seed(1)
    assert torch.equal(network.weight, torch.nn.Linear(2, 2).weight)
    assert torch.equal(network.bias, kept)


# Ideas: each is a copy of a program with some lines changed.
SILU = [("nn.GELU()", "nn.SiLU()"), ("F.gelu(", "F.silu(")]
AVERAGE = [  # of the weights, over the steps of the last two epochs
    (
        "        for epoch in range(1, hyp.epochs + 1):\n",
        "        averaged = torch.optim.swa_utils.AveragedModel(network)\n"
        "        for epoch in range(1, hyp.epochs + 1):\n",
    ),
    (
        "                    step(batch)\n",
        "                    step(batch)\n"
        "                    if epoch > hyp.epochs - 2:\n"
        "                        averaged.update_parameters(network)\n"
        "            if epoch == hyp.epochs:\n"
        "                network.load_state_dict(averaged.module.state_dict())\n",
    ),
]


def copy_with(name: str, edits: list[tuple[str, str]], path: Path) -> Path:
    text = (PACKAGE / f"{name}.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_another_activation_is_a_copied_program(tiny_npz, tmp_path):
    mine = copy_with("muon", SILU, tmp_path / "my_muon.py")
    options = ["--width", 4, "--batch_size", 100, "--epochs", 1, "--data", tiny_npz, "--no_compile", "--campaign"]
    result = launch("--recipe", "my_muon.py", *options, "silu", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    run_here("--recipe", "muon", *options, "gelu", "--precision", "bf16", "--out", tmp_path)
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows["recipe"].tolist() == ["my_muon", "muon"]
    assert rows["validation_loss"][0] != rows["validation_loss"][1]
    assert (tmp_path / f"source-{rows['code'][0]}.py").read_text() == mine.read_text()


def test_an_average_of_the_weights_is_a_copied_program(tiny_npz, tmp_path):
    """The saved weights are the mean of those after each step of the last two epochs, here of all."""
    keep = [
        AVERAGE[1][0],
        AVERAGE[1][0] + "                    torch.save(network.state_dict(), f'{epoch}_{number}.pt')\n",
    ]
    options = ["--demo", *TINY, "--data", tiny_npz, "--save", "w.pt"]
    for name, edits in (("averaged", AVERAGE), ("plain", [keep])):
        (folder := tmp_path / name).mkdir()
        path = copy_with("apple2019", edits, folder / "mine.py")
        result = launch("--recipe", path, *options, "--nproc", 1, cwd=folder, OMP_NUM_THREADS=1)
        assert (result.returncode, result.stderr) == (0, "")
    steps = [torch.load(path, weights_only=True) for path in (tmp_path / "plain").glob("*_*.pt")]
    assert len(steps) == 2 * (643 // 8 // 16)
    averaged = weights_of(tmp_path / "averaged")
    for name in ("prep.0.weight", "head.2.weight", "layer2.2.bias"):
        mean = torch.stack([step[name] for step in steps]).mean(0)
        torch.testing.assert_close(averaged[name], mean, rtol=1e-4, atol=1e-6)


def test_compare_shows_the_lines_in_which_programs_differ(tiny_npz, tmp_path, capsys):
    programs = {"a": [], "b": SILU, "c": [("\n\n", f"\n{'# more' + chr(10)}\n")]}
    for name, edits in programs.items():
        path = copy_with("muon", edits, tmp_path / f"{name}.py")
        options = ["--width", 4, "--batch_size", 100, "--epochs", 1, "--data", tiny_npz, "--no_compile", "--precision"]
        run_here("--recipe", path, *options, "fp32", "--campaign", name, "--runs", 2, "--out", tmp_path)
    capsys.readouterr()
    compare.main([f"{tmp_path}/runs.tsv:b", f"{tmp_path}/runs.tsv:a"])
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if re.match(r"  [-+] ", line)]
    assert "  -         nn.GELU()," in shown
    assert "  +         nn.SiLU()," in shown
    assert len(lines) == 6
    compare.main([f"{tmp_path}/runs.tsv:c", f"{tmp_path}/runs.tsv:a"])
    shown = capsys.readouterr().out
    more = (PACKAGE / "muon.py").read_text().count("\n\n") - 40
    assert shown.count("  + # more\n") == 40
    assert f"  ... and {more} more lines\n" in shown


def test_the_digest_covers_the_program_and_all_that_it_imports_from_outside_of_libraries(tmp_path):
    program = copy_with("muon", [("import torch\n", "import helper\nimport torch\n")], tmp_path / "mine.py")
    (tmp_path / "helper.py").write_text("from deeper import x\n")
    (tmp_path / "deeper.py").write_text("x = 1\n")
    names = {file.name for file in source.own_files(program)}
    assert {"mine.py", "helper.py", "deeper.py", "fast.py", "team.py", "layers.py", "optim.py", "data.py"} <= names
    assert not names & {"torch.py", "functional.py", "muon.py", "plot.py", "compare.py"}
    digests = [source.digest(program)]
    for file in ("mine.py", "helper.py", "deeper.py"):
        (tmp_path / file).write_text((tmp_path / file).read_text() + "# changed\n")
        digests.append(source.digest(program))
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "AttributeError: module 'mine' has no attribute 'Hyp'"),
        ("x = (", "SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import absent_thing", "ModuleNotFoundError: No module named 'absent_thing'"),
    ],
)
def test_a_file_that_is_no_program_is_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"mine.py cannot be used ({message}")):
        load_program(str(tmp_path / "mine.py"))


@functools.cache
def program(name: str):
    return load_program(name)


def test_sets_of_hyper_parameters_are_recipes_of_a_program():
    name, options, hyp = read_command(program("muon2024"), ["--recipe", "muon2024", "--epochs", "4"])
    assert (name, options.runs, hyp.epochs, hyp.pixels, hyp.whitening_epochs) == ("muon2024", 1, 4, (32,), 2)
    with pytest.raises(ConfigError, match=r"--recipe page is not of muon.py, which has muon, muon2024"):
        read_command(program("muon"), ["--recipe", "page"])
