"""The bubble that a schedule has if its stages are balanced and its messages free."""

from penstock.scheduling.schedules import Schedule
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import default_minibatches, execute


def balanced_bubble(schedule: Schedule, recompute: bool = False) -> float:
    """The idle share of all ranks, where a backward takes twice as long as a forward.

    A stage of r replicas that take turns takes r times as long for a microbatch as one of a single rank, so that all
    ranks have as much to do. Under an asynchronous schedule it is the share without fill and drain. `recompute`: every
    backward computes its forward again.
    """
    placement = schedule.placement
    forwards = tuple(1.0 if placement.split else float(len(ranks)) for ranks in placement.stages)
    costs = Costs(forwards, tuple(2 * seconds for seconds in forwards), recompute=recompute)
    timeline = execute(schedule.program(default_minibatches(schedule)), placement, costs)
    return timeline.bubble if schedule.flushes else timeline.steady_bubble
