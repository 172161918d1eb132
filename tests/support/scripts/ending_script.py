"""A rank that ends in some way after steps, or while a save is under way: ``ending_script.py DIRECTORY END [RANK]``.

END has words: "save" (a save that does not wait is under way), "hook" (the script has an excepthook of its own),
"resume", and how RANK ends: "raises", "interrupted", "killed", or with a call that the others do not make
("calls save"). "daemon": all ranks end while a child of each waits.
"sleeps": the others sleep meanwhile, outside of the pipeline.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.testing import faults

directory, end, failing = sys.argv[1], sys.argv[2].split(), int(sys.argv[3])
rank = int(os.environ["RANK"])
torch.manual_seed(0)
x = torch.randn(8, 4, dtype=torch.float64)
pipe = penstock.Pipeline(
    nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).double(),
    sample=(x[:2],),
    loss_fn=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    microbatches=4,
    resume=directory if "resume" in end else None,
    # Far longer than the test waits.
    timeout_seconds=600,
)
if "hook" in end:
    sys.excepthook = lambda kind, error, trace: print(f"my own hook: {kind.__name__}: {error}", file=sys.stderr)
pipe.step(x, x)


def go_wrong() -> None:
    if "killed" in end:
        os.kill(os.getpid(), signal.SIGKILL)
    if "interrupted" in end:
        signal.raise_signal(signal.SIGINT)
    raise ValueError("the data set is gone")


if end[0] == "sleeps":
    if rank == failing:
        go_wrong()
    time.sleep(600)
if end[0] == "daemon":
    multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True).start()
    if "closed" in end:
        pipe.close()
    sys.exit()
if end[0] == "calls":
    if rank == failing:
        call = getattr(pipe, end[1])
        call(*{"step": (x, x), "evaluate": (x, x), "predict": (x,), "save": (directory,)}.get(end[1], ()))
    sys.exit()
given: list[faults.Kill | faults.Slow]
if "files" in end:
    given = [faults.Kill(rank=0, path="run/", change=4)]
else:
    given = [faults.Slow(rank=0, path="run/", change=change, seconds=0.4) for change in range(4, 12)]
with faults.inject(given if "save" in end else []):
    if "save" in end:
        pipe.save(directory, wait=False)
        while not list(Path(directory).glob(".penstock-saving-*")):
            time.sleep(0.01)
    pipe.step(x, x)
    if rank == failing and "files" not in end:
        go_wrong()
    for _ in range(1000):
        pipe.step(x, x)
        time.sleep(0.02)
