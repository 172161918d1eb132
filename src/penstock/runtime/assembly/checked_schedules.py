"""The schedule of a plan for a model, proved and with all that this pipeline asks of it, before anything is built."""

from collections.abc import Mapping

from penstock.capturing.chain import LayerChain
from penstock.runtime.assembly.restrictions import check_split_backwards, check_wire_dtype
from penstock.runtime.assembly.stages import check_plan, make_schedule
from penstock.runtime.execution.recomputation import Granularity, Recompute, choose_granularities
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import SkipChoice
from penstock.scheduling.verification.verifier import verify
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan


def check_schedule(
    chosen: Plan, chain: LayerChain, *, recompute: Recompute, recipe: Recipe, skips: SkipChoice, compiled: bool
) -> tuple[Plan, Mapping[int, Granularity], Schedule]:
    """`chosen` with its stages that recompute, how they do, and the schedule.

    Raises `PlanError` or `ScheduleError` if the plan does not fit the model, or the schedule breaks a rule or cannot be
    combined with the options.
    """
    plan, granularities = choose_granularities(chosen, recompute)
    check_plan(plan, chain)
    schedule = make_schedule(plan, chain, recipe.needs_norms, skips)
    verify(schedule)
    check_split_backwards(schedule, compiled, granularities)
    check_wire_dtype(recipe, plan, chain)
    return plan, granularities, schedule
