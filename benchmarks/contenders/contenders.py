"""The ways to train that benchmarks compare: a plain loop, DDP, and Penstock's schedules; torch's stand beside.

An `Entry` is what is known of a way before anything runs; `build` makes it ready to be stepped in each process. All of
them train the same model on the same minibatches with the same optimizer.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import penstock
from contenders.jobs import FLOAT_BYTES, Setting
from measurement.ideals import lengthening
from measurement.launches import outside_the_launch
from penstock.errors import PenstockError
from penstock.runtime.transport.backend_selection import SHARED_MEMORY
from penstock.scheduling import METHODS, Compute, Send, Update
from penstock.scheduling.schedules import Schedule
from penstock.training.recipes import autocasting
from penstock.values.plans import schedule

ONE_PROCESS, ONE_STAGE, DDP = "one process", "penstock, one stage", "torch DDP"
GLOO = ", gloo"
"""What the name of a contender ends with whose messages go through Gloo instead of shared memory."""
PEERS = {
    "gpipe": "torch gpipe",
    "1f1b-flush": "torch 1f1b",
    "interleaved": "torch interleaved",
    "zb-h1": "torch interleaved zb",
    "zb-v": "torch zbv",
}
"""By Penstock's schedule: torch's implementation of it, or of the most like it."""


@dataclass(frozen=True, slots=True)
class Running:
    """One way to train in this process, ready to be stepped."""

    step: Callable[[], Sequence[SupportsFloat]]
    """Returns losses whose mean is that of the step; none where another process knows them."""
    parameters: Mapping[str, Tensor]
    """By the model's names, those that this process trains; of processes that have the same ones, the first tells."""
    close: Callable[[], object] = lambda: None
    pipe: penstock.Pipeline | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to train, before anything runs."""

    name: str
    build: Callable[[Setting], Running] = field(repr=False)
    lengthening: float = 1.0
    """The ideal step over the perfect one (see measurement/ideals.py)."""
    actions: int = 0
    """Forwards and backwards, or parts of backwards, of one rank in a step."""
    sent_bytes: tuple[float, ...] = ()
    """In a step, rank by rank: activations and gradients, from the schedule and the shapes. Not the losses, which are 8
    bytes a microbatch. For DDP what an all-reduce in a ring sends."""
    peer: str | None = None
    """The contender with torch's implementation of the same schedule."""
    alone: bool = False
    """Whether rank 0 trains the whole model, and the others wait."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A way to train that does not fit the setting."""

    name: str
    reason: str


def plain_loop() -> Entry:
    """A training loop in one process that knows of no library and accumulates gradients over the microbatches."""

    def build(setting: Setting) -> Running:
        job = setting.job
        model = job.build()
        optimizer = setting.optimizer(list(model.parameters()))
        tokens, target = job.batch(setting.microbatches)

        def step() -> list[Tensor]:
            losses = []
            for part, expected in zip(
                tokens.chunk(setting.microbatches), target.chunk(setting.microbatches), strict=True
            ):
                with autocasting(setting.autocast, part.device):
                    loss = job.loss(model(part), expected)
                (loss / setting.microbatches).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            return losses

        return Running(step, dict(model.named_parameters()))

    return Entry(ONE_PROCESS, build, alone=True)


def one_stage() -> Entry:
    """Penstock in one process with one stage, beside which the plain loop says what a step costs more."""

    def build(setting: Setting) -> Running:
        with outside_the_launch() if not dist.is_initialized() else nullcontext():
            pipe = pipeline(setting, stages=1, schedule="1f1b-flush")
        return running_pipeline(pipe, setting)

    return Entry(ONE_STAGE, build, alone=True)


def data_parallel(setting: Setting) -> Entry | Absent:
    """torch's DDP: every process takes its share of the microbatches, and sums in the last of them."""
    count = setting.processes
    if setting.microbatches % count:
        return Absent(DDP, f"{setting.microbatches} microbatches do not divide by {count} processes")

    def build(setting: Setting) -> Running:
        job = setting.job
        model = DistributedDataParallel(job.build())
        optimizer = setting.optimizer(list(model.parameters()))
        cut = (tensor.chunk(setting.microbatches) for tensor in job.batch(setting.microbatches))
        parts = list(zip(*cut, strict=True))[dist.get_rank() :: count]

        def step() -> list[Tensor]:
            for index, (part, expected) in enumerate(parts):
                last = index == len(parts) - 1
                with nullcontext() if last else model.no_sync():
                    with autocasting(setting.autocast, part.device):
                        loss = job.loss(model(part), expected)
                    (loss / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
            # Each process knows its own microbatches alone.
            return []

        return Running(step, dict(model.module.named_parameters()) if dist.get_rank() == 0 else {})

    gradients = FLOAT_BYTES * sum(parameter.numel() for parameter in setting.job.build().parameters())
    sent = (2 * (count - 1) / count * gradients,) * count
    return Entry(DDP, build, actions=2 * setting.microbatches // count, sent_bytes=sent)


def penstock_entries(setting: Setting) -> list[Entry | Absent]:
    """Every schedule of Penstock, over shared memory and over Gloo."""
    found = [_penstock_entry(setting, method.name, stages_per_rank(method.name)) for method in METHODS]
    return [
        replace(entry, name=entry.name + GLOO, build=_over_gloo(entry.build))
        if gloo and isinstance(entry, Entry)
        else entry
        for entry in found
        for gloo in (False, True)
        if not (gloo and isinstance(entry, Absent))
    ]


def _penstock_entry(setting: Setting, method: str, per_rank: int) -> Entry | Absent:
    name = f"penstock {method}"
    try:
        plan = _plan(setting, method, per_rank)
        planned = schedule(plan)
    except (PenstockError, ValueError) as error:
        return Absent(name, str(error).partition("\n")[0])
    return Entry(
        name,
        lambda setting: running_pipeline(pipeline(setting, plan=_plan(setting, method, per_rank)), setting),
        lengthening(planned),
        actions=max(sum(isinstance(a, Compute) and not isinstance(a, Update) for a in row) for row in _steady(planned)),
        sent_bytes=tuple(setting.job.cut_bytes * sum(isinstance(a, Send) for a in row) for row in _steady(planned)),
        peer=PEERS.get(method),
    )


def stages_per_rank(method: str) -> int:
    """Two where the schedule takes more than one."""
    try:
        return Schedule(method, 2, 4, 2).stages_per_rank
    except PenstockError:
        return 1


def _steady(planned: Schedule) -> penstock.scheduling.Programs:
    """What every rank does in a step once the pipe is full."""
    return planned.step(planned.ranks)


def _plan(setting: Setting, method: str, per_rank: int) -> penstock.Plan:
    """Stages of equal cost where `method` wants them."""
    stages = setting.processes * per_rank
    cuts = setting.job.cuts(stages)
    even = penstock.Plan.uniform(
        cuts[-1], stages, schedule=method, microbatches=setting.microbatches, stages_per_rank=per_rank
    )
    cut = zip(even.stages, cuts[:-1], cuts[1:], strict=True)
    return replace(even, stages=tuple(replace(stage, start=start, stop=stop) for stage, start, stop in cut))


def pipeline(setting: Setting, **options: Any) -> penstock.Pipeline:
    """Penstock with `options` for the job of `setting`."""
    job = setting.job
    sample = (job.batch(1)[0],)
    if "plan" not in options:
        options["microbatches"] = setting.microbatches
    options["autocast"] = setting.autocast
    if not setting.own_weights:
        return penstock.Pipeline(job.build(), sample, job.loss, setting.optimizer, **options)
    with torch.device("meta"):
        model = job.build()
    return penstock.Pipeline(model, sample, job.loss, setting.optimizer, init_fn=_fill, **options)


def _fill(name: str, tensor: Tensor) -> None:
    """Some weights, small enough that the loss stays finite."""
    tensor.fill_(0.001)


def running_pipeline(pipe: penstock.Pipeline, setting: Setting) -> Running:
    """`pipe`, ready to be stepped."""
    tokens, target = setting.job.batch(setting.microbatches)

    def close() -> None:
        pipe.drain()
        pipe.close()

    return Running(lambda: [pipe.step(tokens, target).loss], dict(pipe.named_parameters()), close, pipe)


def _over_gloo(build: Callable[[Setting], Running]) -> Callable[[Setting], Running]:
    def build_over_gloo(setting: Setting) -> Running:
        with _without_shared_memory():
            return build(setting)

    return build_over_gloo


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Pipelines that are built inside send everything through Gloo."""
    os.environ[SHARED_MEMORY] = "0"
    try:
        yield
    finally:
        del os.environ[SHARED_MEMORY]
