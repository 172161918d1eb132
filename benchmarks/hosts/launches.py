"""Starts a program on every host of a network, as a launcher on real hosts would: with a rank and a meeting point."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hosts.networks import Network

__all__ = ["rank_environment", "run_everywhere"]

_PORT = 29500
"""In namespaces of its own every port is free."""


def rank_environment(network: Network, rank: int) -> dict[str, str]:
    """What a launcher tells the process of `rank`, one on each host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(network.hosts)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": str(_PORT),
    }


def run_everywhere(
    network: Network, arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> None:
    """Runs ``python ARGUMENTS`` on every host and waits for all, for at most `seconds`.

    Raises `RuntimeError` if one fails; it ends the others then.
    """
    processes = []
    for rank, host in enumerate(network.hosts):
        place = {**rank_environment(network, rank), "OMP_NUM_THREADS": "1"}
        command = host.command([sys.executable, *arguments])
        processes.append(
            subprocess.Popen(command, env={**os.environ, **place, **host.environment, **(environment or {})})
        )
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                reason = f"failed on {failed}" if failed else f"did not end within {seconds:.0f} s"
                raise RuntimeError(f"python {' '.join(arguments)} {reason}: its output is above")
            time.sleep(0.05)
        if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
            raise RuntimeError(f"python {' '.join(arguments)} failed on {failed}: its output is above")
    finally:
        for process in processes:
            process.kill()
            process.wait()
