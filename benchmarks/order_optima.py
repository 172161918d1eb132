"""Optimal orders of small pipelines, by OR-Tools' CP-SAT: what the search for an order is measured by.

The model is that of `OrderCosts`: each rank does one operation at a time, data arrives some seconds behind its sender's
end, and a microbatch keeps its bytes from the start of its forward to the end of what frees them. Microbatches of a
stage ascend, since they are alike. What is found becomes rows, which `time_rows` judges as it judges all others.

OR-Tools is not among the requirements of the project: `pip install ortools`.
"""

from math import inf
from typing import Any

from penstock.planning.orders.rows import (
    BACKWARD,
    FORWARD,
    ROUNDING,
    WEIGHT,
    Op,
    OrderCosts,
    Rows,
    TimedRows,
    time_rows,
)

_TICKS = 1_000_000
"""Seconds that are not whole numbers become whole ticks, of which the work of the busiest rank has this number."""


def optimum(
    costs: OrderCosts, seconds: float, *, workers: int = 1, hint: TimedRows | None = None
) -> tuple[TimedRows | None, float]:
    """The best rows that CP-SAT finds in `seconds`, and the seconds of a step that it proves to be the least possible.

    `hint`: rows from which it begins. Where seconds are not whole numbers the bound is true up to their rounding.
    Raises `ImportError` without OR-Tools.
    """
    try:
        from ortools.sat.python import cp_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("expected OR-Tools, found none: pip install ortools") from error
    scale = _scale(costs)
    model = cp_model.CpModel()
    took = [[round(own * scale) for own in each] for each in costs.seconds]
    late = [[round(own * scale) for own in each] for each in (costs.activation, costs.gradient)]
    kept = [[round(own * scale) for own in each] for each in costs.occupied or ((0.0,) * (costs.stages - 1),) * 2]
    horizon = costs.microbatches * sum(map(sum, (*took, *late, *kept)))
    ops = [
        (kind, stage, microbatch)
        for kind in (FORWARD, BACKWARD, WEIGHT)
        for stage in range(costs.stages)
        if kind != WEIGHT or stage not in costs.whole
        for microbatch in range(costs.microbatches)
    ]
    start = {op: model.new_int_var(0, horizon, str(op)) for op in ops}
    end = {op: start[op] + took[op[0]][op[1]] for op in ops}
    for op in ops:
        kind, stage, microbatch = op
        if microbatch:
            model.add(start[op] >= end[kind, stage, microbatch - 1])
        if kind == WEIGHT:
            model.add(start[op] >= end[BACKWARD, stage, microbatch])
        elif (source := costs.source(op)) is not None and source[0][1] == stage:
            model.add(start[op] >= end[source[0]])
    links: dict[int, list[Any]] = {}
    for kind, delays in ((FORWARD, late[0]), (BACKWARD, late[1])):
        for cut, delay in enumerate(delays):
            here, there = (cut, cut + 1) if kind == FORWARD else (cut + 1, cut)
            for microbatch in range(costs.microbatches):
                sent = model.new_int_var(0, horizon, "")
                model.add(sent >= end[kind, here, microbatch])
                model.add(start[kind, there, microbatch] >= sent + delay)
                links.setdefault(costs.links[kind][cut], []).append(
                    model.new_fixed_size_interval_var(sent, kept[kind][cut], "")
                )
    for messages in links.values():
        model.add_no_overlap(messages)
    span = model.new_int_var(0, horizon, "span")
    for rank in range(costs.length):
        own = [op for op in ops if costs.ranks[op[1]] == rank]
        model.add_no_overlap([model.new_fixed_size_interval_var(start[op], took[op[0]][op[1]], f"{op}") for op in own])
        begun = model.new_int_var(0, 0 if costs.barrier else horizon, f"begun {rank}")
        for op in own:
            model.add(begun <= start[op])
            model.add(span >= end[op] - begun)
        _limit(model, costs, rank, start, end)
    model.minimize(span)
    if hint is not None:
        for row, begins in zip(hint.rows, hint.starts, strict=True):
            for op, at in zip(row, begins, strict=True):
                model.add_hint(start[op], round(at * scale))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.interleave_search = workers == 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, inf if status == cp_model.INFEASIBLE else solver.best_objective_bound / scale
    rows: Rows = [[] for _ in range(costs.length)]
    for op in sorted(ops, key=lambda op: (solver.value(start[op]), solver.value(end[op]), op)):
        rows[costs.ranks[op[1]]].append(op)
    timed = time_rows(costs, rows)
    assert timed is not None
    assert all(costs.fits(row, rank) for rank, row in enumerate(rows))
    return timed, solver.best_objective_bound / scale


def _limit(model: Any, costs: OrderCosts, rank: int, start: dict[Op, Any], end: dict[Op, Any]) -> None:
    """Bytes of `rank`, in whole numbers: those of a microbatch are rounded down, and the limit too."""
    limit = costs.limits[rank]
    if limit == inf:
        return
    sizes = [*costs.saved, *(costs.freed or ())]
    unit = 1.0 if all(float(size).is_integer() for size in sizes) else limit / _TICKS
    intervals, demands = [], []
    after = costs.bytes_after
    for stage in costs.held[rank]:
        for microbatch in range(costs.microbatches):
            begin = start[FORWARD, stage, microbatch]
            for kind in (BACKWARD, WEIGHT):
                size = -after[kind][stage]
                if size > 0 and (kind == BACKWARD or stage not in costs.whole):
                    stop = end[kind, stage, microbatch]
                    length = model.new_int_var(0, 2**40, "")
                    intervals.append(model.new_interval_var(begin, length, stop, ""))
                    demands.append(round(size / unit))
    model.add_cumulative(intervals, demands, int(limit * ROUNDING / unit))


def _scale(costs: OrderCosts) -> float:
    own = (costs.forward, costs.backward, costs.weight, costs.activation, costs.gradient, *costs.occupied)
    if all(float(seconds).is_integer() for each in own for seconds in each):
        return 1.0
    return _TICKS / max(costs.work)
