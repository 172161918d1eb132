"""Jobs on hosts of their own: network namespaces on this machine, one process in each.

The processes are forks of one that has imported torch, and move to their namespace before they make a thread.
"""

import ctypes
import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from hosts.launches import rank_environment
from hosts.networks import Network, refusal
from support.processes import IMPORTED

_NETWORK_NAMESPACE = 0x4000_0000


def require_hosts() -> None:
    """Skips a test where no namespaces can be made, and says why."""
    if reason := refusal():
        pytest.skip(f"needs network namespaces: {reason}")


def on_hosts(
    network: Network, job: Callable[..., Any], *arguments: Any, seconds: float = 240.0, interface: bool = True
) -> list[Any]:
    """``job(*arguments)`` on each of the hosts, in the environment of a launcher; what each returned."""
    return start_on_hosts(network, job, *arguments, interface=interface)(seconds)


def start_on_hosts(
    network: Network, job: Callable[..., Any], *arguments: Any, interface: bool = True
) -> Callable[[float], list[Any]]:
    """Starts the job, and returns what waits for it, for these seconds. With `interface` the environment says which
    one to use.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    running = []
    for rank, host in enumerate(network.hosts):
        here, there = context.Pipe()
        environment = {**rank_environment(network, rank), **(host.environment if interface else {})}
        process = context.Process(target=_enter, args=(host.name, environment, there, job, arguments), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    return functools.partial(_collect, running)


def _collect(running: list[tuple[Any, Connection]], seconds: float) -> list[Any]:
    answers = []
    for rank, (process, connection) in enumerate(running):
        if not wait([connection], seconds):
            answers.append((False, f"did not answer within {seconds} s"))
        else:
            try:
                answers.append(connection.recv())
            except EOFError:
                answers.append((False, "its process ended"))
        process.kill()
        process.join()
        assert answers[rank][0], f"rank {rank}: {answers[rank][1]}"
    return [answer for _, answer in answers]


def _enter(
    namespace: str, environment: Mapping[str, str], connection: Connection, job: Callable[..., Any], arguments: Any
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as opened:
        if libc.setns(opened.fileno(), _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, job(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)
    # What a thread of Gloo still waits for does not matter.
    os._exit(0)
