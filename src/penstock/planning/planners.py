"""The front door of planning: one function, and the table of planners by name.

A planner is a function ``(profile, cluster, request) -> Plan``; a new one is its own file and one line in the table.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.errors import PlanError
from penstock.planning.costs import chain_costs, require_allreduce
from penstock.planning.memory import OPTIMIZER_COPIES, peak_bytes, require_fit
from penstock.planning.pipedream import plan_pipedream
from penstock.planning.predictions import predict, slowest_seconds
from penstock.planning.requests import Request
from penstock.values.clusters import Cluster
from penstock.values.documents import suggestion, text_of
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["PLANNERS", "plan", "plan_uniform"]


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    planner: str = "pipedream",
    schedule: str = "1f1b-flush",
    microbatches: int | None = None,
    stages: int | None = None,
    stages_per_rank: int | None = None,
    straight: bool = False,
    allreduce: str = "ring",
    vertical_sync: bool = False,
    recompute: bool = False,
    optimizer_copies: float = OPTIMIZER_COPIES,
) -> Plan:
    """A plan of `profile` on `cluster`, with its prediction filled in.

    `planner` is `pipedream` (the fastest slowest stage, stages may be replicated) or `uniform` (equally many layers per
    stage). `stages` fixes the number of all stages and gives each one rank, as `straight` does with as many stages as
    the devices hold. `microbatches` defaults to 1 under `1f1b`, whose microbatches have updates of their own, else to
    four per device, for a bubble of about a fifth. `stages_per_rank` defaults to 2 under `interleaved` and else to 1.
    `optimizer_copies` is the optimizer's state in units of the weights (2: Adam), for the memory that a rank needs.

    Raises `PlanError` for an unknown name, for more stages than layers or devices, and if nothing fits in memory.
    """
    if planner not in PLANNERS:
        raise PlanError(
            f"planner: expected one of {', '.join(PLANNERS)}, found {text_of(planner)}. "
            f"{suggestion(str(planner), tuple(PLANNERS))}Choose one of them"
        )
    if microbatches is None:
        microbatches = 1 if schedule == "1f1b" else 4 * cluster.devices
    if stages_per_rank is None:
        stages_per_rank = 2 if schedule == "interleaved" else 1
    request = Request(
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
        stages_per_rank=stages_per_rank,
        straight=straight,
        allreduce=require_allreduce(allreduce),
        vertical_sync=vertical_sync,
        recompute=recompute,
        optimizer_copies=optimizer_copies,
    )
    return PLANNERS[planner](profile, cluster, request)


def plan_uniform(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """As many layers in every stage, as far as it goes; one rank per stage."""
    cut = Plan.uniform(
        len(profile),
        request.stage_count(cluster.devices),
        request.schedule,
        request.microbatches,
        request.stages_per_rank,
    )
    costs = chain_costs(profile, recompute=request.recompute)
    uniform = request.arrange(cut.stages, profile)
    require_fit(uniform, peak_bytes(uniform, costs, request.optimizer_copies), cluster)
    slowest = slowest_seconds(uniform.stages, costs, cluster, request.allreduce)
    return replace(uniform, predicted=predict(uniform, profile, costs, slowest, request.optimizer_copies))


Planner = Callable[[Profile, Cluster, Request], Plan]

PLANNERS: Mapping[str, Planner] = MappingProxyType({"pipedream": plan_pipedream, "uniform": plan_uniform})
"""The planners by name."""
