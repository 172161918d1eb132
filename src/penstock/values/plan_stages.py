"""The stages of a plan, the rules that they obey together, and the errors for plans that violate one.

Rules of stages:
  1. The stages tile the layers: stage 0 starts at layer 0, and every other stage starts where the previous one stops.
  2. Ranks are numbered from 0 without gaps, and each holds as many stages as the schedule's layout puts on a rank. If
     these are several, stage s is on the rank of stage s mod p (round-robin) or 2p - 1 - s (V shape), and all stages
     have the same number of replicas.
  3. The ranks of a tensor-parallel group are numbered together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import Entries, check_fields, instance, integer
from penstock.errors import PlanError
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedule_names import names_of

_LAYER = integer(0).but(
    "layers are counted from 0, and stop is the first layer of the next stage", "the index of a layer, 0 or more"
)
_RANKS = Entries(integer(0).but("ranks are counted from 0", "a rank, 0 or more"))


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds the layers from `start` up to and without `stop`, on `ranks`; several ranks hold replicas or shards."""

    start: int
    stop: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, {"start": _LAYER, "stop": _LAYER, "ranks": _RANKS}, PlanError)
        if self.stop <= self.start:
            raise PlanError(
                f"stop: expected more than start = {self.start}, found {self.stop}: "
                "a stage holds at least one layer; use fewer stages or move a cut"
            )
        if not self.ranks:
            raise PlanError("ranks: expected one rank or more, found none: say which rank holds the stage")

    def __str__(self) -> str:
        return f"layers [{self.start}, {self.stop}) on {ranks_text(self.ranks)}"


def members_of(groups: Sequence[int], tensor_parallel: int) -> tuple[int, ...]:
    """The ranks of `groups` of `tensor_parallel` neighbours: those of group g are g t to g t + t - 1."""
    return tuple(group * tensor_parallel + member for group in groups for member in range(tensor_parallel))


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-3``, for an error or a table."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


_SAME_RANK = {StageLayout.ROUND_ROBIN: "s mod {}", StageLayout.V_SHAPE: "2 x {} - 1 - s"}
"""Which of the first p stages is on the same rank as stage s."""

STAGES = Entries(instance(Stage, "a penstock.Stage", "build it: penstock.Stage(start, stop, ranks)"))


def check_stages(stages: tuple[Stage, ...], tensor_parallel: int, schedule: ScheduleDefinition) -> None:
    """Raises `PlanError` if the stages of a plan for `schedule` violate a rule of this file."""
    _check_tiling(stages)
    _check_replicas(stages, tensor_parallel)
    _check_ranks(stages, schedule)


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


def _check_ranks(stages: tuple[Stage, ...], schedule: ScheduleDefinition) -> None:
    held = [rank for stage in stages for rank in stage.ranks]
    ranks = max(held) + 1
    # One of the first is missing if any is, and the number of a rank may be anything.
    missing = sorted(set(range(min(ranks, len(held) + 1))) - set(held))
    if missing:
        raise PlanError(
            f"stages: expected ranks 0 to {ranks - 1} to hold a stage each, found none on {ranks_text(missing)}: "
            "number the ranks from 0 without gaps"
        )
    layout = schedule.layout
    length = _length(stages, ranks, schedule) if layout.has_several else len(stages)
    dealt = layout.ranks(len(stages), length)
    before: dict[int, int] = {}
    for index, stage in enumerate(stages):
        at = f"stages[{index}].ranks: "
        if index >= length:
            expected = stages[dealt[index]].ranks
            if stage.ranks != expected:
                where = _SAME_RANK[layout].format(length)
                raise PlanError(
                    f"{at}expected {list(expected)} ({schedule}: stage s where stage {where} is), "
                    f"found {list(stage.ranks)} in {stage}: deal the stages to the ranks {layout.value}"
                )
            continue
        for rank in stage.ranks:
            if rank in before:
                raise PlanError(
                    f"{at}rank {rank} is used twice: expected each rank once, found it in stage {before[rank]} and in "
                    f"{stage}. Give stage {index} another rank (several stages on a rank need schedule "
                    f"{names_of(lambda each: each.layout.has_several, ' or ')})"
                )
            before[rank] = index


def _length(stages: tuple[Stage, ...], ranks: int, schedule: ScheduleDefinition) -> int:
    """How many consecutive stages are on different ranks, under `schedule` on `ranks` ranks."""
    replicas = len(stages[0].ranks)
    for index, stage in enumerate(stages):
        if len(stage.ranks) != replicas:
            raise PlanError(
                f"stages[{index}].ranks: expected {replicas} ranks ({schedule}: as many as stage 0 has), found "
                f"{len(stage.ranks)} in {stage}: give all stages the same number of replicas"
            )
    length = ranks // replicas
    if schedule.layout is StageLayout.V_SHAPE and (ranks % replicas or len(stages) != 2 * length):
        raise PlanError(
            f"stages: expected {2 * length} stages ({schedule} on {ranks} ranks), found {len(stages)}: the last is "
            f"{stages[-1]}. Give every rank two stages"
        )
    if ranks % replicas or len(stages) % length:
        raise PlanError(
            f"stages: expected a multiple of {length} stages ({schedule} on {ranks} ranks), found {len(stages)}: "
            f"the last is {stages[-1]}. Give every rank the same number of stages"
        )
    return length
