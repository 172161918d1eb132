"""Explanations: the result of a search in words and a table."""

from collections.abc import Sequence
from itertools import groupby

from penstock.planning.search.searches import EQUAL, Rejection, SearchResult
from penstock.simulating.losses import Losses
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text

__all__ = ["explain_search", "rate_text", "shape_text", "wire_note"]

_ROWS = 10
"""Plans in the table."""

_REASON = 160
"""Characters of the reason of a rejection."""


def explain_search(search: SearchResult, losses: Losses, memory_bytes: float | None) -> str:
    """The best plan, the ranked table, where the time of the best goes, why the runner-up is not the best, and what
    could not be planned.

    `memory_bytes`: of each device; None if it is not limited.
    """
    best, *others = search.ranked
    lines = [str(best), "", *_table(search.ranked[:_ROWS])]
    hidden = len(search.ranked[_ROWS:]) + search.not_simulated
    lines += [f"and {hidden} more that are slower"] if hidden else []
    lines += ["", f"The best is limited by: {_predicted(best).limit}."]
    needs = f"The fullest device needs {bytes_text(max(_predicted(best).peak_bytes))}"
    lines += [f"{needs}; no limit was given." if memory_bytes is None else f"{needs} of {bytes_text(memory_bytes)}."]
    lines += [f"Its time goes to: {losses}."]
    lines += [_compare(best, others[0])] if others else []
    lines += _advise(search.ranked)
    lines += _list(search.rejections)
    return "\n".join(lines)


def wire_note(profile: Profile) -> str:
    """A line that says how much of what crosses cuts links carry; nothing if they carry it as it is."""
    crossing, sent = (sum(layer.cut_bytes for layer in each.layers[:-1]) for each in (profile, profile.on_wire))
    if profile.on_wire is profile or not crossing:
        return ""
    return f"\nLinks carry {sent / crossing:.0%} of what crosses cuts, as with wire_dtype= of the pipeline."


def shape_text(plan: Plan) -> str:
    """The replicas of the stages: ``15-1``, ``8 stages x 2`` for many equal ones, ``data parallel x 4`` for one."""
    replicas = plan.replicas[: len(plan.stages) // plan.stages_per_rank]
    if len(replicas) == 1:
        text = f"data parallel x {replicas[0]}" if replicas[0] > 1 else "1 stage"
    elif len(set(replicas)) > 1 or 1 < len(replicas) <= 4:
        text = "-".join(map(str, replicas))
    else:
        text = f"{len(replicas)} stages"
        text += f" x {replicas[0]}" if replicas[0] > 1 else ""
    text += f", v={plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    return text + (f", t={plan.tensor_parallel}" if plan.tensor_parallel > 1 else "")


def _table(plans: Sequence[Plan]) -> list[str]:
    head = ("", "planner", "schedule", "replicas", "m x b", "minibatch", "samples/s", "bubble", "peak", "limited by")
    rows = [head, *(_row(position, plan) for position, plan in enumerate(plans, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    left = {1, 2, 3}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        + f"  {row[-1]}"
        for row in rows
    ]


def _row(position: int, plan: Plan) -> tuple[str, ...]:
    predicted = _predicted(plan)
    return (
        str(position),
        plan.planner,
        str(plan.schedule) + (" recompute" if plan.recompute else ""),
        shape_text(plan),
        f"{plan.microbatches} x {plan.microbatch_size}",
        seconds_text(predicted.minibatch_seconds),
        rate_text(predicted.samples_per_second),
        f"{predicted.bubble:.1%}",
        bytes_text(max(predicted.peak_bytes)),
        predicted.limit,
    )


def _compare(best: Plan, other: Plan) -> str:
    """Why `other` is not the best."""
    rate, lost = _predicted(best).samples_per_second, _predicted(other).samples_per_second
    name = f"The runner-up ({_name(other)})"
    if lost >= rate * (1 - EQUAL):
        peaks = [max(_predicted(plan).peak_bytes) for plan in (best, other)]
        if best.definition.flushes and not other.definition.flushes:
            return f"{name} is as fast, but its weights are stale."
        if peaks[0] < peaks[1]:
            return f"{name} is as fast, but needs {bytes_text(peaks[1])} where the best needs {bytes_text(peaks[0])}."
        return f"{name} is as fast and needs as much memory."
    return f"{name} {_slower(rate, lost)}: it is limited by {_predicted(other).limit}."


def rate_text(rate: float) -> str:
    """Samples per second with four digits, and never as a power of ten below a million."""
    return f"{rate:.4g}" if rate < 1e4 or rate >= 1e6 else f"{rate:.0f}"


def _slower(rate: float, lost: float) -> str:
    """How much slower `lost` samples per second are than `rate`."""
    times = rate / lost if lost else float("inf")
    return f"is {times - 1:.1%} slower" if times < 2 else f"takes {times:.3g} times as long"


def _advise(ranked: Sequence[Plan]) -> list[str]:
    """Warnings about the best plan."""
    best = ranked[0]
    lines = []
    if not best.definition.flushes:
        advice = "it trains with stale weights, so watch the loss"
        same = next((plan for plan in ranked if plan.definition.flushes), None)
        if same is not None:
            slower = _slower(_predicted(best).samples_per_second, _predicted(same).samples_per_second)
            advice += (
                f"; the best plan that trains as one device does ({_name(same)}) {slower}: "
                "synchronous=True (--synchronous) plans only such"
            )
        lines.append(f"{best.schedule} never flushes: {advice}.")
    if best.definition.updates_per_microbatch and best.routing == "round-robin" and len(set(best.replicas)) > 1:
        lines.append(
            "Its stages update at different rates, a stage of r replicas once in r microbatches: see "
            "Pipeline(scale_learning_rates=True), or plan for another schedule."
        )
    return lines


def _list(rejections: Sequence[Rejection]) -> list[str]:
    """One line for every planner and schedule without a plan."""
    kinds = groupby(sorted(rejections, key=_kind), key=_kind)
    lines = [f"  {planner}, {schedule}: {_shorten(next(same).reason)}" for (planner, schedule), same in kinds]
    return ["", "Not possible:", *lines] if lines else []


def _kind(rejection: Rejection) -> tuple[str, str]:
    return rejection.planner, rejection.schedule


def _shorten(reason: str) -> str:
    line = reason.splitlines()[0]
    return line if len(line) <= _REASON else line[: _REASON - 3].rsplit(" ", 1)[0] + " ..."


def _name(plan: Plan) -> str:
    return f"{plan.schedule}, {shape_text(plan)}" + (", recompute" if plan.recompute else "")


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted
