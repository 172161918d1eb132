"""Every schedule of torch.distributed.pipelining as a contender, with stages cut by hand between the same layers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from contenders.contenders import Absent, Entry, Running
from contenders.jobs import Setting
from measurement.ideals import flush_lengthening


@dataclass(frozen=True, slots=True)
class _Method:
    """A schedule of torch's."""

    kind: type
    per_rank: int = 1
    folded: bool = False
    """Whether rank r holds stages r and 2p - 1 - r, instead of r and p + r."""
    splits: bool = False
    """Whether backwards come in two parts. No bubble is granted to these."""


METHODS = {
    "torch gpipe": _Method(pipelining.ScheduleGPipe),
    "torch 1f1b": _Method(pipelining.Schedule1F1B),
    "torch interleaved": _Method(pipelining.ScheduleInterleaved1F1B, 2),
    "torch looped bfs": _Method(pipelining.ScheduleLoopedBFS, 2),
    "torch interleaved zb": _Method(pipelining.ScheduleInterleavedZeroBubble, 2, splits=True),
    "torch zbv": _Method(pipelining.ScheduleZBVZeroBubble, 2, folded=True, splits=True),
    "torch dualpipev": _Method(pipelining.ScheduleDualPipeV, 2, folded=True, splits=True),
}


def torch_entries(setting: Setting) -> list[Entry | Absent]:
    """All of them."""
    return [_entry(name, method, setting) for name, method in METHODS.items()]


class _Stage(pipelining.PipelineStage):
    """A stage whose neighbours may be in its own process."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # In torch 2.11 stages greet their neighbours through the process group, and Gloo sends nothing to oneself.
        return [greeting for greeting in super()._get_init_p2p_neighbors_ops() if greeting.peer != dist.get_rank()]


def _entry(name: str, method: _Method, setting: Setting) -> Entry | Absent:
    stages = setting.processes * method.per_rank
    rounds = max(1, setting.microbatches // setting.processes)
    if method.per_rank > 1 and not method.folded and setting.microbatches % rounds:
        return Absent(name, f"{setting.microbatches} microbatches do not make {rounds} equal rounds")
    if method.kind is pipelining.ScheduleDualPipeV and setting.microbatches < stages:
        return Absent(name, f"{setting.microbatches} microbatches are fewer than {stages} stages")
    try:
        setting.job.cuts(stages)
    except ValueError as error:
        return Absent(name, str(error))
    parts = 3 if method.splits else 2
    return Entry(
        name,
        lambda setting: _build(method, setting),
        1.0 if method.splits else flush_lengthening(setting.processes, setting.microbatches, method.per_rank),
        actions=parts * setting.microbatches * method.per_rank,
        sent_bytes=sent_bytes([rank_of(stage, method.folded, setting) for stage in range(stages)], setting),
    )


def rank_of(stage: int, folded: bool, setting: Setting) -> int:
    """The rank that holds `stage`."""
    processes = setting.processes
    return min(stage, 2 * processes - 1 - stage) if folded else stage % processes


def sent_bytes(ranks: list[int], setting: Setting) -> tuple[float, ...]:
    """In a step, rank by rank, where stage s is on rank ``ranks[s]``: neighbours on two ranks send both ways."""
    cut = setting.microbatches * setting.job.cut_bytes
    total = [0.0] * setting.processes
    for here, there in pairwise(ranks):
        if here != there:
            total[here] += cut
            total[there] += cut
    return tuple(total)


def _computing(setting: Setting, device: torch.device) -> AbstractContextManager[object]:
    """Around a whole step: weights that are cast once for it would be less work than the others have."""
    if setting.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=setting.autocast, cache_enabled=False)


def _build(method: _Method, setting: Setting) -> Running:
    job, rank, stages = setting.job, dist.get_rank(), setting.processes * method.per_rank
    model, cuts = job.build(), setting.job.cuts(stages)
    layers = job.layers(model)
    batch, target = job.batch(setting.microbatches)
    held = [
        _Stage(nn.Sequential(*layers[cuts[index] : cuts[index + 1]]), index, stages, batch.device)
        for index in range(stages)
        if rank_of(index, method.folded, setting) == rank
    ]
    schedule = method.kind(
        held[0] if method.per_rank == 1 else held, n_microbatches=setting.microbatches, loss_fn=job.loss
    )
    parameters = [parameter for stage in held for parameter in stage.submod.parameters()]
    optimizer = setting.optimizer(parameters)
    mine = {id(parameter) for parameter in parameters}
    names = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in mine}
    inputs = (batch,) if any(stage.is_first for stage in held) else ()
    expected = {"target": target} if any(stage.is_last for stage in held) else {}

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        # The outputs are not used; merging them would be torch's loss.
        with _computing(setting, batch.device):
            schedule.step(*inputs, **expected, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    return Running(step, names)
