"""What two processes that share a card can do over NCCL: ``python benchmarks/gpu_probe/pairs.py SCENE --found FILE``.

NCCL refuses two processes on one card unless it takes them for processes of two hosts, which NCCL_HOSTID makes it do.
It then talks through sockets, so that none of the times says anything of NVLink. ``--backend gloo`` shows on any
machine that the scenes run which need no NCCL.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpu_probe.probe import Notes, parser_of
from gpu_run.parts import MEETING, PAIRS

__all__: list[str] = []

FEW_BLOCKS = 2
"""As many multiprocessors as a communicator of an edge shall take at most."""
LARGE = 8 * 2**20
TIMES = 10
GRACE_SECONDS = 5.0
"""Until a process is ended whose peer has failed."""
ABORT_SECONDS = 15.0
OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # Else PyTorch's watchdog may end a process whose communicator is aborted.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


@dataclass(frozen=True, slots=True)
class End:
    """One of the two processes."""

    rank: int
    store: Store
    device: torch.device
    notes: Notes

    @property
    def peer(self) -> int:
        """The rank of the other one."""
        return 1 - self.rank

    def note(self, name: str, value: object, unit: str = "") -> None:
        """What the first process says is noted."""
        if self.rank == 0:
            self.notes.add("pair", name=name, value=value, unit=unit)

    def communicator(self, name: str, blocks: int | None = FEW_BLOCKS) -> Any:
        """One for the two, which NCCL makes when it is first used."""
        store = PrefixStore(name, self.store)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, self.rank, 2, timedelta(seconds=60))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=300)
        if blocks is not None:
            options.config.max_ctas = blocks
        return dist.ProcessGroupNCCL(store, self.rank, 2, options)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self, name: str) -> None:
        """Waits, on the host, until both are here."""
        self.store.set(f"{name} {self.rank}", "")
        self.store.wait([f"{name} {self.peer}"])

    def numbers(self, value: float, count: int = 1) -> torch.Tensor:
        """(count,) of `value`, on the device."""
        return torch.full((count,), value, device=self.device)


def swap(end: End, group: Any, count: int = 1) -> float:
    """A number goes from the first to the second process and comes back with one added: the seconds of it."""
    start = time.perf_counter()
    numbers = end.numbers(7.0, count)
    if end.rank == 0:
        group.send([numbers], 1, 0).wait()
        group.recv([numbers], 1, 0).wait()
    else:
        group.recv([numbers], 0, 0).wait()
        numbers += 1
        group.send([numbers], 0, 0).wait()
    end.synchronize()
    assert end.rank == 1 or bool((numbers == 8.0).all()), f"sent 7, expected 8 back, found {numbers[0]}"
    return time.perf_counter() - start


# Scenes


def meeting(end: End) -> None:
    """Whether they meet at all, and what a communicator takes of the card: both ends of it are on the same one."""
    for name, blocks in ((f"max_ctas={FEW_BLOCKS}", FEW_BLOCKS), ("as NCCL likes", None)):
        # The first communicator of a process also takes what all of them share.
        for place in ("first", "second", "third"):
            end.meet(f"before {name} {place}")
            free = _free_bytes(end)
            end.meet(f"begin {name} {place}")
            group = end.communicator(f"{name} {place}", blocks)
            seconds = swap(end, group)
            swap(end, group, LARGE // 4)
            end.meet(f"made {name} {place}")
            end.note(f"{place} communicator, {name}: made", round(seconds, 3), "s")
            if free is not None:
                taken = (free - (_free_bytes(end) or 0)) / 2 / 2**20
                end.note(f"{place} communicator, {name}: memory", round(taken, 1), "MiB an end")
            end.meet(f"read {name} {place}")


def _free_bytes(end: End) -> int | None:
    end.synchronize()
    return torch.cuda.mem_get_info()[0] if end.device.type == "cuda" else None


def both_ways(end: End) -> None:
    """A communicator for each direction, both busy at once."""
    groups = [end.communicator(name) for name in ("0 to 1", "1 to 0")]
    for group in groups:
        swap(end, group)

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        got = groups[end.peer].recv([received], end.peer, 0)
        gave = groups[end.rank].send([sent], end.peer, 0)
        got.wait()
        gave.wait()

    note_exchange(end, "8 MiB both ways at once", exchange)


def batched(end: End) -> None:
    """Both directions over one communicator, in one group of NCCL's calls."""
    group = end.communicator("batched")

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        group._start_coalescing()
        group.send([sent], end.peer, 0)
        group.recv([received], end.peer, 0)
        group._end_coalescing().wait()

    note_exchange(end, "8 MiB both ways, batched", exchange)


