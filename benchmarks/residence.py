"""Trains a GPT whose weights, gradients and optimizer's state are three times the memory that it may have.

    python benchmarks/residence.py --save benchmarks/results/residence.txt

Needs root on Linux with the memory controller of cgroup v1, and a directory on a disk (`--directory`). One process is
in a cgroup whose limit is a third of weights, gradients and state (16 bytes a weight: AdamW in float32), or `--limit`.
It begins with a model on the meta device. Its stages are streamed, with `offload_to` in the directory. Another process,
without a limit, trains the same model all in memory: the losses must be the same. The exit code is 1 if not, or if the
kernel killed the first one.

`plan`: the bytes that the simulator predicts, and the seconds of a step, from a profile of the model and from the speed
of the disk, which `penstock probe` finds, under the same limit. All processes return freed memory to the system at
once, so that what is held can be seen. That takes some 17 % of a step, in the profile, too. `base`: what a process
holds after the training of a smaller model with layers of the same width. `held`: the most memory beyond it that is no
page of a file, sampled; the pages of files are in the limit, too.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.reports import Report, conditions, option_parser, table
from measurement.resident_memory import ALLOCATOR
from penstock.profiling.links import measure_host_bandwidth

CONTROLLER = Path("/sys/fs/cgroup/memory")
CONTEXT, SAMPLES, MICROBATCHES, WORDS = 128, 4, 4, 4096
"""Tokens of a sample, samples of a microbatch, microbatches, and the size of the vocabulary."""
BYTES_PER_WEIGHT = 16


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)

    def forward(self, words: Tensor) -> Tensor:
        embedded: Tensor = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return embedded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.shape[-1] // 64
        query, key, value = self.attention(self.before(x)).unflatten(-1, (3, heads, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        added: Tensor = x + self.narrow(F.gelu(self.wide(self.behind(x))))
        return added


def model_of(width: int, blocks: int) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS))
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(blocks)), head)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def batch_of(microbatches: int) -> tuple[Tensor, Tensor]:
    size = (microbatches * SAMPLES, CONTEXT + 1)
    words = torch.randint(WORDS, size, generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:]


def plan_of(layers: int, *, streamed: bool) -> penstock.Plan:
    """A stage for each layer; the embedding and the first block are one, and so are the head and the last."""
    starts = [0, *range(2, layers - 2), layers]
    stages = tuple(penstock.Stage(start, stop, (0,)) for start, stop in pairwise(starts))
    return penstock.Plan(stages, "breadth-first", MICROBATCHES, recompute=True, streamed=streamed)


def train(options: argparse.Namespace, *, streamed: bool) -> tuple[list[float], list[float]]:
    """The losses, and the seconds of the steps."""
    with torch.device("meta"):
        model = model_of(options.width, options.blocks)
    (x, y), (sample, _) = batch_of(MICROBATCHES), batch_of(1)
    pipe = penstock.Pipeline(
        model,
        (sample,),
        loss_fn,
        partial(torch.optim.AdamW, lr=1e-4, fused=True),
        plan=plan_of(options.layers, streamed=streamed),
        init_fn=penstock.reset_parameters(model),
        offload_to=options.directory,
        check="off",
    )
    losses, seconds = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        losses.append(float(pipe.step(x, y).loss))
        seconds.append(time.perf_counter() - start)
    pipe.close()
    return losses, seconds


def anonymous_bytes() -> int:
    """What this process holds that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


