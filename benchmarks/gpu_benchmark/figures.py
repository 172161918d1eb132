"""The rows of the benchmark on one device: arithmetic on what was taken.

A model of N parameters and L blocks of width H computes ``6 N + 12 L H T`` floating-point operations for a token of a
text of T, forward and backward: appendix B of PaLM (Chowdhery et al., JMLR 2023), which writes heads times their size
for H. Attention counts as if it were not causal, and what is computed again does not count.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from contenders.contenders import Absent, Entry
from contenders.jobs import Language
from gpu_benchmark.lineup import Contender, Launch, Size
from gpu_benchmark.turns import Facts, Taken
from measurement.ideals import speedup

_Known = TypeVar("_Known")
UPDATES_BETWEEN = ("penstock pipedream",)
"""They update their weights after every microbatch, so that the later ones of the first step have newer ones."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender. Series are by round, lists of bytes by process."""

    name: str
    processes: int
    sharing: str | None
    """How several processes share the device; None for one."""
    ranks: int
    """In one process, or in one each."""
    variant: str
    """How it trains."""
    beside: str
    """And how the plain loop does that takes turns with it."""
    microbatches: int
    ready_seconds: float
    """Until its first steps were done: building it, and compiling where that is asked for."""
    step_seconds: list[float]
    plain_seconds: list[float]
    """Of the plain loop beside it."""
    over_plain: float
    """How many times as fast as that, by the median of the rounds."""
    tokens_per_second: float
    share_of_matrix: float
    """The model's floating-point operations per second over those of large matrix products in the same launch."""
    idle_shares: list[float]
    """The shares of a step's time in which no rank computed, by Penstock's timeline; none without a pipeline."""
    peak_bytes: list[int] | None
    """Of tensors that the program still had."""
    active_bytes: list[int] | None
    """And of those that a stream was still to use."""
    reserved_bytes: list[int] | None
    """What the allocator had taken from the device."""
    held_bytes: list[int] | None
    """When nothing is in flight: weights, all their versions, and the state of the optimizer."""
    versions_bytes: int
    """All weight versions but one of each stage, by the schedule."""
    versions_held: int | None
    """The same as measured: how much more is held than under `1f1b-flush`. None where that is not known."""
    host_seconds: list[float]
    """Until a step returns, of the narrow model; none where that was not measured."""
    plain_host_seconds: list[float]
    actions: int
    """In a step of the first process, sends and receives among them; 0 for what is no pipeline of Penstock's."""
    sent_bytes: list[float]
    """In a step, by schedule and shapes; nothing within a process."""
    losses: list[float]
    """Of the first steps."""

    @property
    def host_per_action(self) -> float | None:
        """The seconds of the host for an action."""
        return statistics.median(self.host_seconds) / self.actions if self.actions and self.host_seconds else None

    @property
    def beyond_plain_per_action(self) -> float | None:
        """The seconds of the host for an action beyond those of the plain loop; None for one of several processes,
        which has only a part of the loop's work.
        """
        if not self.actions or not self.host_seconds or self.processes > 1:
            return None
        pairs = zip(self.host_seconds, self.plain_host_seconds, strict=True)
        return statistics.median(own - plain for own, plain in pairs) / self.actions


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender without figures."""

    name: str
    processes: int
    ranks: int
    reason: str


@cache
def parameters_of(model: Language) -> int:
    """How many numbers are trained."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.build().parameters())


def tokens_of(size: Size) -> int:
    """In a step."""
    return size.microbatches * size.samples * size.model.context


def step_flops(size: Size) -> float:
    """The operations of the model in a step."""
    model = size.model
    return tokens_of(size) * (6 * parameters_of(model) + 12 * model.blocks * model.width * model.context)


def row_of(
    launch: Launch,
    size: Size,
    contender: Contender,
    facts: Facts,
    taken: Sequence[Sequence[Taken]],
    sharing: str | None,
) -> Row:
    """`taken`: by process, with the model and, if that was measured, with the narrow one. `sharing`: as in `Row`."""
    models, narrow = [own[0] for own in taken], taken[0][1:]
    first, peaks = models[0], _all([own[0].peak for own in taken])
    seconds = statistics.median(first.wall)
    entry = contender.entry
    return Row(
        name=contender.name,
        processes=launch.processes,
        sharing=sharing,
        ranks=ranks_of(launch, entry),
        variant=contender.variant.name,
        beside=contender.beside.name,
        microbatches=size.samples * size.microbatches // contender.variant.samples,
        ready_seconds=first.ready_seconds,
        step_seconds=first.wall,
        plain_seconds=first.plain_wall,
        over_plain=speedup(first.plain_wall, first.wall),
        tokens_per_second=tokens_of(size) / seconds,
        share_of_matrix=step_flops(size) / seconds / facts.matrix_flops,
        idle_shares=first.idle_shares,
        peak_bytes=None if peaks is None else [peak.allocated for peak in peaks],
        active_bytes=None if peaks is None else [peak.active for peak in peaks],
        reserved_bytes=None if peaks is None else [peak.reserved for peak in peaks],
        held_bytes=_all([one.held_bytes for one in models]),
        versions_bytes=first.versions_bytes,
        versions_held=None,
        host_seconds=[seconds for one in narrow for seconds in one.host],
        plain_host_seconds=[seconds for one in narrow for seconds in one.plain_host],
        actions=first.actions,
        sent_bytes=list(entry.sent_bytes) if isinstance(entry, Entry) and launch.processes > 1 else [],
        losses=next((one.losses for one in models if one.losses), []),
    )


def ranks_of(launch: Launch, entry: Entry | Absent) -> int:
    """How many ranks it has."""
    return 1 if isinstance(entry, Entry) and entry.alone else launch.ranks


def _all(found: Sequence[_Known | None]) -> list[_Known] | None:
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else None


def with_versions(rows: Sequence[Row | Missing]) -> list[Row | Missing]:
    """`rows`, and what the weight versions in them were measured to take."""
    bases = {
        (row.processes, row.ranks): sum(row.held_bytes)
        for row in rows
        if isinstance(row, Row) and row.name == "penstock 1f1b-flush" and row.held_bytes is not None
    }
    return [
        replace(row, versions_held=sum(row.held_bytes) - bases[row.processes, row.ranks])
        if isinstance(row, Row)
        and row.versions_bytes
        and row.held_bytes is not None
        and (row.processes, row.ranks) in bases
        else row
        for row in rows
    ]


def agreement(rows: Sequence[Row | Missing]) -> float:
    """How far the first losses of `rows` that compute them with the first weights are apart, over their mean."""
    reported = [
        row.losses[0] for row in rows if isinstance(row, Row) and row.name not in UPDATES_BETWEEN and row.losses
    ]
    return (max(reported) - min(reported)) / statistics.fmean(reported) if reported else 0.0


def value_of(row: Row | Missing) -> dict[str, Any]:
    """It, for JSON."""
    if isinstance(row, Missing):
        return asdict(row)
    host = {"host_per_action": row.host_per_action, "beyond_plain_per_action": row.beyond_plain_per_action}
    return {**asdict(row), **host}
