"""How benchmarks start their processes, and what these say to each other."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

Found = TypeVar("Found")


def launch(script: str, processes: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs `script` in `processes` processes of torchrun, with one thread each, and waits for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    one_thread = {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, script, *arguments], check=True, env={**os.environ, **one_thread, **(environment or {})})


def launch_and_read(script: str, processes: int, options: argparse.Namespace, **changed: Any) -> Any:
    """Runs `script` as `launch` does, with `options` and those that are `changed`. Returns what its processes write as
    JSON to the file `--worker`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments: list[str] = []
        for name, value in {**vars(options), **changed, "save": None, "worker": report}.items():
            if value is None or value is False:
                continue
            values = value if isinstance(value, list | tuple) else () if value is True else (value,)
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
        launch(script, processes, arguments)
        return json.loads(report.read_text())


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
