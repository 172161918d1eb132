"""Exports over an earlier export and is killed before the change number ARGUMENT 2 that it makes in DIRECTORY.

Usage: interrupted_export_script.py DIRECTORY NUMBER
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}


def make_pipeline() -> penstock.Pipeline:
    """Three layers of zeros."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return penstock.Pipeline(
        model, (torch.zeros(2, 4),), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), stages=3
    )


def die_before(directory: str, number: int) -> None:
    """Has the process killed before its next change but `number` of what is in `directory`."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not str(arguments[0]).startswith(directory):
            return
        if event == "open" and not str(arguments[1]).startswith(("x", "w")):
            return
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    directory = sys.argv[1]
    pipe = make_pipeline()
    pipe.save_weights(directory, max_shard_size=64)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(1.0)
    die_before(directory, int(sys.argv[2]))
    pipe.save_weights(directory, max_shard_size=128)
    Path(f"{directory}.ended").touch()
