"""How benchmarks start their processes, and what these say to each other."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

import penstock

Found = TypeVar("Found")


def launch(script: str, processes: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs `script` in `processes` processes of torchrun, with one thread each, and waits for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    one_thread = {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, script, *arguments], check=True, env={**os.environ, **one_thread, **(environment or {})})


@contextmanager
def outside_the_launch() -> Iterator[None]:
    """Pipelines that are built inside take this process for one alone. Call it before the processes have joined."""
    assert not dist.is_initialized()
    launched = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(launched)


def alone(work: Callable[[], Found]) -> Found:
    """What rank 0 makes while the others sleep; the same on every rank."""
    found = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    result = found[0]
    assert result is not None
    return result


def everywhere(mine: Found) -> list[Found]:
    """What every rank has, rank by rank."""
    found: list[Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [one for one in found if one is not None]


def timed(work: Callable[[], object], least: float) -> float:
    """Seconds of `work`, done again and again for so long."""
    work()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + least:
        work()
        count += 1
    return (time.perf_counter() - start) / count


def conditions(script: str) -> str:
    """The machine, the library and the command that runs `script`, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    command = f"python {script} {shlex.join(sys.argv[1:])}".rstrip()
    return (
        f"machine: {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, {platform.system()}; one thread a "
        f"process; load average before: {os.getloadavg()[0]:.1f}\n"
        f"software: torch {torch.__version__}, Python {platform.python_version()}, penstock {penstock.__version__}\n"
        f"command: {command}"
    )
