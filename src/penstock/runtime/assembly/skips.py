"""Applies skips to a captured model: which values go directly past stages, and what each stage then receives and sends.

`choose_skips` makes the choice and `find_way` finds the ways; this file gives them the values of a chain.
"""

from collections.abc import Sequence

from penstock.capturing.chain import LayerChain, StageModule
from penstock.capturing.crossings import crossings_of
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import SkipChoice, choose_skips
from penstock.values.crossings import find_hops, find_stops, find_way
from penstock.values.plans import Plan


def with_skips(schedule: Schedule, plan: Plan, chain: LayerChain, choice: SkipChoice) -> Schedule:
    """`schedule`, in which the values of `chain` go directly past stages where `choice` says so. `PlanError` for an
    unknown choice.
    """
    return choose_skips(schedule, find_hops(crossings_of(chain), _starts(plan)), choice)


def reroute(module: StageModule, index: int, schedule: Schedule, plan: Plan, chain: LayerChain) -> None:
    """Changes which values the module of stage `index` receives and sends, by the skips of `schedule`."""
    if not schedule.skips:
        return
    sources: dict[str, int] = {}
    targets = dict.fromkeys(module.sent, 1) if index == schedule.stages - 1 else {}
    for crossing in crossings_of(chain):
        way = find_way(find_stops(crossing, _starts(plan)), schedule.skips)
        if index in way:
            position = way.index(index)
            if position > 0:
                sources[crossing.name] = index - way[position - 1]
            if position + 1 < len(way):
                targets[crossing.name] = way[position + 1] - index
    module.reroute(sources, targets)


def _starts(plan: Plan) -> Sequence[int]:
    return [stage.start for stage in plan.stages]
