"""A plan: the stages, the ranks that hold them, and the schedule.

A planner, `Plan.uniform`, or a person with a YAML file makes a plan. The schedule, the simulation and the pipeline are
built from it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from penstock.arguments import (
    FLAG,
    TEXT,
    Entries,
    FieldRules,
    Rule,
    check_fields,
    choice,
    entries,
    instance,
    integer,
    is_count,
    number,
    text_of,
)
from penstock.errors import PlanError, ScheduleError, counted, visible
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedule_names import SCHEDULES, find_definition, has_taken_name, identify, schedule_hint
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify
from penstock.scheduling.written_programs import define_by_programs
from penstock.values.chain_cuts import balanced_cuts
from penstock.values.clusters import Cluster
from penstock.values.documents import YamlNode, number_text, quoted_text, read_known, read_yaml, write_text
from penstock.values.plan_stages import STAGES, Stage, check_stages, ranks_text
from penstock.values.quantities import bytes_text, table_lines

__all__ = ["MICROBATCHES", "Plan", "Prediction", "Routing", "Stage", "require_schedule", "schedule"]

_FORMAT = "penstock-plan/1"
_WRITTEN = "written"
"""The name of a schedule in a file that has its order and no name."""
_OWN = ", or if it is a schedule of your own give its definition: Plan.load(path, schedule=...)"

Routing: TypeAlias = Literal["round-robin", "split"]
"""How microbatches are distributed over the replicas of a stage. ``round-robin``: replica k mod r takes microbatch k,
as in 1F1B-RR [PipeDream 2019, section 3.2]; d replicas of every stage are then d parallel pipelines. ``split``: every
microbatch is split evenly over all replicas [SPP 2022]."""

_ROUTINGS: tuple[Routing, ...] = get_args(Routing)


_SEVERAL = ("peak_bytes", "stage_seconds")
"""The fields of a prediction with a number for each rank or stage."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds what a plan is predicted to take: by the simulator, or by the closed form of its schedule."""

    minibatch_seconds: float
    samples_per_second: float
    bottleneck_seconds: float
    """Time per microbatch of the slowest rank, link or all-reduce."""
    peak_bytes: tuple[float, ...]
    """One number per rank."""
    bubble: float
    """The idle share of the wall time of all ranks, 0 to 1."""
    limit: str = ""
    """The bottleneck in words: a stage, a link, the memory."""
    stage_seconds: tuple[float, ...] = ()
    """Forward and backward of one microbatch in each stage, on the slowest of its replicas, if they are known."""

    def __post_init__(self) -> None:
        rule = number(0, infinite=True).but("leave `predicted` out of a plan made by hand")
        numbers = [field.name for field in fields(self) if field.name not in (*_SEVERAL, "limit")]
        rules: FieldRules = {**dict.fromkeys(numbers, rule), **dict.fromkeys(_SEVERAL, Entries(rule))}
        check_fields(self, {**rules, "limit": TEXT.but("leave it out")}, PlanError)


