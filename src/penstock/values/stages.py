"""A stage of a plan, and what makes sense of several: layers that are tiled, ranks that hold one stage each.

Laws of this file:
  1. The stages tile the layers: stage 0 starts at layer 0, every other one where the one before it stops.
  2. Each rank from 0 on holds one stage. Under `interleaved` the stages are dealt out in turn, so that stage s is where
     stage s mod p is; under `zb-v` there and back again, so that stage s is where stage 2p - 1 - s is. All stages then
     have equally many replicas.
  3. The ranks of a tensor-parallel group are numbered together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.values.documents import is_count, text_of

__all__ = ["DEALT", "Stage", "check_stages", "deal_ranks", "ranks_text"]

DEALT = {"interleaved": ("s mod {}", "in turn"), "zb-v": ("2 x {} - 1 - s", "there and back again")}
"""The schedules that put several stages on a rank: beside which stage of p stage s is, and how stages are dealt."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start` up to and without `stop`, on `ranks`; more than one rank means replicas."""

    start: int
    stop: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        for name, value in (("start", self.start), ("stop", self.stop)):
            if not is_count(value, least=0):
                raise PlanError(
                    f"{name}: expected the index of a layer, 0 or more, found {text_of(value)}: "
                    "layers are counted from 0, and stop is the first layer of the next stage"
                )
        if self.stop <= self.start:
            raise PlanError(
                f"stop: expected more than start = {self.start}, found {self.stop}: "
                "a stage holds at least one layer; use fewer stages or move a cut"
            )
        if not self.ranks:
            raise PlanError("ranks: expected one rank or more, found none: say which rank holds the stage")
        for index, rank in enumerate(self.ranks):
            if not is_count(rank, least=0):
                raise PlanError(
                    f"ranks[{index}]: expected a rank, 0 or more, found {text_of(rank)}: ranks are counted from 0"
                )

    def __str__(self) -> str:
        return f"layers [{self.start}, {self.stop}) on {ranks_text(self.ranks)}"


def check_stages(stages: tuple[Stage, ...], tensor_parallel: int, schedule: str) -> None:
    """Raises `PlanError` if the stages of a plan for `schedule` break a law of this file."""
    _check_tiling(stages)
    _check_replicas(stages, tensor_parallel)
    _check_ranks(stages, schedule)


def deal_ranks(schedule: str, stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of every stage under `schedule`, where nothing is replicated: in turn, or for `zb-v` there and back."""
    if schedule == "zb-v":
        return tuple(min(stage % (2 * ranks), 2 * ranks - 1 - stage % (2 * ranks)) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def _check_tiling(stages: tuple[Stage, ...]) -> None:
    if not stages:
        raise PlanError("stages: expected one stage or more, found none: give at least one")
    expected = 0
    for index, stage in enumerate(stages):
        if stage.start != expected:
            what = "a gap" if stage.start > expected else "an overlap"
            before = f"stage {index - 1} stops at {expected}" if index else "the first stage starts at layer 0"
            raise PlanError(
                f"stages[{index}].start: expected {expected} ({before}), found {stage.start} in {stage}: {what}. "
                f"Let stage {index} start at {expected}" + (f", or move the stop of stage {index - 1}" if index else "")
            )
        expected = stage.stop


def _check_replicas(stages: tuple[Stage, ...], tensor_parallel: int) -> None:
    for index, stage in enumerate(stages):
        if len(stage.ranks) % tensor_parallel:
            raise PlanError(
                f"stages[{index}].ranks: expected a multiple of {tensor_parallel} ranks (tensor_parallel), found "
                f"{len(stage.ranks)} in {stage}: give every replica all its ranks"
            )
        for first in stage.ranks[::tensor_parallel]:
            at = stage.ranks.index(first)
            expected = tuple(range(first, first + tensor_parallel))
            if first % tensor_parallel or stage.ranks[at : at + tensor_parallel] != expected:
                raise PlanError(
                    f"stages[{index}].ranks: expected groups of {tensor_parallel} consecutive ranks (tensor_parallel), "
                    f"each from a multiple of {tensor_parallel}, found {list(stage.ranks)}: number the ranks so that "
                    "those of a replica stand together"
                )


def _check_ranks(stages: tuple[Stage, ...], schedule: str) -> None:
    held = [rank for stage in stages for rank in stage.ranks]
    ranks = max(held) + 1
    missing = sorted(set(range(ranks)) - set(held))
    if missing:
        raise PlanError(
            f"stages: expected ranks 0 to {ranks - 1} to hold a stage each, found none on {ranks_text(missing)}: "
            "number the ranks from 0 without gaps"
        )
    around = _positions(stages, ranks, schedule) if schedule in DEALT else len(stages)
    places = deal_ranks(schedule, len(stages), around)
    before: dict[int, int] = {}
    for index, stage in enumerate(stages):
        at = f"stages[{index}].ranks: "
        if index >= around:
            expected = stages[places[index]].ranks
            if stage.ranks != expected:
                where, mend = DEALT[schedule]
                raise PlanError(
                    f"{at}expected {list(expected)} ({schedule}: stage s where stage {where.format(around)} is), "
                    f"found {list(stage.ranks)} in {stage}: deal the stages to the ranks {mend}"
                )
            continue
        for rank in stage.ranks:
            if rank in before:
                raise PlanError(
                    f"{at}rank {rank} is used twice: expected each rank once, found it in stage {before[rank]} and in "
                    f"{stage}. Give stage {index} another rank (several stages on a rank need schedule interleaved or "
                    "zb-v)"
                )
            before[rank] = index


def _positions(stages: tuple[Stage, ...], ranks: int, schedule: str) -> int:
    """How many stages in a row are on ranks of their own, under `schedule` on so many ranks."""
    replicas = len(stages[0].ranks)
    for index, stage in enumerate(stages):
        if len(stage.ranks) != replicas:
            raise PlanError(
                f"stages[{index}].ranks: expected {replicas} ranks ({schedule}: as many as stage 0 has), found "
                f"{len(stage.ranks)} in {stage}: give all stages the same number of replicas"
            )
    around = ranks // replicas
    if schedule == "zb-v" and (ranks % replicas or len(stages) != 2 * around):
        raise PlanError(
            f"stages: expected {2 * around} stages (zb-v on {ranks} ranks), found {len(stages)}: the last is "
            f"{stages[-1]}. Give every rank two stages"
        )
    if ranks % replicas or len(stages) % around:
        raise PlanError(
            f"stages: expected a multiple of {around} stages ({schedule} on {ranks} ranks), found {len(stages)}: "
            f"the last is {stages[-1]}. Give every rank the same number of stages"
        )
    return around


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-3``, for an error or a table."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
