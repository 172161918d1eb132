"""Prints how much memory a process takes to load and to write its part of a model: ``python loading_script.py FOLDER``.

As JSON, in bytes: ``own`` (the weights of its stage), ``loading`` (the most that it has resident while the pipeline is
made, beyond what it had before), ``writing`` (the same of an export).
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import penstock

WIDTHS = (1024, 2048)
LAYERS = 8
TENSOR_BYTES = WIDTHS[0] * WIDTHS[1] * 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def build() -> nn.Sequential:
    """Layers of one large matrix each."""
    return nn.Sequential(*(nn.Linear(WIDTHS[k % 2], WIDTHS[(k + 1) % 2], bias=False) for k in range(LAYERS)))


def measure(folder: Path) -> dict[str, int]:
    """What the script prints."""
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        # Freed tensors go back to the system at once, so that what is resident is what is alive.
        ctypes.CDLL(None).mallopt(option, 2**16)
    with torch.device("meta"):
        # A pipeline before it: what the first capture of a process imports and caches is no weight.
        _pipeline(nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))), 8, penstock.reset_parameters).close()
        model = build()
    load = penstock.load_weights(folder)
    before = _began()
    pipe = _pipeline(model, WIDTHS[0], lambda model: load)
    loading = _status("VmHWM") - before
    before = _began()
    pipe.save_weights(folder / "written", max_shard_size=3 * TENSOR_BYTES)
    writing = _status("VmHWM") - before
    own = sum(parameter.nbytes for parameter in pipe.parameters())
    pipe.close()
    return {"own": own, "loading": loading, "writing": writing}


def _pipeline(model: nn.Sequential, width: int, init_fn: object) -> penstock.Pipeline:
    x = torch.zeros(2, width, device="cpu")
    return penstock.Pipeline(
        model, (x,), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), init_fn=init_fn(model), stages=4
    )


def _began() -> int:
    """What is resident now; begins to look for the peak anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
