"""The file that describes a fleet and its jobs, in YAML.

format: penstock-fleet/1
kinds:
- {name: V100, workers: 4, price_per_hour: 2.48, memory_bytes: 16e9, bytes_per_second: 12e9}
- {name: K80, workers: 8, price_per_hour: 0.45, speed: 0.15, memory_bytes: 12e9, bytes_per_second: 1.25e9}
jobs:
- {name: vgg, steps: 1e6, workers: 4, profile: vgg16/graph.txt, plan: {synchronous: true}}
- {name: a3c, steps: 5e5, throughputs: {V100: 220, K80: 100}, arrives: 3600, deadline_seconds: 86400}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, PlanError
from penstock.fleet.jobs import Arrival, Entity, Job, Kind
from penstock.fleet.problems import Pair, Problem
from penstock.fleet.throughputs import Machines, ModelJob, ThroughputTable, throughput_table
from penstock.planning import plan
from penstock.values import Profile
from penstock.values.documents import YamlNode, read_known, read_yaml

_FORMAT = "penstock-fleet/1"
_KIND: Mapping[str, Callable[[YamlNode], Any]] = {
    "price_per_hour": YamlNode.number,
    "workers_per_server": YamlNode.integer,
    "pool": YamlNode.text,
    "consolidated": YamlNode.boolean,
    "region": YamlNode.text,
    "egress_per_gigabyte": YamlNode.number,
    "preempted_every_seconds": YamlNode.number,
}
_MACHINES = dict.fromkeys(("speed", "memory_bytes", "bytes_per_second", "latency_seconds"), YamlNode.number)
_JOB: Mapping[str, Callable[[YamlNode], Any]] = {
    "workers": YamlNode.integer,
    "weight": YamlNode.number,
    "deadline_seconds": YamlNode.number,
    "entity": YamlNode.text,
    "gigabytes": YamlNode.number,
    "region": YamlNode.text,
}
_PLAN_KEYWORDS = tuple(name for name in signature(plan).parameters if name not in ("profile", "cluster"))
_SOURCES = ("throughputs", "profile", "profiles", "plan", "arrives", "command", "processes")


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """How a job is started: a training script with its arguments."""

    words: tuple[str, ...]
    """The script and its arguments. Words may have {directory}, {steps} and {processes} in them."""
    processes: Mapping[str, int]
    """The number of processes on each kind, by its name. The number of the job's workers where it is not given."""

    def filled(self, directory: str | Path, steps: float, processes: int) -> list[str]:
        """The words with the directory of the checkpoints, the number of all steps, and that of the processes."""
        words = [word.replace("{directory}", str(directory)).replace("{steps}", f"{steps:.0f}") for word in self.words]
        return [word.replace("{processes}", str(processes)) for word in words]


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A fleet and its jobs, as a file describes them."""

    path: str
    machines: tuple[Machines, ...]
    jobs: tuple[ModelJob, ...]
    arrivals: tuple[float, ...]
    """Seconds, for each job."""
    commands: tuple[TrainingCommand | None, ...]
    """How each job is started; None if the file does not say."""
    entities: tuple[Entity, ...] = ()
    pairs: tuple[tuple[tuple[str, str], Mapping[str, tuple[float, float]]], ...] = ()
    """The names of two jobs, and the throughputs of both by the name of the kind."""
    budget: float | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds without what the planner reads."""
        return tuple(machines.kind for machines in self.machines)

    def table(self) -> ThroughputTable:
        """Plans every job on every kind, unless its throughput is measured."""
        return throughput_table(self.jobs, self.machines)

    def problem(self, table: ThroughputTable) -> Problem:
        """All jobs at once, as if all had arrived."""
        return table.problem(
            tuple(self._pair(names, speeds) for names, speeds in self.pairs), self.entities, self.budget
        )

    def workload(self, table: ThroughputTable) -> tuple[Arrival, ...]:
        """The jobs as arrivals."""
        rows = zip(self.jobs, self.arrivals, table.throughputs(), strict=True)
        return tuple(Arrival(seconds, model.job, row) for model, seconds, row in rows)

    def shared_speeds(self) -> dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]:
        """The throughputs of pairs on each kind, by the names of their jobs."""
        found = {}
        for names, speeds in self.pairs:
            self._pair(names, speeds)
            both = [speeds.get(kind.name, (0.0, 0.0)) for kind in self.kinds]
            found[names] = tuple(one for one, _ in both), tuple(two for _, two in both)
        return found

    def _pair(self, names: tuple[str, str], speeds: Mapping[str, tuple[float, float]]) -> Pair:
        known = [model.job.name for model in self.jobs]
        for name in names:
            if name not in known:
                raise PlanError(f"{self.path}: pairs: expected names of jobs, found {name!r}: correct it")
        both = [speeds.get(kind.name, (0.0, 0.0)) for kind in self.kinds]
        first, second = sorted(names, key=known.index)
        order = (0, 1) if (first, second) == names else (1, 0)
        one, two = (tuple(pair[index] for pair in both) for index in order)
        return Pair((known.index(first), known.index(second)), (one, two))

    @classmethod
    def load(cls, path: str | Path) -> "FleetFile":
        """Reads a file; the paths of profiles in it start from its own directory. `PlanError` names the place and the
        fix of each mistake.
        """
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        places = place.mapping(("format", "kinds", "jobs"), ("entities", "pairs", "budget"))
        machines = tuple(_read_machines(node) for node in places["kinds"].items())
        kinds = tuple(each.kind.name for each in machines)
        jobs = [_read_job(node, Path(path).parent, kinds) for node in places["jobs"].items()]
        return place.build(
            lambda: cls(
                path=str(path),
                machines=machines,
                jobs=tuple(model for model, _, _ in jobs),
                arrivals=tuple(seconds for _, seconds, _ in jobs),
                commands=tuple(command for _, _, command in jobs),
                entities=tuple(_read_entity(node) for node in _items(places, "entities")),
                pairs=tuple(_read_pair(node, kinds) for node in _items(places, "pairs")),
                budget=places["budget"].number() if "budget" in places else None,
            )
        )


