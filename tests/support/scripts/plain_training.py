"""A training without a model: it counts steps, saves and leaves on SIGUSR1, and goes on from its newest checkpoint.

    plain_training.py DIRECTORY STEPS SECONDS [FAILURES [START [END]]]

It takes START seconds before it knows the signal, and END seconds after its last save, when it knows it no more. With
"first" for START, the first lease has no start before the signal ends it, and later ones take no time for it. After
its first step it says that it has begun, as Penstock's trainings do.

The result is the sum of all steps' numbers, so that a step that was left out or made twice shows.
"""

import os
import signal
import sys
import time
from pathlib import Path

directory, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
failures = int(sys.argv[4]) if len(sys.argv) > 4 else 0
start, end = (sys.argv[n] if len(sys.argv) > n else "0" for n in (5, 6))
directory.mkdir(parents=True, exist_ok=True)
asked = []
if start == "first":
    start = "600" if Path(os.environ["PENSTOCK_FLEET_LEASE"]).name.startswith("1-") else "0"
time.sleep(float(start))
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))

tries = directory / "tries"
count = int(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text(str(count))
if count <= failures:
    sys.exit(7)

newest = max((int(path.name.removeprefix("step-")) for path in directory.glob("step-*")), default=0)
total = int((directory / f"step-{newest:06}" / "sum").read_text()) if newest else 0


def save(step):
    # Whole, as Pipeline saves: a kill in the middle leaves no step without its sum.
    folder = directory / "saving"
    folder.mkdir(exist_ok=True)
    (folder / "sum").write_text(str(total))
    folder.rename(directory / f"step-{step:06}")


for step in range(newest + 1, steps + 1):
    total += step
    time.sleep(seconds)
    begun = Path(os.environ["PENSTOCK_FLEET_BEGUN"])
    # Whole, as Pipeline writes it: a reader finds a number at any moment.
    beside = begun.with_name("begun.new")
    beside.write_text(str(step))
    beside.replace(begun)
    if asked:
        save(step)
        sys.exit(138)
if newest < steps:
    save(steps)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    time.sleep(float(end))
