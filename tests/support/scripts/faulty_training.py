"""A training of several ranks, of which one does something at some time.

    faulty_training.py RANK WHEN DEED [--OPTION ...]

WHEN: "start" (before the pipeline is built), "build", "forward" (inside of a layer), "between" steps, "end" (after all
steps, while the others sleep), "alone" (after all steps, while the others end: DEED is a call of the pipeline), or the
call before which it happens: "probe", "save", "load", "timeline" or "weights". Other deeds are in `do`. Faults of
`penstock.testing` come from the environment.
"""

import argparse
import atexit
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock

MICROBATCHES, WIDTH = 6, 4
LITTLE = 4
"""Descriptors: fewer than a pipeline of two processes needs, and enough for a traceback."""
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("when")
    parser.add_argument("deed")
    parser.add_argument("--schedule", default="1f1b-flush")
    parser.add_argument("--stages", help="how many ranks each stage has, such as 2-1; one each by default")
    parser.add_argument("--step", type=int, default=1, help="by number: the step in which, or before which, it happens")
    parser.add_argument("--seconds", type=float, default=60.0, help="timeout_seconds")
    parser.add_argument("--directory", type=Path, help="where checkpoints are")
    parser.add_argument(
        "--device", default="cpu", help='"tardy": a CPU that sends as GPUs do by NCCL; "own": a GPU each'
    )
    for flag in ("with", "hook", "resume", "saving", "skips", "shard", "streamed"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


OPTIONS = read_options()
ACTS = OPTIONS.rank == RANK


def do() -> None:
    """What the one rank does."""
    match OPTIONS.deed:
        case "raise" | "catch":
            raise ValueError("the data set is gone")
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill beside a child":
            # The child has all open files of this process.
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(OPTIONS.seconds)
            os._exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(600)
        case "hold the interpreter":
            re.match("(a+)+$", "a" * 60 + "b")
        case "leave":
            sys.exit(0)
        case "open few files":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + LITTLE, most))


class Layer(nn.Module):
    """A linear layer, in one forward of which something is done. It may take a second tensor."""

    left = math.inf
    """Forwards before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        Layer.left -= 1
        if Layer.left < 0:
            Layer.left = math.inf
            do()
        y = torch.tanh(self.linear(x))
        return y if scale is None else y * scale


class Both(Layer):
    """Makes two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.sigmoid()


class Skipping(nn.Module):
    """The third layer reads what the first one makes, and the second does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Both(), Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        near, far = self.first(x)
        return self.third(self.second(near), far)


def build(counts: list[int], device: torch.device) -> penstock.Pipeline:
    """A pipeline of one layer for each stage."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": OPTIONS.schedule, "stages": len(counts), "microbatches": MICROBATCHES}
    if max(counts) > 1:
        ends = pairwise(accumulate(counts, initial=0))
        stages = (penstock.Stage(s, s + 1, tuple(range(*span))) for s, span in enumerate(ends))
        options = {"plan": penstock.Plan(tuple(stages), OPTIONS.schedule, MICROBATCHES)}
    if OPTIONS.streamed:
        plan = penstock.Plan.uniform(2 * RANKS, 2 * RANKS, "breadth-first", MICROBATCHES, stages_per_rank=2)
        plan, counts = replace(plan, recompute=True, streamed=True), 2 * counts
        options = {"plan": plan, "offload_to": OPTIONS.directory}
    model = Skipping() if OPTIONS.skips else nn.Sequential(*(Layer() for _ in counts))
    return penstock.Pipeline(
        model.to(device),
        # Large values go directly past a stage.
        sample=(torch.randn(10_000 if OPTIONS.skips else 2, WIDTH, device=device),),
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        timeout_seconds=OPTIONS.seconds,
        shard_optimizer=OPTIONS.shard,
        resume=OPTIONS.directory if OPTIONS.resume else None,
        **options,
    )


