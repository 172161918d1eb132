"""The uniform planner: as equal numbers of layers per stage as possible, which needs no measured times."""

from penstock.planning.memory import peak_bytes, require_fit
from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


def plan_uniform(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """A plan of stages with equal numbers of layers. `PlanError` if a stage does not fit in memory."""
    cut = Plan.uniform(
        len(profile),
        request.stage_count(cluster.devices),
        request.schedule,
        request.microbatches,
        request.stages_per_rank,
    )
    costs = chain_costs(profile, cluster, recompute=request.recompute)
    uniform = foresee(cut.stages, profile, costs, cluster, request)
    require_fit(uniform, peak_bytes(uniform, costs, request.optimizer_copies), cluster)
    return uniform
