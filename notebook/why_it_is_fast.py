"""Run the cells of why_it_is_fast.ipynb, store their output in it, and write its pictures to docs/why_it_is_fast/.

    CIFAR10_NPZ=originals.npz python notebook/why_it_is_fast.py [--only NAME...] [--notebook FILE] [--pictures FOLDER]

No Jupyter is needed. A picture has the name that is its cell's tag.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def run_cell(cell: dict[str, Any], names: dict[str, Any], pictures: Path) -> list[dict[str, Any]]:
    """Run a cell and return its outputs: what it printed, and its figure, which is also written to `pictures`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("".join(cell["source"]), f"<{cell['id']}>", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().replace(f"{HERE.parent}/", "").splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for tag, number in zip(cell["metadata"].get("tags", []), plt.get_fignums(), strict=True):
        path = pictures / f"{tag}.png"
        plt.figure(number).savefig(path, dpi=200)
        encoded = base64.b64encode(path.read_bytes()).decode()
        outputs.append({"output_type": "display_data", "data": {"image/png": encoded}, "metadata": {}})
    plt.close("all")
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notebook", type=Path, default=HERE / "why_it_is_fast.ipynb", help="where the outputs go")
    parser.add_argument("--pictures", type=Path, default=HERE.parent / "docs" / "why_it_is_fast")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the pictures that are drawn anew (all)")
    options = parser.parse_args()
    notebook = json.loads((HERE / "why_it_is_fast.ipynb").read_text())
    target = options.notebook.resolve()
    pictures = options.pictures.resolve()
    pictures.mkdir(parents=True, exist_ok=True)
    if Path(os.environ.get("CIFAR10_NPZ", "")).is_file():
        os.environ["CIFAR10_NPZ"] = os.path.abspath(os.environ["CIFAR10_NPZ"])
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))  # of drawing.py, as in Jupyter
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        tags = cell["metadata"].get("tags", [])
        if options.only and tags and not {*tags} & {*options.only}:
            continue  # its output stays
        cell["outputs"] = run_cell(cell, names, pictures)
        cell["execution_count"] = number
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
