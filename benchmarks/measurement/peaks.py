"""How much memory training takes at its peak, in processes that do nothing else.

Each contender gets fresh processes, copies of one that has imported what all need. They first train a job of the same
form with hardly any numbers in it, so that kernels, threads and late imports are there, and then the job itself. What
counts is the most that a process has resident in two steps, after two others, beyond what it had before the job was
built: weights, gradients, versions, activations, messages (pages of shared memory count in every process that has
touched them) and whatever the library keeps for the model's size. A process has the weights of its own stages only:
torch's contenders drop the others after building the model, Penstock's model is on the meta device. Freed tensors go
back to the system at once (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_), so that resident bytes are those of live
tensors. Tensors below 64 KiB share pages: for the smallest jobs this is a rough figure.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch

from contenders.jobs import Setting
from contenders.lineup import find_entry
from measurement.crews import Crew
from measurement.resident_memory import ALLOCATOR, forget_peak, resident_bytes
from measurement.rounds import joined

STEPS = 2
_LIMIT_SECONDS = 600.0


def measure_peaks(name: str, setting: Setting) -> list[int]:
    """The peak of every process that trains in the contender `name`, in bytes, by rank."""
    os.environ.update(ALLOCATOR, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(setting.processes, _prepare, (setting, folder), _LIMIT_SECONDS, gpu=False)
        try:
            return [peak for peak in crew.ask(name) if peak is not None]
        finally:
            crew.close()


def _prepare(rank: int, setting: Setting, folder: str) -> Callable[[str], int | None]:
    """One process: answers the name of a contender with its peak, or None if it only waits."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(setting.processes))
    torch.set_num_threads(1)
    return lambda name: _peak(name, setting, folder)


def _peak(name: str, setting: Setting, folder: str) -> int | None:
    setting = replace(setting, own_weights=True)
    rehearsed = replace(setting, job=setting.job.rehearsal())
    peak = None
    for number, part in enumerate((rehearsed, setting)):
        gc.collect()
        before = resident_bytes("VmRSS")
        with joined([find_entry(name, part)], part, f"{folder}/{number}") as running:
            if name in running:
                _take_steps(running[name].step)
                forget_peak()
                _take_steps(running[name].step)
                peak = resident_bytes("VmHWM") - before
        del running
    return peak


def _take_steps(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()
