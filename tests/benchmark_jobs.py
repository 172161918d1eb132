"""Benchmarks in the processes of the pool, which take themselves for those of a launch of torchrun."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["run_worker"]

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


def run_worker(benchmark: str, port: int, *arguments: Any) -> None:
    """What a process of a launch does in the script `benchmark`; rank 0 writes its report. The processes meet at `port`
    of this host.
    """
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "MASTER_ADDR": "127.0.0.1"}
    # A benchmark joins its processes itself, since some of it comes before.
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_PORT=str(port))
    work: Callable[..., None] = import_module(benchmark).work
    try:
        work(*arguments)
    finally:
        for name in (*place, "MASTER_PORT"):
            del os.environ[name]