def note_exchange(end: End, name: str, exchange: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """The median of what it takes until both have what the other one sent."""
    sent, received = end.numbers(end.rank, LARGE // 4), end.numbers(-1, LARGE // 4)
    seconds = []
    for turn in range(TIMES):
        end.meet(f"turn {turn}")
        start = time.perf_counter()
        exchange(sent, received)
        end.synchronize()
        seconds.append(time.perf_counter() - start)
    assert bool((received == end.peer).all()), f"expected {end.peer} from the peer, found {received[0]}"
    end.note(name, round(1e3 * statistics.median(seconds), 3), "ms")


def blocks(end: End) -> None:
    """How many blocks of threads, which take a multiprocessor each, the kernel of a send or a receive has."""
    for name, most in ((f"max_ctas={FEW_BLOCKS}", FEW_BLOCKS), ("as NCCL likes", None)):
        group = end.communicator(name, most)
        swap(end, group, LARGE // 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            swap(end, group, LARGE // 4)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()]
        found = sorted({event["args"]["grid"][0] for event in kernels})
        end.note(f"blocks of a transfer of 8 MiB, {name}", found or "the profiler saw no kernel of NCCL")


def late(end: End) -> None:
    """A second communicator is made while a receive is pending on the first one."""
    first = end.communicator("first")
    swap(end, first)
    number = end.numbers(5.0 if end.rank == 1 else -1.0)
    pending = first.recv([number], 1, 0) if end.rank == 0 else None
    seconds = swap(end, end.communicator("second"))
    end.note("communicator made behind a pending receive", round(seconds, 3), "s")
    if pending is None:
        first.send([number], 0, 0).wait()
    else:
        pending.wait()
    end.synchronize()
    assert float(number) == 5.0, f"expected 5 from the peer, found {float(number)}"


def abort_in_turn(end: End) -> None:
    """Aborts two communicators with a pending receive each, the second one after the first one."""
    groups, _kept = _pending(end)
    for place, group in enumerate(groups):
        start = time.perf_counter()
        group.abort()
        end.note(f"abort in turn, communicator {place}", round(time.perf_counter() - start, 3), "s")
    _see_the_end(end, "abort in turn")


def abort_at_once(end: End) -> None:
    """Both aborts are begun before either is waited for."""
    groups, _kept = _pending(end)
    _abort_together(end, groups, "abort at once")
    _see_the_end(end, "abort at once")


def abort_in_a_group(end: End) -> None:
    """The same between the calls that begin and end a group of NCCL's."""
    groups, _kept = _pending(end)
    groups[0]._group_start()
    _abort_together(end, groups, "abort in a group")
    groups[0]._group_end()
    _see_the_end(end, "abort in a group")


def _pending(end: End) -> tuple[list[Any], list[torch.Tensor]]:
    """Two communicators on which the first process waits for what never comes, and the memory for that; the second
    process ends here.
    """
    groups = [end.communicator(f"pending {place}") for place in range(2)]
    for group in groups:
        swap(end, group)
    end.meet("met")
    if end.rank == 1:
        # It keeps its side of the communicators until the other one is through.
        end.store.wait(["through"], timedelta(seconds=60))
        os._exit(0)
    received = [end.numbers(-1) for _ in groups]
    for group, numbers in zip(groups, received, strict=True):
        group.recv([numbers], 1, 0)
    # They are on the device by then.
    time.sleep(1.0)
    return groups, received


def _abort_together(end: End, groups: list[Any], name: str) -> None:
    start = time.perf_counter()

    def abort(place: int) -> None:
        groups[place].abort()
        end.note(f"{name}, communicator {place}", round(time.perf_counter() - start, 3), "s")

    threads = [Thread(target=abort, args=(place,), daemon=True) for place in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)
    still = sum(thread.is_alive() for thread in threads)
    end.note(f"{name}, still aborting after {ABORT_SECONDS:.0f} s", still)


def _see_the_end(end: End, name: str) -> None:
    """Whether the device is free again."""
    start = time.perf_counter()
    end.synchronize()
    end.note(f"{name}, device idle after", round(time.perf_counter() - start, 3), "s")
    end.store.set("through", "")
    # What aborted communicators still have in this process shall not hold it up.
    os._exit(0)


SCENES = {
    MEETING: meeting,
    **dict(
        zip(
            PAIRS,
            (both_ways, batched, blocks, late, abort_in_turn, abort_at_once, abort_in_a_group),
            strict=True,
        )
    ),
}


def lead(options: argparse.Namespace) -> int:
    """Starts the two processes; 1 if one of them fails, after which the other one is ended."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*sys.argv, "--store", str(Path(folder) / "store"), "--rank"]
        processes = [
            subprocess.Popen(
                [sys.executable, *words, str(rank)],
                env={**os.environ, **OVER_SOCKETS, "NCCL_HOSTID": f"host{rank}"},
            )
            for rank in range(2)
        ]
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.05)
            if any(codes):
                time.sleep(GRACE_SECONDS)
        finally:
            for process in processes:
                process.kill()
        print(f"exit codes: {codes}")
        return int(any(codes))


def main() -> None:
    parser = parser_of(__doc__, tuple(SCENES))
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo only shows that it runs")
    parser.add_argument("--rank", type=int, help="of a process that this program has started")
    parser.add_argument("--store", help="the file at which the two meet")
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(lead(options))
    if options.backend == "nccl":
        torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if options.backend == "nccl" else torch.device("cpu")
    end = End(options.rank, dist.FileStore(options.store, 2), device, Notes(options.found))
    SCENES[options.name](end)
    end.meet("end")
    # The communicators of a process that ends by itself would wait for each other's ends.
    os._exit(0)


if __name__ == "__main__":
    main()
