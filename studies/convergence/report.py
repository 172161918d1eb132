"""The tables and the pictures of the convergence study, from its finished runs."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from convergence.pictures import Curve, Panel, draw
from convergence.tasks import STAGES, TASKS, Task
from convergence.training import METHODS

__all__ = ["write"]

SAME = {"flush": "data parallelism"}
"""The pipeline that flushes has the numbers of data parallelism; its runs only show that it has."""
OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW", "muon": "Muon and AdamW"}
LATE = 0.75
"""The target of a table is what data parallelism reaches after this share of its updates."""
NETWORK = "1 Gbit/s"
"""Of the pictures over time."""

Record = dict[str, Any]
Points = list[tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class Group:
    """All runs of a task and an optimizer."""

    task: Task
    optimizer: str
    records: tuple[Record, ...]

    def runs(self, method: str, rate: float) -> list[Record]:
        """The runs of `method` at `rate`, by seed."""
        method = SAME.get(method, method)
        return [record for record in self.records if (record["method"], record["rate"]) == (method, rate)]

    def methods(self) -> list[str]:
        """The methods that have runs, in the order of the study."""
        run = {record["method"] for record in self.records}
        return [name for name in METHODS if SAME.get(name, name) in run]

    def grid(self, method: str) -> dict[float, float]:
        """The final loss by rate, of the seed that chooses rates."""
        return {
            rate: _final(record)
            for rate in self.task.rates[self.optimizer]
            for record in self.runs(method, rate)
            if record["seed"] == 0
        }

    def best(self, method: str) -> float:
        """The rate with the least loss."""
        grid = self.grid(method)
        return min(grid, key=grid.__getitem__)

    @property
    def shared(self) -> float:
        """The best rate of data parallelism."""
        return self.best("data parallelism")

    def course(self, method: str, rate: float) -> Points:
        """Updates and the mean, least and most validation loss of the seeds that did not diverge."""
        by_update: dict[int, list[float]] = defaultdict(list)
        for record in self.runs(method, rate):
            if not record["diverged"]:
                for update, loss in record["validation"]:
                    by_update[update].append(loss)
        return [(u, sum(found) / len(found), min(found), max(found)) for u, found in sorted(by_update.items())]

    @property
    def target(self) -> float:
        """A loss that data parallelism reaches late."""
        course = self.course("data parallelism", self.shared)
        return next(loss for update, loss, _, _ in course if update >= LATE * self.task.updates)

    def updates_to_target(self, method: str) -> float | None:
        """When the mean of the seeds at the method's best rate first is at the target, between two validations."""
        course = self.course(method, self.best(method))
        for (before, worse, _, _), (after, better, _, _) in pairwise(course):
            if better <= self.target:
                return before + (after - before) * (worse - self.target) / (worse - better)
        return None


def write(records: dict[str, Record], tables: Path, pictures: Path) -> None:
    """Tables to one file, pictures into a folder."""
    pictures.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for task in TASKS.values():
        groups = [group for optimizer in task.rates if (group := _group(records, task, optimizer)) is not None]
        timed = records.get(f"seconds/{task.name}/{STAGES}")
        if not groups or timed is None:
            continue
        seconds = timed["seconds"]
        lines += [f"## {task.title}", "", *_seconds_table(seconds)]
        for group in groups:
            lines += ["", f"### {OPTIMIZERS[group.optimizer]}", "", *_table(group, seconds)]
            lines += ["", "By rate, seed 0:", "", *_grid_table(group), "", _same_bits(group, records)]
        lines += [""]
        drawn = _pictures(groups, seconds)
        for optimizer, updates in task.longer.items():
            if longer := _longer(records, task, optimizer, updates):
                lines += [f"### {OPTIMIZERS[optimizer]}, {updates} updates", "", *_longer_table(longer, updates), ""]
                drawn[f"{optimizer}-longer"] = [_longer_panels(longer, task, optimizer)]
        for name, rows in drawn.items():
            (pictures / f"convergence-{task.name}-{name}.svg").write_text(draw(rows, f"{task.title}: {name}"))
    tables.write_text("\n".join(lines))


def _group(records: dict[str, Record], task: Task, optimizer: str) -> Group | None:
    """None before data parallelism has gone through its grid."""
    wanted = {"task": task.name, "optimizer": optimizer, "stages": STAGES, "updates": task.updates}
    mine = [record for record in records.values() if all(record.get(key) == wanted[key] for key in wanted)]
    group = Group(task, optimizer, tuple(mine))
    complete = [name for name in METHODS if len(group.grid(name)) == len(task.rates[optimizer])]
    whole = tuple(record for record in mine if record["method"] in complete)
    return Group(task, optimizer, whole) if "data parallelism" in complete else None