_MOST = 2**16
MICROBATCHES = integer(1, _MOST)
"""No training has more in a minibatch, and a schedule of more takes minutes to make and to verify."""
_CHOSEN = FLAG | Rule(
    "the numbers of the stages",
    lambda value: (
        isinstance(value, Collection)
        and not isinstance(value, str)
        and all(is_count(stage, least=0) for stage in value)
    ),
    lambda stages: tuple(sorted({*map(int, stages)})),
)
_RULES: FieldRules = {
    "stages": STAGES,
    "devices": Entries(integer(0).but("give the number of a device of the cluster")),
    "routing": choice(_ROUTINGS),
    "microbatches": MICROBATCHES,
    "microbatch_size": integer(1).optional,
    "tensor_parallel": integer(1),
    "vertical_sync": FLAG,
    "recompute": _CHOSEN,
    "streamed": _CHOSEN,
    "places": integer(1).but("give how many streamed stages a device has room for at once"),
    "predicted": instance(
        Prediction, "a Prediction", "leave it out of a plan made by hand; penstock.simulate predicts one"
    ).optional,
    "planner": TEXT,
    "explanation": TEXT,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds stages, their ranks, and the schedule that runs them."""

    stages: tuple[Stage, ...]
    schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE
    """The name of one of Penstock's schedules, or your own definition."""
    microbatches: int = 1
    """The number of microbatches in one minibatch, over all replicas."""
    microbatch_size: int | None = None
    """Samples in one microbatch; None leaves it to the batch that is passed to the pipeline."""
    vertical_sync: bool = False
    recompute: bool | tuple[int, ...] = False
    """Whether stages keep their input alone of a microbatch in flight, and compute again in its backward; or the
    numbers of the stages that do."""
    predicted: Prediction | None = None
    routing: Routing = "round-robin"
    tensor_parallel: int = 1
    """The number of consecutive ranks of a stage that hold one replica together (``t`` of [PTD-P 2021])."""
    planner: str = field(default="", compare=False)
    """The planner that made the plan."""
    explanation: str = field(default="", compare=False, repr=False)
    """Which other plans were considered, and why this one is better; it is not saved to a file."""
    layer_names: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The names of all layers, where they are known; a file has them as comments."""
    streamed: bool | tuple[int, ...] = False
    """Whether the weights of the stages are on the host while the stage does not compute, with the gradients and the
    optimizer's state; or the numbers of the stages whose are. A streamed stage has to recompute."""
    places: int = 2
    """How many streamed stages a rank's device has room for at once; with two, one computes while one is fetched."""
    devices: tuple[int, ...] = ()
    """The device of every rank, as the cluster numbers them; empty if rank r is on device r. A plan need not use all
    devices of its cluster: one that is slow may be better left out."""

    def __post_init__(self) -> None:
        definition = require_schedule(self.schedule)
        # Penstock's own schedules are stored by name, so that plans compare and print alike however they were given.
        object.__setattr__(self, "schedule", identify(definition))
        check_fields(self, _RULES, PlanError)
        check_stages(self.stages, self.tensor_parallel, definition)
        for name in ("recompute", "streamed"):
            object.__setattr__(self, name, _check_chosen(name, getattr(self, name), len(self.stages)))
        if kept := sorted(self.streaming - self.recomputed):
            raise PlanError(
                f"streamed: expected stages that recompute, found stage {kept[0]}, which does not: what its forward "
                "saves for the backward would hold its weights on the device. Add it to recompute, or leave it out"
            )
        object.__setattr__(self, "devices", _check_devices(self.devices, self.ranks))
        if self.predicted is not None and len(self.predicted.peak_bytes) != self.ranks:
            raise PlanError(
                f"predicted.peak_bytes: expected {self.ranks} numbers (one per rank), "
                f"found {len(self.predicted.peak_bytes)}: leave `predicted` out of a plan made by hand"
            )
        if self.predicted is not None and len(self.predicted.stage_seconds) not in (0, len(self.stages)):
            raise PlanError(
                f"predicted.stage_seconds: expected {len(self.stages)} numbers (one per stage) or none, "
                f"found {len(self.predicted.stage_seconds)}: leave `predicted` out of a plan made by hand"
            )

    @classmethod
    def uniform(
        cls,
        layers: int,
        stages: int,
        schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE,
        microbatches: int = 1,
        stages_per_rank: int = 1,
        microbatch_size: int | None = None,
        vertical_sync: bool = False,
        recompute: bool | tuple[int, ...] = False,
    ) -> "Plan":
        """`layers` layers in `stages` stages of equal length; the earlier ones take the remainder.

        `of_cuts` describes their ranks. `PlanError` if there are fewer layers than stages.
        """
        stages = integer(1, _MOST).check("stages", stages, PlanError)
        if not is_count(layers, least=1) or layers < stages:
            raise PlanError(
                f"cannot cut {text_of(layers)} layers into {text_of(stages)} stages: expected at least one layer per "
                "stage. Use fewer stages, or capture the model in finer layers; blocks that hold an object which one "
                "of them changes are one layer"
            )
        if not is_count(stages_per_rank, least=1) or stages % stages_per_rank:
            raise PlanError(
                f"stages_per_rank: expected a divisor of {stages} stages, found {text_of(stages_per_rank)}: "
                "stages is the number of all stages, ranks times stages_per_rank"
            )
        short, longer = divmod(layers, stages)
        cuts = [stage * short + min(stage, longer) for stage in range(stages + 1)]
        return cls.of_cuts(
            cuts,
            stages // stages_per_rank,
            schedule=schedule,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            vertical_sync=vertical_sync,
            recompute=recompute,
        )

    @classmethod
    def balanced(
        cls,
        weights: Sequence[float],
        stages: int,
        schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE,
        *,
        microbatches: int = 1,
        stages_per_rank: int = 1,
        vertical_sync: bool = False,
        speeds: Sequence[float] = (),
    ) -> "Plan":
        """As `uniform`, but cut so that the stage that weighs most weighs as little as possible.

        `weights`: of each layer, such as its seconds; only their ratios count. Among equals, the cut with the least sum
        of squares of the stages. Layers of one weight are cut as `uniform` cuts them. `speeds`: of each rank, where
        they differ; a stage then weighs what its layers do over the speed of its rank.
        """
        weights = Entries(number(0).but("give what the layer costs")).check("weights", weights, PlanError)
        layers = len(weights)
        uniform = cls.uniform(
            layers, stages, schedule, microbatches, stages_per_rank=stages_per_rank, vertical_sync=vertical_sync
        )
        speeds = Entries(number(above=0)).check("speeds", speeds, PlanError)
        if speeds and len(speeds) != uniform.ranks:
            raise PlanError(
                f"speeds: expected {uniform.ranks} (one per rank), found {len(speeds)}: give the speed of every rank"
            )
        paces = tuple(speeds[stage.ranks[0]] for stage in uniform.stages) if speeds else ()
        cuts = balanced_cuts(weights, stages, paces)
        moved = zip(uniform.stages, pairwise(cuts), strict=True)
        return replace(uniform, stages=tuple(Stage(start, stop, stage.ranks) for stage, (start, stop) in moved))

    @classmethod
    def of_cuts(
        cls,
        cuts: Sequence[int],
        ranks: int,
        schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE,
        microbatches: int = 1,
        microbatch_size: int | None = None,
        vertical_sync: bool = False,
        recompute: bool | tuple[int, ...] = False,
    ) -> "Plan":
        """A plan whose stage s holds layers ``[cuts[s], cuts[s + 1])``. Raises `PlanError`.

        The schedule's layout decides the rank of stage s: s mod `ranks`; in a V shape, s or 2 `ranks` - 1 - s.
        """
        cuts = entries("cuts", cuts, PlanError)
        ranks = integer(1).check("ranks", ranks, PlanError)
        dealt = require_schedule(schedule).layout.ranks(len(cuts) - 1, ranks)
        stages = tuple(Stage(start, stop, (rank,)) for (start, stop), rank in zip(pairwise(cuts), dealt, strict=True))
        return cls(
            stages,
            schedule=schedule,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            vertical_sync=vertical_sync,
            recompute=recompute,
        )

    @property
    def definition(self) -> ScheduleDefinition:
        """The definition of the plan's schedule."""
        return require_schedule(self.schedule)

    @property
    def order(self) -> tuple[str, ...]:
        """What each rank computes in a step, as text, where the schedule was written or found; see
        `penstock.scheduling.define_by_programs`. Empty for a schedule that a function defines.
        """
        return self.definition.programs

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that recompute."""
        return _chosen(self.recompute, len(self.stages))

    @property
    def streaming(self) -> frozenset[int]:
        """The stages that are streamed."""
        return _chosen(self.streamed, len(self.stages))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(set(chain.from_iterable(stage.ranks for stage in self.stages)))

    def used(self, cluster: Cluster) -> Cluster:
        """The part of `cluster` whose rank r is the device of the plan's rank r. `PlanError` if it has too few."""
        needed = max(self.devices, default=self.ranks - 1) + 1
        if cluster.devices < needed:
            raise PlanError(
                f"the plan has {counted(self.ranks, 'rank')}{f' up to device {needed - 1}' if self.devices else ''} and"
                f" the cluster {counted(cluster.devices, 'device')}: expected one each. Plan for fewer ranks or "
                "describe more devices"
            )
        return cluster.pick(self.devices) if self.devices else cluster

    @property
    def stages_per_rank(self) -> int:
        """``v``: the number of stages on each rank."""
        return len(self.stages) // len({stage.ranks for stage in self.stages})

    @property
    def replicas(self) -> tuple[int, ...]:
        """``r`` of every stage: the number of its ranks, or of its groups of `tensor_parallel` ranks."""
        return tuple(len(stage.ranks) // self.tensor_parallel for stage in self.stages)

    @property
    def placement(self) -> Placement:
        """The placement of the stages on the schedule's ranks.

        With tensor parallelism each rank of the schedule is a group of ranks that hold one replica together: rank g is
        the group of the ``t`` ranks from ``g * t`` on.
        """
        split = self.routing == "split" and max(self.replicas) > 1
        return _place(tuple(stage.ranks for stage in self.stages), self.tensor_parallel, split)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.stages[-1].stop

    def __str__(self) -> str:
        size = "" if self.microbatch_size is None else f" of {self.microbatch_size}"
        options = ", vertical_sync" if self.vertical_sync else ""
        for name, chosen in (("recompute", self.recompute), ("streamed", self.streamed)):
            some = "" if isinstance(chosen, bool) else f" {list(chosen)}"
            options += f", {name}{some}" if chosen else ""
        options += f" through {self.places} places" if self.streamed else ""
        options += ", split microbatches" if self.routing == "split" else ""
        options += f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        used = f", on {ranks_text(self.devices).replace('rank', 'device')}" if self.devices else ""
        count = counted(self.microbatches, "microbatch")
        lines = [f"{self.schedule}{options}: {count}{size}, ranks: {self.ranks}{used}"]
        rows = [("stage", "layers", "ranks")]
        rows += [(str(i), f"[{s.start}, {s.stop})", ranks_text(s.ranks)) for i, s in enumerate(self.stages)]
        lines += table_lines(rows, left={1, 2})
        if self.predicted is not None:
            expected = self.predicted
            lines += [
                f"predicted: {expected.minibatch_seconds:.4g} s per minibatch",
                f"  {expected.samples_per_second:.4g} samples/s",
                f"  slowest stage or link {expected.bottleneck_seconds:.4g} s per microbatch",
                f"  bubble {100 * expected.bubble:.1f} % of wall time, peak {bytes_text(max(expected.peak_bytes))}",
            ]
            lines += [f"  limited by {visible(expected.limit)}"] if expected.limit else []
        return "\n".join(lines)

    def explain(self) -> str:
        """The ranked table of all plans that `penstock.plan` considered, and why the second best lost."""
        reason = "it was not found by a search: penstock.plan(profile, cluster) compares plans and says why"
        return self.explanation or f"{self}\n{reason}"

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written.

        A schedule of your own is saved by its `order`, if it was defined by programs. Else only its name is saved; pass
        its definition to `load`.
        """
        write_text(path, self.to_yaml(), PlanError)

    def to_yaml(self) -> str:
        """The text that `save` writes."""
        name = self.schedule if isinstance(self.schedule, str) else quoted_text(self.schedule.name)
        lines = [f"format: {_FORMAT}", f"schedule: {name}", f"microbatches: {self.microbatches}"]
        if self.microbatch_size is not None:
            lines.append(f"microbatch_size: {self.microbatch_size}")
        lines += [f"vertical_sync: {str(self.vertical_sync).lower()}", f"recompute: {_chosen_text(self.recompute)}"]
        lines += [f"streamed: {_chosen_text(self.streamed)}", f"places: {self.places}"] if self.streamed else []
        lines += [f"routing: {self.routing}"] if self.routing != "round-robin" else []
        lines += [f"tensor_parallel: {self.tensor_parallel}"] if self.tensor_parallel != 1 else []
        lines += [f"devices: {list(self.devices)} # of the cluster, by rank"] if self.devices else []
        lines += [f"planner: {quoted_text(self.planner)}"] if self.planner else []
        # A file that was cut off after a stage would be a plan of fewer layers.
        lines.append(f"layers: {self.layers}")
        lines.append("stages: # layers from start up to and without stop")
        lines += [
            f"- {{start: {s.start}, stop: {s.stop}, ranks: {list(s.ranks)}}}{self._names_of(s)}" for s in self.stages
        ]
        if self.order:
            lines.append("order: # what each rank computes in a step; what is between bars is repeated")
            lines += [f"- {quoted_text(row)}" for row in self.order]
        if self.predicted is not None:
            lines.append("predicted:")
            for name, value in asdict(self.predicted).items():
                if name in _SEVERAL:
                    lines += [f"  {name}: [{', '.join(map(number_text, value))}]"] if value else []
                elif name != "limit":
                    lines.append(f"  {name}: {number_text(value)}")
                elif value:
                    lines.append(f"  {name}: {quoted_text(value)}")
        return "\n".join(lines) + "\n"

    def _names_of(self, stage: Stage) -> str:
        """A comment with the first and the last layer of `stage`, if the names of all layers are known."""
        if len(self.layer_names) != self.layers:
            return ""
        first, last = (visible(self.layer_names[layer]) for layer in (stage.start, stage.stop - 1))
        return f" # {first}" + (f" to {last}" if stage.stop > stage.start + 1 else "")

    @classmethod
    def load(cls, path: str | Path, schedule: ScheduleDefinition | None = None) -> "Plan":
        """Reads what `save` wrote, or a plan made by hand. `PlanError` names the file, the field and the fix.

        `schedule`: the definition of the plan's schedule if it is your own and the file has no `order`. An order is
        proved; the error names the rank and the law that it breaks.
        """
        node = read_yaml(path, PlanError)
        node.check_format(_FORMAT)
        optional = [field.name for field in fields(cls) if field.name not in ("stages", "explanation", "layer_names")]
        nodes = node.mapping(("format", "stages"), [*optional, "layers", "order"])
        stages = tuple(_read_stage(stage) for stage in nodes["stages"].items())
        if "layers" in nodes and stages and nodes["layers"].integer() != stages[-1].stop:
            nodes["layers"].fail(
                f"{stages[-1].stop}, where the last of the {len(stages)} stages stops",
                "if the file was cut off, save it again; if you have changed the stages, correct this number, or "
                "remove the line",
            )
        named: ScheduleDefinition | str = DEFAULT_SCHEDULE
        if "order" in nodes:
            named = node.build(lambda: _read_order(nodes, schedule))
        elif "schedule" in nodes:
            named = node.build(lambda: _find_named(nodes["schedule"].text(), schedule))
        known = read_known(nodes, _READERS)
        plan = node.build(lambda: cls(stages, schedule=named, **known))
        if plan.order:
            node.build(lambda: _prove(plan))
        return plan


_PLAN = instance(Plan, "a penstock.Plan", "make one with penstock.plan or Plan.uniform, or read one with Plan.load")


def require_schedule(schedule: ScheduleDefinition | str, where: str = "") -> ScheduleDefinition:
    """The definition that `schedule` is or names; if there is none, a `PlanError` that ends with `where`."""
    definition = find_definition(schedule)
    if definition is None:
        raise PlanError(
            f"schedule: expected one of {', '.join(SCHEDULES)}, found {text_of(schedule)}. "
            f"{schedule_hint(str(schedule))}Choose one of them{where}"
        )
    if has_taken_name(definition):
        raise PlanError(
            f"schedule: expected a definition with a name of its own, found {text_of(definition)}, which is the name "
            "of one of Penstock's schedules: rename it"
        )
    return definition


@lru_cache(maxsize=1 << 10)
def _place(stages: tuple[tuple[int, ...], ...], size: int, split: bool) -> Placement:
    """The placement of stages on groups of `size` ranks; a search asks for the same one again and again."""
    return Placement(tuple(tuple(rank // size for rank in ranks[::size]) for ranks in stages), split=split)


def schedule(plan: Plan) -> Schedule:
    """The schedule of `plan`; `ScheduleError` if its numbers do not fit the schedule's definition."""
    _PLAN.check("schedule(plan=)", plan, PlanError)
    return Schedule.placed(
        plan.schedule,
        plan.placement,
        plan.microbatches,
        vertical_sync=plan.vertical_sync,
        recomputed=plan.recomputed,
        streamed=plan.streaming,
        places=plan.places,
    )


def _chosen(chosen: bool | tuple[int, ...], stages: int) -> frozenset[int]:
    every = range(stages) if chosen else ()
    return frozenset(every if isinstance(chosen, bool) else chosen)


def _chosen_text(chosen: bool | tuple[int, ...]) -> str:
    return str(chosen if isinstance(chosen, bool) else list(chosen)).lower()


def _check_chosen(name: str, chosen: bool | tuple[int, ...], stages: int) -> bool | tuple[int, ...]:
    """The stages that are chosen; True or False if these are all or none."""
    if isinstance(chosen, bool):
        return chosen
    if chosen and chosen[-1] >= stages:
        raise PlanError(f"{name}: expected stages 0 to {stages - 1}, found {chosen[-1]}: give stages of the plan")
    return len(chosen) == stages if len(chosen) in (0, stages) else chosen


def _check_devices(devices: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The devices of the ranks; empty if each rank is on the device of its number."""
    if devices and (len(devices) != ranks or len(set(devices)) != ranks):
        raise PlanError(
            f"devices: expected {ranks} different devices (one per rank), found {list(devices)}: give the device of "
            "every rank, or leave it out if rank r is on device r"
        )
    return () if devices == tuple(range(ranks)) else devices


def _find_named(name: str, own: ScheduleDefinition | None) -> ScheduleDefinition:
    if own is None:
        return require_schedule(name, _OWN)
    if own.name != name:
        raise PlanError(
            f"schedule: expected {own.name!r}, whose definition was given, found {name!r}: give the definition of "
            f"{name!r}, or load a plan for {own.name!r}"
        )
    return own


def _read_order(nodes: Mapping[str, YamlNode], own: ScheduleDefinition | None) -> ScheduleDefinition:
    """The schedule whose programs a file has, under the name that the file gives it."""
    name = nodes["schedule"].text() if "schedule" in nodes else _WRITTEN
    rows = [" ".join(row.text().split()) for row in nodes["order"].items()]
    try:
        definition = define_by_programs(name, "\n".join(rows))
    except ScheduleError as error:
        raise PlanError(f"order: {error}") from None
    if own is not None and own != definition:
        raise PlanError(
            f"order: expected the programs of {own}, the definition that was given, found others: leave out one of them"
        )
    return definition


def _prove(plan: Plan) -> None:
    try:
        verify(schedule(plan))
    except ScheduleError as error:
        raise PlanError(f"order: {error}") from None


def _read_stage(node: YamlNode) -> Stage:
    nodes = node.mapping(("start", "stop", "ranks"))
    start, stop = nodes["start"].integer(), nodes["stop"].integer()
    ranks = nodes["ranks"].integers()
    return node.build(lambda: Stage(start, stop, ranks))


def _read_prediction(node: YamlNode) -> Prediction:
    later = ["limit", "stage_seconds"]
    names = [field.name for field in fields(Prediction)]
    nodes = node.mapping([name for name in names if name not in later], later)
    readers = {**dict.fromkeys(names, YamlNode.number), **dict.fromkeys(_SEVERAL, YamlNode.numbers)}
    known = read_known(nodes, {**readers, "limit": YamlNode.text})
    return node.build(lambda: Prediction(**known))


_READERS = {
    **dict.fromkeys(("microbatches", "microbatch_size", "tensor_parallel", "places"), YamlNode.integer),
    "vertical_sync": YamlNode.boolean,
    **dict.fromkeys(
        ("recompute", "streamed"), lambda node: node.integers() if isinstance(node.value, list) else node.boolean()
    ),
    **dict.fromkeys(("routing", "planner"), YamlNode.text),
    "devices": YamlNode.integers,
    "predicted": _read_prediction,
}
"""What reads each field of a plan that a file may leave out."""
