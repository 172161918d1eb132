"""The training that the reliability benchmarks interrupt: small, exact, and resumed by itself.

    torchrun --nproc-per-node 3 --max-restarts 5 benchmarks/reliability/training.py RUN_DIRECTORY --schedule 2bw

In float64, with a loader that shuffles and whose epochs end between steps, AdamW and a learning rate that changes. At
the end rank 0 writes a digest of all weights to ``result.json`` beside the checkpoints: equal digests are equal bits.
"""

import argparse
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import penstock

WIDTH, LAYERS, MICROBATCHES = 8, 8, 12
_RESULT = "result.json"


def build() -> nn.Module:
    """Eight layers; the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).double()


def train(directory: Path, schedule: str, steps: int, save_every: int, stages: int | None = None) -> None:
    """Trains to step `steps` from the newest checkpoint in `directory`, if there is one.

    `stages`: in a single process, those of the run that it is to equal.
    """
    pipe = penstock.Pipeline(
        build(),
        (torch.zeros(1, WIDTH, dtype=torch.float64),),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        schedule=schedule,
        microbatches=MICROBATCHES,
        stages=stages,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        resume=directory,
        timeout_seconds=60.0,
    )
    values = torch.randn(5 * MICROBATCHES + 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batches = penstock.loader(TensorDataset(values, values.roll(1, 1)), MICROBATCHES, shuffle=True, drop_last=True)
    pipe.track(batches=batches)
    loss, early = None, _measure_process()
    while pipe.steps < steps:
        for x, y in batches:
            loss = pipe.step(x, y).loss
            if pipe.rank == 0:
                print(json.dumps({"step": pipe.steps, "ranks": pipe.schedule.ranks, "time": time.time()}), flush=True)
            if pipe.steps == steps // 10:
                early = _measure_process()
            if pipe.steps % save_every == 0:
                pipe.save(directory, keep=2)
            if pipe.steps == steps:
                break
    pipe.drain()
    late = _measure_process()
    weights = pipe.full_state_dict()
    if pipe.rank == 0:
        digest = hashlib.sha256()
        for name, tensor in sorted(weights.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        result = {
            "digest": digest.hexdigest(),
            "loss": None if loss is None else float(loss),
            "steps": pipe.steps,
            "ranks": pipe.schedule.ranks,
            "early": early,
            "late": late,
        }
        directory.parent.mkdir(exist_ok=True)
        (directory.parent / _RESULT).write_text(json.dumps(result))
    pipe.close()


def _measure_process() -> dict[str, int]:
    """Open descriptors, threads and resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, flags=re.MULTILINE)}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": found["Threads"],
        "resident_kilobytes": found["VmRSS"],
    }


def read_result(directory: Path) -> dict[str, Any]:
    """What a training in `directory` wrote at its end; {} if it has not ended."""
    path = directory / _RESULT
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the run; its checkpoints are in checkpoints/")
    parser.add_argument("--schedule", default="1f1b-flush")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    given = parser.parse_args(arguments)
    train(given.directory / "checkpoints", given.schedule, given.steps, given.save_every)


if __name__ == "__main__":
    main()
