"""The rules of the arguments of `Pipeline` that are not of its recipe, checked before anything is built.

Values that only make sense together are checked where they meet: a plan and a schedule in `choose_plan`, for one.
"""

from collections.abc import Mapping
from typing import Any, get_args

from penstock.arguments import FLAG, SEED, Rule, check_arguments, choice, function, instance, integer
from penstock.capturing.model_kinds import check_model
from penstock.capturing.weightless import is_weightless
from penstock.errors import PenstockError, PlanError
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.skips import SkipChoice
from penstock.values.plans import MICROBATCHES, Plan, require_schedule

_PLAN_RULES: Mapping[str, Rule[Any]] = {
    "plan": instance(
        (Plan, str),
        "a penstock.Plan or 'auto'",
        "make one with penstock.plan or Plan.uniform, or read one with penstock.Plan.load(path)",
    ).optional,
    "schedule": instance(
        (ScheduleDefinition, str),
        "the name of a schedule or a ScheduleDefinition",
        f"give one such as {DEFAULT_SCHEDULE}",
    ).optional,
    "microbatches": MICROBATCHES.optional,
    "stages": integer(1).optional,
    "tensor_parallel": integer(1).optional,
    "vertical_sync": FLAG,
    "skips": choice(get_args(SkipChoice)),
}
_RULES: Mapping[str, Rule[Any]] = {
    "init_fn": function(
        ("name", "tensor"), "pass one such as penstock.reset_parameters(model), which asks the modules themselves"
    ).optional,
    "parallelize": function(
        ("stage_module", "mesh"), "docs/composition.md shows one that applies tensor parallelism or fully_shard"
    ).optional,
    "check": choice(("warn", "strict", "off")),
    "seed": SEED.but("give one such as 0, or None for PyTorch's own stream").optional,
}
_OF_PLANS = ("schedule", "stages", "microbatches", "vertical_sync", "tensor_parallel")


def check_pipeline(given: Mapping[str, Any]) -> int | None:
    """Checks the arguments `given` to `Pipeline` by name, and returns the seed. Raises `CaptureError` for what is no
    model, and `PlanError` or `PenstockError` for other arguments.
    """
    check_model(given["model"], "Pipeline")
    planned = given["plan"]
    # A function makes the plan for the processes that are there.
    makes = callable(planned) and not isinstance(planned, type)
    check_arguments("Pipeline", {**given, "plan": None if makes else planned}, _PLAN_RULES, PlanError)
    if given["schedule"] is not None:
        require_schedule(given["schedule"])
    if given["on_nonfinite"] == "rollback" and given["resume"] is None:
        raise PenstockError(
            "on_nonfinite='rollback' goes back to the newest checkpoint in the directory resume=: expected a "
            "directory, found None. Pass resume=directory, and save there, or pass on_nonfinite='skip'"
        )
    seed: int | None = check_arguments("Pipeline", given, _RULES, PenstockError)["seed"]
    return seed


def plan_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a plan that is made here, among those `given` by name."""
    return {name: given[name] for name in _OF_PLANS}


def planned_anew(given: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The arguments of `Pipeline` that were `given` by name, with `plan` in place of what it was built from.

    `PenstockError` if its model cannot be built on again.
    """
    if given["parallelize"] is not None:
        raise PenstockError(
            "replan(apply=): expected a pipeline without parallelize=, found one: its hook has changed the modules in "
            "place, and cannot be called on them again. Save, build model and Pipeline anew with plan=, and load"
        )
    free = {name: False if name == "vertical_sync" else None for name in _OF_PLANS}
    # In a single process all weights are there by now.
    init_fn = given["init_fn"] if is_weightless(given["model"]) else None
    return {**given, **free, "plan": plan, "init_fn": init_fn}