@contextmanager
def sampled(found: dict[str, int]) -> Iterator[None]:
    """Puts the most of `anonymous_bytes` in this block into `found`."""
    ended, before = threading.Event(), anonymous_bytes()
    found["held"] = 0

    def look() -> None:
        while not ended.wait(0.005):
            found["held"] = max(found["held"], anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    ended.set()
    thread.join()


def work(options: argparse.Namespace) -> None:
    """One training, in a process of its own."""
    torch.set_num_threads(1)
    if options.measure == "profile":
        x, y = batch_of(1)
        model = model_of(options.width, 1)
        few = penstock.profile(model, (x,), loss_fn=loss_fn, target=y, progress=False, iterations=3, warmup=1)
        few.save(options.worker)
        return
    if options.measure == "disk":
        bandwidth = measure_host_bandwidth(torch.device("cpu"), options.directory)
        options.worker.write_text(json.dumps({"bandwidth": bandwidth}))
        return
    # What libraries make once is in the base.
    small = argparse.Namespace(**{**vars(options), "blocks": 2, "layers": 5, "steps": 1})
    train(small, streamed=options.limit is not None)
    gc.collect()
    found: dict[str, int] = {"base": anonymous_bytes()}
    with sampled(found):
        losses, seconds = train(options, streamed=options.limit is not None)
    options.worker.write_text(json.dumps({**found, "losses": losses, "seconds": seconds}))


def launch(options: argparse.Namespace, folder: Path, limit: int | None, *added: str) -> dict[str, Any] | None:
    """What the process found, with the options `added`; None if the kernel killed it."""
    report, group = folder / f"{limit}.json", CONTROLLER / f"penstock-{os.getpid()}"
    command = [sys.executable, __file__, "--worker", report, *added]
    for name in ("width", "blocks", "layers", "steps", "directory"):
        command += [f"--{name}", getattr(options, name)]
    if limit is not None:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group, *command, "--limit", limit]
    try:
        ended = subprocess.run(list(map(str, command)), env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"})
        killed = limit is not None and "oom_kill 0" not in (group / "memory.oom_control").read_text()
    finally:
        if limit is not None:
            group.rmdir()
    if ended.returncode and not killed:
        raise SystemExit(f"the training failed with exit code {ended.returncode}")
    return None if killed else json.loads(report.read_text())


def compare(options: argparse.Namespace) -> list[list[str]]:
    """The rows of a table: what was planned, and what was measured with and without the limit."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in model_of(options.width, options.blocks).parameters())
    limit = options.limit or weights * BYTES_PER_WEIGHT // 3
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        launch(options, Path(name), None, "--measure", "profile")
        few = penstock.Profile.load(Path(name, "None.json"))
        disk = launch(options, Path(name), limit, "--measure", "disk")
        limited = launch(options, Path(name), limit)
        free = None if options.alone else launch(options, Path(name), None)
    assert disk is not None, "the limit is too small for a process"
    # The blocks are alike: what one of a small model needs is known of all.
    first, block, *last = few.layers
    layers = (first, *(replace(block, name=f"{number + 1}") for number in range(options.blocks)), *last)
    profile, bandwidth = replace(few, layers=layers), disk["bandwidth"]
    cluster = replace(penstock.Cluster.uniform(1, 1e9), host_bandwidth=bandwidth)
    plan = plan_of(options.layers, streamed=True)
    predicted = penstock.simulate(plan, profile, cluster, optimizer_copies=2.0)
    peak = max(memory.peak_bytes for memory in predicted.memory)
    size = f"{weights / 1e6:.0f}M, {weights * BYTES_PER_WEIGHT / 2**20:.0f} MiB"
    rows = [[f"plan, disk {bandwidth / 1e6:.0f} MB/s", size, "", f"{peak / 2**20:.0f}", f"{predicted.seconds:.1f}", ""]]
    for kind, found in ((f"limit {limit / 2**20:.0f} MiB", limited), ("no limit, resident", free)):
        if found is not None:
            steps = " ".join(f"{each:.1f}" for each in found["seconds"])
            losses = " ".join(f"{each:.6f}" for each in found["losses"])
            rows.append([kind, size, *(f"{found[name] / 2**20:.0f}" for name in ("base", "held")), steps, losses])
    if limited is None:
        rows.append(["KILLED", *[""] * 5])
    elif free is not None and limited["losses"] != free["losses"]:
        rows.append(["OTHER LOSSES", *[""] * 5])
    return rows


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on a disk")
    parser.add_argument("--limit", type=int, help="bytes; by default a third of weights, gradients and state")
    for name, usual in (("width", 768), ("blocks", 14), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=("profile", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help="not without a limit")
    options = parser.parse_args()
    # The head is two layers.
    options.layers = options.layers or options.blocks + 3
    if options.worker is not None:
        work(options)
        return
    shown = Report(options.save)
    shown.add(conditions("benchmarks/residence.py"))
    rows = compare(options)
    shown.add(table(["training", "weights, all bytes", "base MiB", "held MiB", "seconds", "losses"], rows))
    sys.exit(rows[-1][0] in ("KILLED", "OTHER LOSSES"))


if __name__ == "__main__":
    main()