def _longer(records: dict[str, Record], task: Task, optimizer: str, updates: int) -> dict[str, Record]:
    """The longer runs by method."""
    wanted = {"task": task.name, "optimizer": optimizer, "updates": updates}
    found = [record for record in records.values() if all(record.get(key) == wanted[key] for key in wanted)]
    by_method = {record["method"]: record for record in found}
    return {name: by_method[name] for name in METHODS if name in by_method}


def _longer_table(runs: dict[str, Record], updates: int) -> Iterator[str]:
    # The validations at a quarter of the updates or shortly before it.
    judged = [update for update, _ in next(iter(runs.values()))["validation"]]
    quarters = [max(at for at in judged if at <= updates * quarter // 4) for quarter in (1, 2, 3, 4)]
    yield "| method | rate | " + " | ".join(f"after {quarter}" for quarter in quarters) + " |"
    yield "|---|---:|" + "---:|" * len(quarters)
    for name, record in runs.items():
        losses = dict(record["validation"])
        cells = (f"{losses[quarter]:.3f}" if quarter in losses else "diverged" for quarter in quarters)
        yield f"| {name} | {record['rate']:g} | " + " | ".join(cells) + " |"


def _longer_panels(runs: dict[str, Record], task: Task, optimizer: str) -> list[Panel]:
    """One for each kind of methods."""
    panels = []
    for kind, names in _kinds().items():
        shown = {name: runs[name]["validation"] for name in names if name in runs and not runs[name]["diverged"]}
        curves = [
            _curve(name, [(update * task.samples, loss, loss, loss) for update, loss in course])
            for name, course in shown.items()
        ]
        top = min((course[3][1] for course in shown.values()), default=0.0)
        title = f"{kind}, {OPTIMIZERS[optimizer]}"
        panels.append(Panel(title, tuple(curves), "samples", "validation loss", 1.1 * top))
    return panels


def _final(record: Record) -> float:
    return math.inf if record["diverged"] else float(record["final"])


def _spread(runs: Sequence[Record], key: str = "final", digits: int = 3) -> str:
    """Mean, and the least and the most in brackets; how many diverged."""
    values = [float(record[key]) for record in runs if not record["diverged"]]
    lost = len(runs) - len(values)
    if not values:
        return "diverged"
    text = f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text + (f", {lost} of {len(runs)} diverged" if lost else "")


def _seconds_table(seconds: dict[str, dict[str, float]]) -> Iterator[str]:
    yield "| simulated ms per update | " + " | ".join(seconds) + " |"
    yield "|---|" + "---:|" * len(seconds)
    for name in next(iter(seconds.values())):
        if not METHODS[name].correction:
            yield f"| {name} | " + " | ".join(f"{found[name] * 1e3:.2f}" for found in seconds.values()) + " |"


def _table(group: Group, seconds: dict[str, dict[str, float]]) -> Iterator[str]:
    judged = " accuracy |" if group.task.name == "digits" else ""
    shared, target = group.shared, group.target
    networks = "".join(f" ms, {network} |" for network in seconds)
    yield (
        f"| method | at {shared:g}, seed 0 | own best rate | loss there |{judged} updates to {target:.3f} |{networks}"
    )
    yield "|---|---:|---:|---|" + ("---|" if judged else "") + "---:|" * (1 + len(seconds))
    for name in group.methods():
        own = group.best(name)
        if math.isinf(group.grid(name)[own]):
            yield f"| {name} | diverged | none | |" + (" |" if judged else "") + " |" * (1 + len(seconds))
            continue
        runs = group.runs(name, own)
        needed = group.updates_to_target(name)
        at_shared = group.grid(name)[shared]
        cells = [name, "diverged" if math.isinf(at_shared) else f"{at_shared:.3f}", f"{own:g}", _spread(runs)]
        cells += [_spread(runs, "accuracy")] * bool(judged)
        cells += ["never" if needed is None else f"{needed:.0f}"]
        plain = name.partition(",")[0] if METHODS[name].correction else name
        for found in seconds.values():
            timed = needed is not None and plain in found
            cells.append(f"{(needed or 0) * found[plain] * 1e3:.0f}" if timed else "")
        yield "| " + " | ".join(cells) + " |"


def _grid_table(group: Group) -> Iterator[str]:
    rates = group.task.rates[group.optimizer]
    yield "| method | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "|---|" + "---:|" * len(rates)
    for name in group.methods():
        if name not in SAME:
            finals = group.grid(name)
            cells = ("diverged" if math.isinf(finals[rate]) else f"{finals[rate]:.3f}" for rate in rates)
            yield f"| {name} | " + " | ".join(cells) + " |"


def _same_bits(group: Group, records: dict[str, Record]) -> str:
    """What the runs of the flushing pipeline showed."""
    flushed = [
        record
        for record in records.values()
        if (record.get("task"), record.get("optimizer")) == (group.task.name, group.optimizer)
        and (record.get("method"), record.get("updates")) == ("flush", group.task.updates)
    ]
    pairs = [
        (one["digest"], other["digest"])
        for one in flushed
        for other in group.runs("data parallelism", one["rate"])
        if other["seed"] == one["seed"] and not one["diverged"] and not other["diverged"]
    ]
    same = sum(one == other for one, other in pairs)
    return f"Flush and data parallelism: {same} of {len(pairs)} compared runs have the same bits."


def _pictures(groups: Sequence[Group], seconds: dict[str, dict[str, float]]) -> dict[str, list[list[Panel]]]:
    """By name, rows of panels: schedules above, corrections below, one column for each optimizer."""
    chosen = _kinds()
    timed = {"Schedules": [name for name in METHODS if not METHODS[name].correction and name in seconds[NETWORK]]}
    drawn: dict[str, list[list[Panel]]] = {"samples": [], "seconds": [], "rates": []}
    samples = {name: float(groups[0].task.samples) for name in METHODS}
    title = f"simulated seconds, {NETWORK}"
    for kind, names in chosen.items():
        corrections = [name for name in names if METHODS[name].correction]
        shown = [group for group in groups if not corrections or set(corrections) & set(group.methods())]
        if shown:
            drawn["samples"].append([_course_panel(group, kind, names, samples, "samples") for group in shown])
            drawn["rates"].append([_rates_panel(group, kind, names) for group in shown])
    for kind, names in timed.items():
        drawn["seconds"].append([_course_panel(group, kind, names, seconds[NETWORK], title) for group in groups])
    return drawn


def _kinds() -> dict[str, list[str]]:
    """The methods that are drawn in one panel."""
    return {
        "Schedules": [name for name in METHODS if not METHODS[name].correction and name not in SAME],
        "2bw and corrections": [name for name in METHODS if _corrects(name, "2bw")],
        "pipedream and corrections": [name for name in METHODS if _corrects(name, "pipedream")],
    }


def _corrects(name: str, schedule: str) -> bool:
    """Whether the method is a correction of `schedule` or what it must be compared with."""
    if not METHODS[name].correction:
        return name in (schedule, "data parallelism") or (name == "one device" and schedule == "pipedream")
    kinds = {other.partition(", ")[2] for other in METHODS if METHODS[other].correction and other.startswith(schedule)}
    plain, _, kind = name.partition(", ")
    return kind in kinds and plain in (schedule, "data parallelism", "flush")


def _curve(name: str, points: Points, marked: bool = False) -> Curve:
    dashed = name in ("flush", "one device", "data parallelism, NAdam", "flush, look-ahead")
    return Curve(name, _COLOURS.index(name) if name in _COLOURS else _SECOND[name], tuple(points), dashed, marked)


_COLOURS = (
    "data parallelism",
    "pipedream",
    "2bw",
    "pipedream, vertical sync",
    "pipedream, no stashing",
    "2bw, NAdam",
    "flush",
)
"""By number."""
_SECOND = {
    "one device": 6,
    "data parallelism, NAdam": 5,
    "pipedream, NAdam": 5,
    "flush, look-ahead": 7,
    "2bw, look-ahead": 7,
}
_SECOND |= {"pipedream, weight prediction": 3, "2bw, weight prediction": 3, "2bw, error feedback": 4}
"""Of methods that are drawn beside few of those."""


def _course_panel(group: Group, kind: str, names: Sequence[str], per_update: dict[str, float], x_title: str) -> Panel:
    """The losses of each method at its best rate; `per_update`: what an update takes of what `x_title` says."""
    curves = []
    for name in names:
        if name in group.methods():
            course = group.course(name, group.best(name))
            curves.append(_curve(name, [(at * per_update[name], mean, low, high) for at, mean, low, high in course]))
    return _loss_panel(group, f"{kind}, {OPTIMIZERS[group.optimizer]}", curves, x_title)


def _loss_panel(group: Group, title: str, curves: Sequence[Curve], x_title: str) -> Panel:
    """Where the loss falls over powers of ten its axis is logarithmic; else the first fall is cut off."""
    logarithmic = group.task.name == "digits"
    course = group.course("data parallelism", group.shared)
    top = None if logarithmic else next(loss for update, loss, _, _ in course if update >= 0.15 * group.task.updates)
    shown = tuple(curve for curve in curves if curve.points)
    return Panel(title, shown, x_title, "validation loss", None if top is None else 1.1 * top, log_y=logarithmic)


def _rates_panel(group: Group, kind: str, names: Sequence[str]) -> Panel:
    curves = []
    for name in names:
        if name in group.methods():
            finals = {rate: loss for rate, loss in group.grid(name).items() if math.isfinite(loss)}
            curves.append(_curve(name, [(rate, loss, loss, loss) for rate, loss in finals.items()], marked=True))
    shown = tuple(curve for curve in curves if curve.points)
    logarithmic = group.task.name == "digits"
    title = f"{kind}, {OPTIMIZERS[group.optimizer]}"
    return Panel(title, shown, "rate (a missing dot: diverged)", "final validation loss", log_x=True, log_y=logarithmic)
