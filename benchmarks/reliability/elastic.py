"""Loses one host after the other and goes on with fewer ranks: 4, 3, 2, on one machine with an agent for each host.

    cd benchmarks; python -m reliability.elastic --save results/elastic.txt

Each host is a ``torchrun --nnodes 2:4`` with one process. After some steps the last host is lost: its agent and its
process are killed. The others notice it, meet again, plan for their number, load the newest checkpoint and go on. The
script prints the seconds from the kill to the end of the next step, and compares the loss at the end with that of a
training on two ranks which lost nothing. The sums over stages have another order, so equality is up to rounding.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement.reports import Report, option_parser
from reliability import training
from reliability.jobs import Job, run_job

__all__ = ["Loss", "main", "shrink"]

TOLERANCE = 1e-9
"""Relative, in float64: rounding of about 1e-16 in each of some hundred steps, which training amplifies."""
HEARTBEATS = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5"
"""torchrun takes a host for lost after 15 s by default, and then waits 30 s for others to come."""
_LONGEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A host that was lost: how many ranks there were before and after, and the seconds to the next step."""

    before: int
    after: int
    seconds: float


class _Host:
    """An agent of torchrun with one process."""

    def __init__(self, directory: Path, number: int, port: int, steps: int, save_every: int) -> None:
        options = f"{HEARTBEATS},is_host={str(number == 0).lower()}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1"]
        command += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--rdzv-id", "elastic", "--rdzv-conf", options, training.__file__, str(directory)]
        command += ["--steps", str(steps), "--save-every", str(save_every), "--schedule", "1f1b-flush"]
        self.log = directory / f"host-{number}.log"
        with self.log.open("w") as opened:
            self.agent = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose(self) -> None:
        """Kills the agent and its process."""
        path = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        children = [int(word) for word in path.read_text().split()]
        for process in [self.agent.pid, *children]:
            os.kill(process, signal.SIGKILL)
        self.agent.wait()


def shrink(directory: Path, hosts: int, least: int, steps: int, save_every: int) -> list[Loss]:
    """Trains on `hosts` and loses one after the other until `least` are left. Waits for the end of the training."""
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [_Host(directory, number, port, steps, save_every) for number in range(hosts)]
    losses = []
    try:
        for before in range(hosts, least, -1):
            # Only what was saved is left; then some steps more.
            _wait_for_step(running, before, at_least=save_every + 1)
            running.pop().lose()
            killed = time.time()
            step = _wait_for_step(running, before - 1, at_least=1)
            losses.append(Loss(before, before - 1, step["time"] - killed))
        for host in running:
            host.agent.wait(_LONGEST_SECONDS)
    finally:
        for host in running:
            if host.agent.poll() is None:
                host.lose()
    return losses


def _wait_for_step(hosts: Sequence[_Host], ranks: int, at_least: int) -> dict[str, Any]:
    """The step number `at_least` (from 1) of those that `ranks` ranks made, as rank 0 wrote it."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        made = [step for host in hosts for step in _steps_of(host.log) if step["ranks"] == ranks]
        if len(made) >= at_least:
            return sorted(made, key=lambda step: step["time"])[at_least - 1]
        time.sleep(0.05)
    logs = "\n".join(host.log.read_text()[-3000:] for host in hosts)
    raise TimeoutError(f"{ranks} ranks made no step within {_LONGEST_SECONDS:g} s:\n{logs}")


def _steps_of(log: Path) -> Iterator[dict[str, Any]]:
    for line in re.findall(r"^\{.*\}$", log.read_text(), flags=re.MULTILINE):
        yield json.loads(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the losses of hosts and compares the ends. Returns 1 if these differ."""
    parser = option_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--least", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        losses = shrink(Path(folder) / "elastic", given.hosts, given.least, given.steps, save_every=20)
        result = training.read_result(Path(folder) / "elastic")
        whole = run_job(Job(given.least, "1f1b-flush", given.steps, save_every=20), Path(folder) / "whole").result
    lines = [f"{one.before} ranks to {one.after}: {one.seconds:.1f} s from the kill to the next step" for one in losses]
    ends = bool(result) and abs(result["loss"] - whole["loss"]) <= TOLERANCE * abs(whole["loss"])
    lines.append(
        f"loss after {given.steps} steps: {result.get('loss')} on {result.get('ranks')} ranks, {whole['loss']} without "
        f"a loss: {'equal up to rounding' if ends else 'WRONG'}"
    )
    Report(given.save).add(*lines)
    return int(not ends)


if __name__ == "__main__":
    sys.exit(main())