def _items(places: Mapping[str, YamlNode], key: str) -> tuple[YamlNode, ...]:
    return places[key].items() if key in places else ()


def _name(node: YamlNode) -> str:
    """A name that can be that of a directory or a file: runs and plans are kept under it."""
    name = node.text()
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        node.fail("a name without / that does not begin with a dot", "rename it: runs and plans are kept under it")
    return name


def _read_machines(node: YamlNode) -> Machines:
    places = node.mapping(("name", "workers"), (*_KIND, *_MACHINES))
    name, workers = _name(places["name"]), places["workers"].integer()
    kind = read_known(places, _KIND)
    return node.build(lambda: Machines(Kind(name, workers, **kind), **read_known(places, _MACHINES)))


def _read_job(node: YamlNode, folder: Path, kinds: tuple[str, ...]) -> tuple[ModelJob, float, TrainingCommand | None]:
    places = node.mapping(("name", "steps"), (*_JOB, *_SOURCES))
    name, steps = _name(places["name"]), places["steps"].number()
    job = node.build(lambda: Job(name, steps, **read_known(places, _JOB)))
    measured = {kind: speed.number() for kind, speed in _keys(places, "throughputs", kinds).items()}
    profiles = {kind: _read_profile(file, folder) for kind, file in _keys(places, "profiles", kinds).items()}
    profile = _read_profile(places["profile"], folder) if "profile" in places else None
    options = {key: value.value for key, value in _keys(places, "plan", _PLAN_KEYWORDS).items()}
    if not measured and not profiles and profile is None:
        raise PlanError(
            f"{node.file}: {node.where}: expected `throughputs`, `profile` or `profiles`, found none of them: say how "
            "fast the job runs, or give a profile of its model"
        )
    arrives = places["arrives"].number() if "arrives" in places else 0.0
    if not 0 <= arrives < float("inf"):
        places["arrives"].fail("0 or more seconds", "give the time from the start to the arrival of the job")
    command = None
    if "command" in places:
        counts = _keys(places, "processes", kinds)
        processes = {kind: count.integer() for kind, count in counts.items()}
        for kind, count in processes.items():
            if count < 1:
                counts[kind].fail("1 or more processes", "give how many the job gets on this kind")
        command = TrainingCommand(tuple(word.text() for word in places["command"].items()), processes)
    return ModelJob(job, profile, profiles, measured, options), arrives, command


def _keys(places: Mapping[str, YamlNode], key: str, known: tuple[str, ...]) -> dict[str, YamlNode]:
    """The entries of a mapping whose keys are of `known`."""
    return places[key].mapping((), known) if key in places else {}


def _read_profile(node: YamlNode, folder: Path) -> Profile:
    path = folder / node.text()
    try:
        return Profile.from_pipedream(path) if path.suffix == ".txt" else Profile.load(path)
    except PenstockError as error:
        raise PlanError(f"{node.file}: {node.where}: {error}") from None


def _read_entity(node: YamlNode) -> Entity:
    places = node.mapping(("name",), ("weight", "first_come"))
    given = read_known(places, {"weight": YamlNode.number, "first_come": YamlNode.boolean})
    return node.build(lambda: Entity(places["name"].text(), **given))


def _read_pair(node: YamlNode, kinds: tuple[str, ...]) -> tuple[tuple[str, str], Mapping[str, tuple[float, float]]]:
    places = node.mapping(("jobs", "throughputs"))
    names = tuple(name.text() for name in places["jobs"].items())
    rows = _keys(places, "throughputs", kinds)
    speeds = {kind: tuple(n.number() for n in both.items()) for kind, both in rows.items()}
    if len(names) != 2 or any(len(both) != 2 for both in speeds.values()):
        node.fail(
            "two jobs, and two throughputs for each kind", "write `jobs: [a, b]` and `throughputs: {V100: [1, 2]}`"
        )
    return (names[0], names[1]), {kind: (both[0], both[1]) for kind, both in speeds.items()}
