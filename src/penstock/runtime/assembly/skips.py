"""What of a captured model passes stages that do not read it, and what its stages send each other for that.

The choice is `choose_skips`, the ways are `find_way`; here they meet the values of a chain and the modules of stages.
"""

from collections.abc import Sequence

from penstock.capturing.chain import LayerChain, StageModule
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import SkipChoice, choose_skips
from penstock.values.crossings import Crossing, find_hops, find_stops, find_way
from penstock.values.plans import Plan

__all__ = ["crossings_of", "reroute", "with_skips"]


def crossings_of(chain: LayerChain) -> tuple[Crossing, ...]:
    """The values of `chain` that layers make and later ones read; the model's output is read by the last layer."""
    last = len(chain.layers) - 1
    reads: dict[str, dict[int, None]] = {}
    for index, layer in enumerate(chain.layers):
        for name in layer.inputs:
            reads.setdefault(name, {})[index] = None
    for name in chain.output.values:
        reads.setdefault(name, {})[last] = None
    found = []
    for index, layer in enumerate(chain.layers):
        for place, name in enumerate(layer.outputs):
            read = tuple(reader for reader in reads.get(name, {}) if reader > index)
            size = {"size_bytes": layer.output_bytes[place]} if layer.output_bytes else {}
            found += [Crossing(name, index, read, **size)] if read else []
    return tuple(found)


def with_skips(schedule: Schedule, plan: Plan, chain: LayerChain, choice: SkipChoice) -> Schedule:
    """`schedule`, in which the values of `chain` go directly past stages where `choice` says so. `PlanError` for a
    choice that there is not.
    """
    return choose_skips(schedule, find_hops(crossings_of(chain), _starts(plan)), choice)


def reroute(module: StageModule, index: int, schedule: Schedule, plan: Plan, chain: LayerChain) -> None:
    """Has the module of stage `index` receive and send what the skips of `schedule` leave to it."""
    if not schedule.skips:
        return
    sources: dict[str, int] = {}
    targets = dict.fromkeys(module.sent, 1) if index == schedule.stages - 1 else {}
    for crossing in crossings_of(chain):
        way = find_way(find_stops(crossing, _starts(plan)), schedule.skips)
        if index in way:
            place = way.index(index)
            if place > 0:
                sources[crossing.name] = index - way[place - 1]
            if place + 1 < len(way):
                targets[crossing.name] = way[place + 1] - index
    module.reroute(sources, targets)


def _starts(plan: Plan) -> Sequence[int]:
    return [stage.start for stage in plan.stages]
