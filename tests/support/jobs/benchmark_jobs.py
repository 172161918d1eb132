"""What benchmarks do in the processes that tests start: those of the pool, and crews.

The former take themselves for those of a launch of torchrun.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist


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


def prepare_fragile(rank: int, processes: int) -> Callable[[str], tuple[int, str]]:
    """What a process of a crew answers with: its rank and the order, unless the order is to fail in the last one."""

    def respond(order: str) -> tuple[int, str]:
        if rank == processes - 1:
            match order:
                case "raise":
                    raise ValueError("expected nothing of the kind\nand a second line")
                case "die":
                    os._exit(7)
                case "hang":
                    time.sleep(600)
        return rank, order

    return respond
