"""Train in this process, as part of a launch: `train_cifar_parallel.sh` starts one for each GPU or core.

python -m large_batch_cifar_10_fast.train --recipe apple2019 --demo
"""

import sys

from .core.program import load_program, recipe_of, run_program
from .core.team import exit_process

if __name__ == "__main__":
    with exit_process():
        run_program(load_program(recipe_of(sys.argv[1:], "apple2019")), sys.argv[1:])
