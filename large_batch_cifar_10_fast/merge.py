"""Make one runs.tsv of those that launches left which each made a share of a campaign (--share I/N).

    python -m large_batch_cifar_10_fast.merge RUNS_TSV... --out FOLDER

Of each table the last campaign is taken. What `compare`, `plot` and `--resume --out FOLDER` find is one campaign; what
was not made of it yet is named. Exit status: 0, or 2 and nothing written where the tables are not of one campaign.
"""

import argparse
from pathlib import Path

from .results.campaign import read_bounded
from .results.journal import as_line, written_whole
from .results.tables import COLUMNS, CONDITIONS, WHOLE, Row, read_rows
from .settings.settings import Refusal, refusals_end

ALIKE = ("runs", "recipe", "options", "workers", *CONDITIONS, "digest", "validation_images", "code", "torch")


def last_campaign(file: str) -> list[Row]:
    rows = read_rows(Path(file), read_bounded(file))
    if not rows:
        raise Refusal(f"{file}: a header and nothing below it, so no run to merge")
    return [row for row in rows if row["campaign"] == rows[-1]["campaign"]]


def merged(tables: dict[str, list[Row]]) -> list[Row]:
    """The rows of all tables (by file name) in the order of their runs, under one name. Raises Refusal."""
    origin: dict[str, str] = {}
    first_file, first = next((file, rows[0]) for file, rows in tables.items())
    for file, row in ((file, row) for file, rows in tables.items() for row in rows):
        differing = [f"{name} ({row[name]}, not {first[name]})" for name in ALIKE if row[name] != first[name]]
        if _first_seed(row) != _first_seed(first):
            differing.append(f"seed of the first run ({_first_seed(row)}, not {_first_seed(first)})")
        if differing:
            raise Refusal(f"{file} has other {', '.join(differing)} than {first_file}: they are not one campaign")
        if row["run"] in origin:
            raise Refusal(f"run {row['run']} is in {origin[row['run']]} and in {file}: leave out one of them")
        origin[row["run"]] = file
    rows = sorted((row for rows in tables.values() for row in rows), key=lambda row: int(row["run"]))
    return [row | {"campaign": rows[0]["campaign"], "share": WHOLE} for row in rows]


def _first_seed(row: Row) -> int:
    return int(row["seed"]) - int(row["run"])


def write_new(path: Path, rows: list[Row]) -> None:
    if path.exists():
        raise Refusal(f"{path} is there already: choose another --out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(
                b"".join(map(as_line, [COLUMNS, *([row[name] for name in COLUMNS] for row in rows)]))
            )
    except OSError as error:
        raise Refusal(f"--out {path.parent} cannot be written: {error}") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.merge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="RUNS_TSV", help="one of every share")
    parser.add_argument("--out", required=True, help="folder for the runs.tsv, which may not have one yet")
    options = parser.parse_args(arguments)
    with refusals_end("merge"):
        tables = {file: last_campaign(file) for file in options.files}
        if len(tables) < len(options.files):
            raise Refusal("the same file was given twice: leave out one of them")
        rows, path = merged(tables), Path(options.out) / "runs.tsv"
        write_new(path, rows)
    made, planned = {int(row["run"]) for row in rows}, int(rows[0]["runs"])
    missing = ", ".join(str(run) for run in range(planned) if run not in made)
    going_on = f"; not made yet: {missing} (--resume --out {options.out} makes them)" if missing else ""
    print(
        f"{path}: {len(rows)} of campaign {rows[0]['campaign']}'s {planned} runs, from {len(tables)} tables{going_on}"
    )


if __name__ == "__main__":
    main()
