"""A training that goes on: from the newest checkpoint of a directory, on the processes that are there."""

from collections.abc import Callable
from pathlib import Path

from penstock.errors import PlanError
from penstock.runtime.transport.worlds import World
from penstock.values.plans import Plan

__all__ = ["holds_checkpoint", "plan_for"]


def plan_for(plan: Plan | str | Callable[[int], Plan] | None, world: World) -> Plan | str | None:
    """`plan`, or what it returns for the processes of `world` if it is a function.

    `PlanError` if it returns something else than a plan.
    """
    if not callable(plan):
        return plan
    made = plan(world.processes)
    if not isinstance(made, Plan):
        raise PlanError(
            f"plan= is a function: expected that it returns a penstock.Plan for {world.processes} process(es), found "
            f'{made!r:.100}. Return one, or pass plan="auto" or None'
        )
    return made


def holds_checkpoint(directory: str | Path) -> bool:
    """Whether there is something in `directory` to go on from."""
    return (Path(directory) / ".metadata").exists()
