"""Profile the first 20 steps of a recipe: python notebook/profile_steps.py --recipe muon [other options of `train`]

It prints the costliest kernels and writes trace.json, which https://ui.perfetto.dev reads.
"""

import os
import sys
from pathlib import Path

from torch.profiler import profile, schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # without a GPU it prints an error

from large_batch_cifar_10_fast import api
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

STEPS = 20
COSTLIEST = 15  # kernels in the table


program = load_program(recipe_of(sys.argv[1:]))
_, options, hyp = read_command(program, sys.argv[1:])
machine = api.Machine(precision=options.precision, graphs=not options.no_graph)
run = program.train(hyp, api.load_images(options.data), machine)
train_step = machine.step


def step(*batch):
    """Take a step, and count it."""
    train_step(*batch)
    profiler.step()


machine.step = step
with profile(
    schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1), acc_events=True
) as profiler:  # without a warning
    next(run(options.seed))
profiler.export_chrome_trace("trace.json")
by = "self_device_time_total" if machine.team.on_gpu else "self_cpu_time_total"
print(profiler.key_averages().table(by, row_limit=COSTLIEST, max_name_column_width=60))
print(f"{STEPS} steps: the trace is in trace.json")