def warm_up(device: torch.device) -> None:
    """What a GPU loads for its first step may take longer than the ranks wait for each other."""
    if device.type != "cuda":
        return
    layer = Layer().to(device)
    x = torch.randn(2, WIDTH, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    nn.functional.mse_loss(layer(x), x).backward()
    optimizer.step()
    torch.cuda.synchronize(device)


def train(pipe: penstock.Pipeline, device: torch.device) -> None:
    """A few steps, of which a rank that does something may not do all; many while a save is under way."""
    if OPTIONS.hook:
        # As IPython and others do, after the pipeline has been built.
        sys.excepthook = lambda kind, error, trace: print(f"my own hook: {kind.__name__}: {error}", file=sys.stderr)
    x = torch.randn(2 * MICROBATCHES, WIDTH, device=device)
    for step in range(1000 if OPTIONS.saving else 5):
        now = ACTS and step == OPTIONS.step
        if OPTIONS.saving and step == 1:
            pipe.save(OPTIONS.directory, wait=False)
            # With several versions it begins in the steps that follow.
            while pipe.schedule.flushes and not list(OPTIONS.directory.glob(".penstock-saving-*")):
                time.sleep(0.01)
        if now and OPTIONS.when == "between":
            do()
        if now and OPTIONS.when == "forward":
            Layer.left = 1
        try:
            print(float(pipe.step(x, x).loss), flush=True)
        except ValueError:
            if OPTIONS.deed == "catch":
                # The process lives on, with its connections: its peers must end all the same.
                time.sleep(1000)
            raise
        if OPTIONS.saving:
            time.sleep(0.02)


def work_after(pipe: penstock.Pipeline) -> None:
    """What follows the steps."""
    folder = OPTIONS.directory or Path(tempfile.gettempdir()) / f"faulty-{os.environ['MASTER_PORT']}"
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: pipe.step(x, x),
        "evaluate": lambda: pipe.evaluate(x, x),
        "predict": lambda: pipe.predict(x),
        "save": lambda: pipe.save(folder),
        "save in the background": lambda: pipe.save(folder, wait=False),
        "load": lambda: pipe.load(folder),
        "timeline": pipe.timeline,
        "weights": lambda: pipe.full_state_dict(rank=None),
    }
    if OPTIONS.when == "load":
        pipe.save(folder)
    if OPTIONS.when in calls:
        if ACTS:
            do()
        calls[OPTIONS.when]()
    elif OPTIONS.when == "alone" and ACTS:
        calls[OPTIONS.deed]()
    elif OPTIONS.when == "end" and OPTIONS.deed == "have a daemon":
        multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True).start()
    elif OPTIONS.when == "end" and ACTS:
        do()
    elif OPTIONS.when == "end":
        # Outside of the pipeline.
        time.sleep(600)


def over_tardy_communicators() -> AbstractContextManager[None]:
    """A context in which the CPU sends as GPUs do by NCCL."""
    # The modules of the tests lie one folder up.
    sys.path.append(str(Path(__file__).absolute().parents[2]))
    from support.simulated.stream_races import RacingDevice, on_streams

    os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
    return on_streams(RacingDevice(tardy=True))


def main() -> None:
    atexit.register(lambda: print("the user's exit handler", file=sys.stderr, flush=True))
    device = torch.device({"tardy": "cpu", "own": f"cuda:{RANK}"}.get(OPTIONS.device, OPTIONS.device))
    counts = [int(count) for count in (OPTIONS.stages or "-".join("1" * RANKS)).split("-")]
    warm_up(device)
    if OPTIONS.when in ("start", "probe") and ACTS:
        do()
    if OPTIONS.when == "probe":
        print(penstock.probe(timeout_seconds=OPTIONS.seconds))
        return
    if OPTIONS.when == "build":
        # Torch's own group is made by then.
        build(counts, device).close()
        if ACTS:
            do()
    with ExitStack() as stack:
        if OPTIONS.device == "tardy":
            stack.enter_context(over_tardy_communicators())
        pipe = build(counts, device)
        if getattr(OPTIONS, "with"):
            # The end of the block closes the pipeline before the exception reaches the top.
            stack.enter_context(pipe)
        if OPTIONS.skips:
            print(pipe.schedule.skips, flush=True)
        train(pipe, device)
        work_after(pipe)


if __name__ == "__main__":
    main()
