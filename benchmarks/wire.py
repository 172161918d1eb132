"""Trains two stages over a slow link with each kind of `wire_dtype=`: seconds and bytes of a step, and the loss.

    python benchmarks/wire.py --rates 50e6 200e6 --save benchmarks/results/wire.txt

Two network namespaces of Linux, joined by a pair of virtual Ethernet devices with a token bucket at each end, stand for
two hosts; that takes root and iproute2. They are removed afterwards. Bytes are those that the interface of the first
stage counts, TCP's headers included. Every kind trains the same model on the same batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock

KINDS: dict[str, Any] = {"None": None, "torch.bfloat16": torch.bfloat16, "RowInt8()": penstock.RowInt8()}
WIDTH, SAMPLES, MICROBATCHES = 128, 1024, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[50e6, 200e6], help="bits per second of the link")
    parser.add_argument("--steps", type=int, default=22, help="for each kind; the first two are not counted")
    parser.add_argument("--save", type=Path, help="write the table to this file, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _train(options.steps)
        return 0
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; two stages of two "
        f"layers of width {WIDTH}, 1f1b-flush, {MICROBATCHES} microbatches of {SAMPLES} samples: messages of "
        f"{SAMPLES * WIDTH * 4 / 1e6:.2f} MB in float32",
        f"{'link':>10}  {'wire_dtype':<14}  {'step':>8}  {'sent':>8}  {'on the link':>11}  loss",
    ]
    for rate in options.rates:
        with _joined_hosts(rate) as hosts:
            records = _launch(hosts, options.steps)
        for record in records:
            carried = record["bytes"] * 8 / rate
            lines.append(
                f"{rate / 1e6:>3.0f} Mbit/s  {record['kind']:<14}  {record['seconds'] * 1e3:>5.0f} ms  "
                f"{record['bytes'] / 1e6:>5.2f} MB  {carried * 1e3:>8.0f} ms  {record['loss']:.9f}"
            )
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.save:
        options.save.write_text(text)
    return 0


@contextmanager
def _joined_hosts(rate: float) -> Iterator[list[str]]:
    """Two namespaces, whose interface is ``link0``; they send each other `rate` bits per second."""
    names = [f"penstock-wire-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        pair = ["link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1]]
        _run("ip", "link", "add", *pair)
        for number, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"10.231.1.{number + 1}/24", "dev", "link0")
            for interface in ("lo", "link0"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            bucket = ["rate", f"{rate:.0f}bit", "burst", "16kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", *bucket)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _launch(hosts: list[str], steps: int) -> list[dict[str, Any]]:
    """The records of the first rank; each rank runs on one of `hosts`."""
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.231.1.1", "MASTER_PORT": "29531", "GLOO_SOCKET_IFNAME": "link0"}
    known |= {"PENSTOCK_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    ranks = []
    for rank, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "--rank", str(rank), "--steps", str(steps)]
        environment = {**os.environ, **known, "RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("a rank failed; its error is above")
    return [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]


def _train(steps: int) -> None:
    """Trains with each kind, and prints a record of each on the first rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES * MICROBATCHES, WIDTH, generator=generator)
    y = torch.tanh(x.roll(1, dims=1))
    for name, kind in KINDS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        seconds, loss = [], 0.0
        with penstock.Pipeline(
            model,
            (x[:SAMPLES],),
            F.mse_loss,
            lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            microbatches=MICROBATCHES,
            balance="layers",
            wire_dtype=kind,
        ) as pipe:
            for step in range(steps):
                if step == 2:
                    before = _sent_bytes()
                start = time.perf_counter()
                loss = float(pipe.step(x, y).loss)
                seconds.append(time.perf_counter() - start)
            sent = (_sent_bytes() - before) / (steps - 2)
            if pipe.rank == 0:
                record = {"kind": name, "seconds": statistics.median(seconds[2:]), "bytes": sent, "loss": loss}
                print(json.dumps(record), flush=True)


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    raise SystemExit(main())
