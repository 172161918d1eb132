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
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from contenders.jobs import Setting
from contenders.lineup import find_entry
from measurement.resident_memory import ALLOCATOR, forget_peak, resident_bytes
from measurement.rounds import joined

STEPS = 2
_IMPORTED = ["torch", "torch._dynamo", "torch.distributed.pipelining", "penstock.pipeline"]


def measure_peaks(name: str, setting: Setting) -> list[int]:
    """The peak of every process that trains in the contender `name`, in bytes, by rank."""
    os.environ.update(ALLOCATOR, OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(setting.processes):
            here, there = context.Pipe()
            process = context.Process(target=_answer, args=(there, name, setting, rank, folder), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
        answers = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise RuntimeError(f"{name}: a process failed while its memory was measured\n{failures[0]}")
    return [answer for answer in answers if answer is not None]


def _answer(connection: Connection, name: str, setting: Setting, rank: int, folder: str) -> None:
    """One process: tells its peak, None if it only waits, or what went wrong."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(setting.processes))
    torch.set_num_threads(1)
    try:
        answer: int | str | None = _peak(name, setting, folder)
    except BaseException:
        answer = traceback.format_exc()
    connection.send(answer)


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
