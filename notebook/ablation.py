"""Train by minimal/apple2019.py as it is and without each of its tricks, with the same seeds.

    OMP_NUM_THREADS=1 python notebook/ablation.py --data FILE.npz --seeds 6 --epochs 5 --width 8 --batch_size 32

Appends a row to --out after each run; skips a run that has one. Ghost groups have 16 images, as published.
"""

import argparse
import importlib.util
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

SOURCE = (Path(__file__).resolve().parent.parent / "minimal" / "apple2019.py").read_text()
COLUMNS = ("variant", "seed", "epochs", "width", "batch_size", "images", "accuracy", "loss", "seconds")


def variants() -> dict[str, str]:
    """Return the text of the program as published, and after the edit of each line marked `without X`."""
    texts = {"as published": SOURCE}
    for line, trick, new in re.findall(r"\n *(\S.*?  # without ([\w -]+): (.+))", SOURCE):
        texts[f"without {trick}"] = SOURCE.replace(line, "" if new == "delete this line" else new)
    return texts


def load_program(text: str, **hyperparameters: int) -> ModuleType:
    """Import the text as a module, and set some of its hyper-parameters."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(program := importlib.util.module_from_spec(spec))
    vars(program.hyp).update(hyperparameters)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of CIFAR-10, or FILE.npz")
    parser.add_argument("--out", default="ablation.tsv", type=Path, help="table of runs")
    parser.add_argument("--seeds", default=6, type=int, help="0 to this number, exclusive")
    parser.add_argument("--images", default=50_000, type=int, help="the first of the training images")
    for name, default in (("epochs", 5), ("width", 8), ("batch_size", 32)):
        parser.add_argument(f"--{name}", default=default, type=int)
    args = parser.parse_args()
    sizes = {"epochs": args.epochs, "width": args.width, "batch_size": args.batch_size}
    groups = args.batch_size // 16
    programs = {name: load_program(text, ghost_groups=groups, **sizes) for name, text in variants().items()}
    program = programs["as published"]
    train_images, train_labels, *test = program.load(args.data)
    data, _ = program.prepare([train_images[: args.images], train_labels[: args.images], *test], torch.float32)
    if not args.out.exists():
        args.out.write_text("\t".join(COLUMNS) + "\n")
    for seed in range(args.seeds):
        for variant, program in programs.items():
            key = [variant, seed, args.epochs, args.width, args.batch_size, len(train_images[: args.images])]
            start = "\t".join(map(str, key)) + "\t"
            if not any(line.startswith(start) for line in args.out.read_text().splitlines()):
                seconds, _, _, accuracy, loss = program.train(seed, args.epochs, data, 0.0)[1][-1]
                with args.out.open("a") as table:
                    table.write(f"{start}{accuracy:.4f}\t{loss:.5f}\t{seconds:.1f}\n")


if __name__ == "__main__":
    main()
