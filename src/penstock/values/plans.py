"""Where the layers go: stages, the ranks that hold them, and the schedule.

A plan is made by a planner, by `Plan.uniform`, or by hand in a YAML file; the schedule, the simulator and the runtime
are made from it.

Laws of this file:
  1. The stages tile the layers: stage 0 starts at layer 0, every other one where the one before it stops.
  2. Each rank from 0 on holds one stage; under `interleaved` rank r of p holds the stages s with s mod p = r.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from pathlib import Path

from penstock.errors import PlanError
from penstock.values.documents import Place, number_text, read_yaml, suggestion, text_of, write_text
from penstock.values.quantities import bytes_text

__all__ = ["SCHEDULES", "Plan", "Prediction", "Stage"]

_FORMAT = "penstock-plan/1"

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "1f1b", "2bw")
"""The names that `Plan.schedule` can take."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start` up to and without `stop`, on `ranks`; more than one rank means replicas."""

    start: int
    stop: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        for name, value in (("start", self.start), ("stop", self.stop)):
            if not _is_count(value, least=0):
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
            if not _is_count(rank, least=0):
                raise PlanError(
                    f"ranks[{index}]: expected a rank, 0 or more, found {text_of(rank)}: ranks are counted from 0"
                )

    def __str__(self) -> str:
        return f"layers [{self.start}, {self.stop}) on {_ranks_text(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a planner expects of its plan, by the closed form of the schedule; `simulate` looks closer."""

    minibatch_seconds: float
    samples_per_second: float
    bottleneck_seconds: float
    """Time per microbatch of the slowest stage or link."""
    peak_bytes: tuple[float, ...]
    """Per rank."""
    bubble: float
    """Idle share of wall time, 0 to 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_bytes", tuple(self.peak_bytes))
        values = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "peak_bytes"]
        values += [(f"peak_bytes[{rank}]", value) for rank, value in enumerate(self.peak_bytes)]
        for name, value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise PlanError(
                    f"{name}: expected a number, 0 or more, found {text_of(value)}: "
                    "leave `predicted` out of a plan made by hand"
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages on ranks, and the schedule that runs them."""

    stages: tuple[Stage, ...]
    schedule: str = "1f1b-flush"
    microbatches: int = 1
    """In one minibatch."""
    microbatch_size: int | None = None
    """Samples in one microbatch; None leaves it to the batch that is passed to the pipeline."""
    vertical_sync: bool = False
    recompute: bool = False
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule: expected one of {', '.join(SCHEDULES)}, found {text_of(self.schedule)}. "
                f"{suggestion(str(self.schedule), SCHEDULES)}Choose one of them"
            )
        for name in ("microbatches", "microbatch_size"):
            value = getattr(self, name)
            if not (value is None and name == "microbatch_size") and not _is_count(value, least=1):
                raise PlanError(f"{name}: expected a whole number, 1 or more, found {text_of(value)}: give one")
        for name in ("vertical_sync", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(
                    f"{name}: expected true or false, found {text_of(getattr(self, name))}: give one of them"
                )
        _check_tiling(self.stages)
        _check_ranks(self.stages, interleaved=self.schedule == "interleaved")
        if self.predicted is not None and len(self.predicted.peak_bytes) != self.ranks:
            raise PlanError(
                f"predicted.peak_bytes: expected {self.ranks} numbers (one per rank), "
                f"found {len(self.predicted.peak_bytes)}: leave `predicted` out of a plan made by hand"
            )

    @classmethod
    def uniform(
        cls,
        layers: int,
        stages: int,
        schedule: str = "1f1b-flush",
        microbatches: int = 1,
        stages_per_rank: int = 1,
        microbatch_size: int | None = None,
        vertical_sync: bool = False,
        recompute: bool = False,
    ) -> "Plan":
        """`layers` layers in `stages` stages of equal length; the earlier ones take the remainder.

        Stage s is on rank s mod (stages / stages_per_rank). `PlanError` if there are fewer layers than stages.
        """
        if not _is_count(stages, least=1) or not _is_count(layers, least=1) or layers < stages:
            raise PlanError(
                f"cannot cut {text_of(layers)} layers into {text_of(stages)} stages: expected at least one layer per "
                "stage. Use fewer stages, or capture the model in finer layers"
            )
        if not _is_count(stages_per_rank, least=1) or stages % stages_per_rank:
            raise PlanError(
                f"stages_per_rank: expected a divisor of {stages} stages, found {text_of(stages_per_rank)}: "
                "stages is the number of all stages, ranks times stages_per_rank"
            )
        short, longer = divmod(layers, stages)
        cuts = [stage * short + min(stage, longer) for stage in range(stages + 1)]
        return cls.of_cuts(
            cuts, stages // stages_per_rank, schedule, microbatches, microbatch_size, vertical_sync, recompute
        )

    @classmethod
    def of_cuts(
        cls,
        cuts: Sequence[int],
        ranks: int,
        schedule: str = "1f1b-flush",
        microbatches: int = 1,
        microbatch_size: int | None = None,
        vertical_sync: bool = False,
        recompute: bool = False,
    ) -> "Plan":
        """Stage s holds layers ``[cuts[s], cuts[s + 1])`` and is on rank s mod `ranks`. Raises `PlanError`."""
        stages = tuple(Stage(start, stop, (index % ranks,)) for index, (start, stop) in enumerate(pairwise(cuts)))
        return cls(stages, schedule, microbatches, microbatch_size, vertical_sync, recompute)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(set(chain.from_iterable(stage.ranks for stage in self.stages)))

    @property
    def stages_per_rank(self) -> int:
        """``v``: 1 for all schedules but `interleaved`."""
        return len(self.stages) // self.ranks if self.schedule == "interleaved" else 1

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.stages[-1].stop

    def __str__(self) -> str:
        size = "" if self.microbatch_size is None else f" of {self.microbatch_size}"
        options = "".join(f", {name}" for name in ("vertical_sync", "recompute") if getattr(self, name))
        lines = [f"{self.schedule}{options}: {self.microbatches} microbatches{size}, ranks: {self.ranks}"]
        rows = [("stage", "layers", "ranks")]
        rows += [(str(i), f"[{s.start}, {s.stop})", _ranks_text(s.ranks)) for i, s in enumerate(self.stages)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines += [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
        if self.predicted is not None:
            expected = self.predicted
            lines += [
                f"predicted: {expected.minibatch_seconds:.4g} s per minibatch",
                f"  {expected.samples_per_second:.4g} samples/s",
                f"  slowest stage or link {expected.bottleneck_seconds:.4g} s per microbatch",
                f"  bubble {100 * expected.bubble:.1f} % of wall time, peak {bytes_text(max(expected.peak_bytes))}",
            ]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written."""
        lines = [f"format: {_FORMAT}", f"schedule: {self.schedule}", f"microbatches: {self.microbatches}"]
        if self.microbatch_size is not None:
            lines.append(f"microbatch_size: {self.microbatch_size}")
        lines += [f"vertical_sync: {str(self.vertical_sync).lower()}", f"recompute: {str(self.recompute).lower()}"]
        lines.append("stages: # layers from start up to and without stop")
        lines += [f"- {{start: {s.start}, stop: {s.stop}, ranks: {list(s.ranks)}}}" for s in self.stages]
        if self.predicted is not None:
            lines.append("predicted:")
            for field in fields(Prediction):
                value = getattr(self.predicted, field.name)
                text = number_text(value) if field.name != "peak_bytes" else f"[{', '.join(map(number_text, value))}]"
                lines.append(f"  {field.name}: {text}")
        write_text(path, "\n".join(lines) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads what `save` wrote, or a plan made by hand. `PlanError` names the file, the field and the mend."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        optional = [field.name for field in fields(cls) if field.name != "stages"]
        places = place.mapping(("format", "stages"), optional)
        stages = tuple(_read_stage(stage) for stage in places["stages"].items())
        schedule = places["schedule"].text() if "schedule" in places else "1f1b-flush"
        microbatches = places["microbatches"].integer() if "microbatches" in places else 1
        size = places["microbatch_size"].integer() if "microbatch_size" in places else None
        sync, recompute = (name in places and places[name].boolean() for name in ("vertical_sync", "recompute"))
        predicted = _read_prediction(places["predicted"]) if "predicted" in places else None
        return place.build(lambda: cls(stages, schedule, microbatches, size, sync, recompute, predicted))


def _read_stage(place: Place) -> Stage:
    places = place.mapping(("start", "stop", "ranks"))
    start, stop = places["start"].integer(), places["stop"].integer()
    ranks = tuple(rank.integer() for rank in places["ranks"].items())
    return place.build(lambda: Stage(start, stop, ranks))


def _read_prediction(place: Place) -> Prediction:
    places = place.mapping([field.name for field in fields(Prediction)])
    peaks = tuple(peak.number() for peak in places.pop("peak_bytes").items())
    numbers = {name: inner.number() for name, inner in places.items()}
    return place.build(lambda: Prediction(peak_bytes=peaks, **numbers))


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


def _check_ranks(stages: tuple[Stage, ...], *, interleaved: bool) -> None:
    held = [rank for stage in stages for rank in stage.ranks]
    ranks = max(held) + 1
    missing = sorted(set(range(ranks)) - set(held))
    if missing:
        raise PlanError(
            f"stages: expected ranks 0 to {ranks - 1} to hold a stage each, found none on {_ranks_text(missing)}: "
            "number the ranks from 0 without gaps"
        )
    for index, stage in enumerate(stages):
        at = f"stages[{index}].ranks: "
        if interleaved:
            if stage.ranks != (index % ranks,):
                raise PlanError(
                    f"{at}expected [{index % ranks}] (interleaved: stage s on rank s mod {ranks}), "
                    f"found {list(stage.ranks)} in {stage}: deal the stages to the ranks in turn"
                )
            continue
        before = {rank: other for other in range(index) for rank in stages[other].ranks}
        for position, rank in enumerate(stage.ranks):
            if rank in before or rank in stage.ranks[:position]:
                holder = before.get(rank, index)
                raise PlanError(
                    f"{at}rank {rank} is used twice: expected each rank once, found it in stage {holder} and in "
                    f"{stage}. Give stage {index} another rank (several stages on a rank need schedule interleaved)"
                )
    if interleaved and len(stages) % ranks:
        raise PlanError(
            f"stages: expected a multiple of {ranks} stages (interleaved on {ranks} ranks), found {len(stages)}: "
            f"the last is {stages[-1]}. Give every rank the same number of stages"
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least and value < math.inf
