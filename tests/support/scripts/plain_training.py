"""A training without a model: it counts steps, saves and leaves on SIGUSR1, and goes on from its newest checkpoint.

    plain_training.py DIRECTORY STEPS SECONDS [FAILURES]

The result is the sum of all steps' numbers, so that a step that was left out or made twice shows.
"""

import signal
import sys
import time
from pathlib import Path

directory, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
failures = int(sys.argv[4]) if len(sys.argv) > 4 else 0
directory.mkdir(parents=True, exist_ok=True)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))

tries = directory / "tries"
count = int(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text(str(count))
if count <= failures:
    sys.exit(7)

newest = max((int(path.name.removeprefix("step-")) for path in directory.glob("step-*")), default=0)
total = int((directory / f"step-{newest:06}" / "sum").read_text()) if newest else 0


def save(step):
    folder = directory / f"step-{step:06}"
    folder.mkdir()
    (folder / "sum").write_text(str(total))


for step in range(newest + 1, steps + 1):
    total += step
    time.sleep(seconds)
    if asked:
        save(step)
        sys.exit(138)
save(steps) if newest < steps else None
