"""Make one runs.tsv of those that launches left which each made a share of a campaign (--share I/N).

    python -m large_batch_cifar_10_fast.merge RUNS_TSV... --out FOLDER

Of each table the last campaign is taken. What `compare`, `plot` and `--resume --out FOLDER` find is one campaign; the
runs that nobody made are named. Exit status: 0, or 2 and nothing written where the tables are not of one campaign.
"""

import argparse
import sys
from pathlib import Path

from .results.campaign import read_bounded
from .results.run_table import as_line, written_whole
from .results.tables import CONDITIONS, HEAD, Row, read_rows, rows_of_campaign
from .settings.settings import WHOLE, ConfigError, exit_on_config_error

ALIKE = ("runs", "recipe", "options", "workers", *CONDITIONS, "digest", "validation_images", "code", "torch")


def last_campaign(file: str) -> list[Row]:
    rows = read_rows(Path(file), read_bounded(file))
    if not rows:
        raise ConfigError(f"{file}: a header and nothing below it, so no run to merge")
    if others := len({row["campaign"] for row in rows}) - 1:
        print(f"Warning: {file} holds {others} other campaigns: only the last one's runs are merged", file=sys.stderr)
    return rows_of_campaign(rows)


def merged(tables: dict[str, list[Row]]) -> list[Row]:
    """The rows of all tables (by file name) in the order of their runs, under one name. Raises ConfigError."""
    origin: dict[int, str] = {}
    first_file, first = next((file, rows[0]) for file, rows in tables.items())
    for file, row in ((file, row) for file, rows in tables.items() for row in rows):
        differing = [f"{name} ({row[name]}, not {first[name]})" for name in ALIKE if row[name] != first[name]]
        if _first_seed(row) != _first_seed(first):
            differing.append(f"seed of the first run ({_first_seed(row)}, not {_first_seed(first)})")
        if differing:
            raise ConfigError(f"{file} has other {', '.join(differing)} than {first_file}: they are not one campaign")
        if (run := int(row["run"])) in origin:
            raise ConfigError(f"run {run} is in {origin[run]} and in {file}: leave out one of them")
        origin[run] = file
    rows = sorted((row for rows in tables.values() for row in rows), key=lambda row: int(row["run"]))
    return [row | {"campaign": rows[0]["campaign"], "share": WHOLE} for row in rows]


def _first_seed(row: Row) -> int:
    return int(row["seed"]) - int(row["run"])


def write_new(path: Path, rows: list[Row]) -> None:
    try:
        if path.exists():
            raise ConfigError(f"{path} is there already: choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(b"".join(map(as_line, [HEAD, *rows])))
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.merge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="RUNS_TSV", help="one of every share")
    parser.add_argument("--out", required=True, help="folder for the runs.tsv, which may not have one yet")
    options = parser.parse_args(arguments)
    with exit_on_config_error("merge"):
        tables = {file: last_campaign(file) for file in options.files}
        if len(tables) < len(options.files):
            raise ConfigError("the same file was given twice: leave out one of them")
        rows, path = merged(tables), Path(options.out) / "runs.tsv"
        write_new(path, rows)
    print(f"{path}: {len(rows)} of campaign {rows[0]['campaign']}'s {rows[0]['runs']} runs{missing(rows, options.out)}")


def missing(rows: list[Row], out: str) -> str:
    """The runs that nobody made, in words, and how to make them."""
    made = {int(row["run"]) for row in rows}
    runs = ", ".join(str(run) for run in range(int(rows[0]["runs"])) if run not in made)
    alike = len({(row["device"], row["processes"]) for row in rows}) == 1
    how = f"train_cifar_parallel.sh --resume --out {out}" if alike else "--resume in the shares' own folders"
    return f"; not made yet: {runs} ({how} makes them)" if runs else ""


if __name__ == "__main__":
    main()
