"""Trains two stages over a slow link with each kind of `wire_dtype=`: seconds and bytes of a step, and the loss.

    python benchmarks/wire.py --rates 50e6 200e6 --save benchmarks/results/wire.txt

Two network namespaces of Linux, joined by a pair of virtual Ethernet devices with a token bucket at each end, stand for
two hosts (hosts/networks.py); that takes root and iproute2. Bytes are those that the interface of the first
stage counts, TCP's headers included. Every kind trains the same model on the same batches.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from hosts.launches import run_everywhere
from hosts.networks import Network, joined_hosts
from measurement.reports import Report, conditions, option_parser

KINDS: dict[str, Any] = {"None": None, "torch.bfloat16": torch.bfloat16, "RowInt8()": penstock.RowInt8()}
WIDTH, SAMPLES, MICROBATCHES = 128, 1024, 8
_MOST_SECONDS = 600.0
"""How long the trainings over one link may take together."""


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[50e6, 200e6], help="bits per second of the link")
    parser.add_argument("--steps", type=int, default=22, help="for each kind; the first two are not counted")
    options = parser.parse_args()
    if options.worker is not None:
        _train(options.steps, options.worker)
        return
    report = Report(options.save)
    report.add(
        conditions("benchmarks/wire.py"),
        f"two stages of two layers of width {WIDTH}, 1f1b-flush, {MICROBATCHES} microbatches of {SAMPLES} samples: "
        f"messages of {SAMPLES * WIDTH * 4 / 1e6:.2f} MB in float32",
        f"{'link':>10}  {'wire_dtype':<14}  {'step':>8}  {'sent':>8}  {'on the link':>11}  loss",
    )
    for rate in options.rates:
        with joined_hosts(2, rate) as network:
            records = _records(network, options.steps)
        for record in records:
            carried = record["bytes"] * 8 / rate
            report.add(
                f"{rate / 1e6:>3.0f} Mbit/s  {record['kind']:<14}  {record['seconds'] * 1e3:>5.0f} ms  "
                f"{record['bytes'] / 1e6:>5.2f} MB  {carried * 1e3:>8.0f} ms  {record['loss']:.9f}"
            )


def _records(network: Network, steps: int) -> list[dict[str, Any]]:
    """What the first rank measured; each rank runs on a host of its own."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory, "records.json")
        arguments = [__file__, "--steps", str(steps), "--worker", str(record)]
        run_everywhere(network, arguments, _MOST_SECONDS, {"PENSTOCK_SHARED_MEMORY": "0"})
        return json.loads(record.read_text())


def _train(steps: int, path: Path) -> None:
    """Trains with each kind, and writes a record of each to `path` on the first rank."""
    torch.set_num_threads(1)
    records = []
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
            records.append({"kind": name, "seconds": statistics.median(seconds[2:]), "bytes": sent, "loss": loss})
            if pipe.rank == 0:
                path.write_text(json.dumps(records))


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
