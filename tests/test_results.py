"""Tables of results are read into the numbers that were written."""

import numpy as np
import pandas as pd
import pytest
from conftest import REPO

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab.report import compare
from large_batch_cifar_10_fast.lab.results import PUBLISHED, each_campaign, read_results


def write_runs(path, counts, campaign="b", seed=0, table=(), **fields) -> str:
    """Write a runs.tsv of runs with so many of 10,000 images right, which take 5 s, 6 s, ...; return its path."""
    row = {
        "campaign": campaign,
        "recipe": "muon",
        "hyp.epochs": "8",
        "hyp.kept": "1,0.5",
        "device": "A100",
        "processes": 1,
        "train_loss": 1,
        "validation_loss": 0.9,
        "validation_images": 10000,
    } | fields
    rows = [row | {"run": i, "seed": seed + i, "seconds": 5 + i, "validation_count": n} for i, n in enumerate(counts)]
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).assign(**dict(table)).to_csv(path, sep="\t", index=False, quoting=3)
    return str(path)


def write_epochs(folder, rows) -> None:
    names = ["campaign", "run", "epoch", "seconds", "validation_accuracy"]
    pd.DataFrame(rows, columns=names).to_csv(folder / "epochs.tsv", sep="\t", index=False)


def test_published_runs_and_entries_equal_the_files_that_they_were_made_of():
    raw = pd.read_csv(PUBLISHED.with_name("apple_8xv100_50_runs.tsv"), sep="\t")
    found = read_results("published")
    for name, column in (("accuracy", "valid_acc"), ("seconds", "seconds")):
        assert found.runs[name].tolist() == raw[column].tolist()
    rows = pd.read_csv(PUBLISHED, sep="\t").query("campaign == 'published'")
    assert rows["train_accuracy"].tolist() == raw["train_acc"].tolist()
    assert rows["train_loss"].tolist() == raw["train_loss"].tolist()
    assert rows["validation_loss"].tolist() == raw["valid_loss"].tolist()
    entries = {path.stem: pd.read_csv(path, sep="\t") for path in PUBLISHED.parent.glob("dawnbench/*.tsv")}
    assert len(entries) == 10
    for name, entry in entries.items():
        found = read_results(f"published:{name}")
        np.testing.assert_allclose(found.epochs["accuracy"], entry["top1Accuracy"] / 100, rtol=1e-9)
        end = found.epochs.iloc[-1]
        seconds = 3600 * entry["hours"].iloc[-1]
        assert found.runs[["accuracy", "seconds"]].values.tolist() == [[end["accuracy"], pytest.approx(seconds)]]


@pytest.mark.slow
def test_every_campaign_in_the_repository_is_read_and_compared():
    table = pd.read_csv(REPO / "results" / "runs.tsv", sep="\t", quoting=3)
    campaigns = {}
    for name, rows in table.groupby("campaign"):
        campaigns[name] = found = read_results(f"{REPO}/results/runs.tsv:{name}")
        np.testing.assert_allclose(found.runs["accuracy"], rows["validation_accuracy"], rtol=0, atol=1e-12)
    assert len(campaigns) > 100
    assert len(compare(campaigns, name).verdicts) == len(campaigns) - 1


def test_a_last_row_that_was_cut_is_no_row(tmp_path):
    runs, epochs = tmp_path / "runs.tsv", tmp_path / "epochs.tsv"
    write_runs(runs, [9411, 9422])
    write_epochs(tmp_path, [("b", 0, 1, 1.5, 0.25), ("b", 0, 2, 3.5, 0.75)])
    texts = runs.read_text(), epochs.read_text()
    for cut in (1, 2, 5):
        for path, text in zip((runs, epochs), texts, strict=True):
            path.write_text(text[:-cut])
        found = read_results(str(runs))
        assert (found.runs["accuracy"].tolist(), found.epochs["accuracy"].tolist()) == ([0.9411], [0.25])


def test_the_last_campaign_or_the_named_one_is_read(tmp_path):
    """Names of files may have colons, and that of images a quotation mark."""
    write_runs(tmp_path / "a", [9300, 9400], "a", seed=0, images='"')
    write_runs(tmp_path / "b", [9400, 9300], "b", seed=5, images='"')
    file = tmp_path / "9:30"
    file.write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text().partition("\n")[2])
    found = read_results(str(file))
    assert found.runs["accuracy"].tolist() == [0.94, 0.93]
    assert found.runs["seconds"].tolist() == [5, 6]
    assert (found.conditions["images"], found.conditions["hyp.kept"]) == ('"', "1,0.5")
    named = {f"{file}": ["5", "6"], f"{file}:a": ["0", "1"], f"{file}:b": ["5", "6"]}
    assert {source: read_results(source).runs["seed"].tolist() for source in named} == named
    assert each_campaign(f"{file}:*") == [f"{file}:a", f"{file}:b"]


def test_large_seeds_stay_whole_numbers(tmp_path):
    found = read_results(write_runs(tmp_path / "runs", [9400, 9410], seed=2**60 + 1))
    assert found.runs["seed"].tolist() == [str(2**60 + 1), str(2**60 + 2)]


def test_a_damaged_or_foreign_file_is_one_line_that_names_it(tmp_path):
    path = tmp_path / "log"
    good = (tmp_path / "good", write_runs(tmp_path / "good", [9400]))[0].read_text()
    for text in (
        "",
        "epoch\thours\n1\t2\n",
        good.replace("9400", "many"),
        good.replace("A100", "A\t100"),
        "campaign\nx\n",
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{path}[^\n]*$"):
            read_results(str(path))
    with pytest.raises(ConfigError, match="absent: there is no such file"):
        read_results("absent")
    with pytest.raises(ConfigError, match="good has no campaign typo, only b"):
        read_results(f"{tmp_path}/good:typo")
