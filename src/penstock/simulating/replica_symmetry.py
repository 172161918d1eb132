"""Which ranks are simulated: of replicas that do the same at the same times, only one.

- Replicas that split every microbatch run in step: the first of each stage represents all.
- Where every stage has d replicas that take turns, and d divides the minibatch, they form d pipelines that do the same
  d microbatches apart. If their devices and links are equal, too, the pipeline of the first replicas represents all.
- Otherwise every rank is simulated.
"""

from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import PlanError
from penstock.scheduling.placements import Placement
from penstock.simulating.action_costs import Costs
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster


@dataclass(frozen=True, slots=True)
class ReplicaSymmetry:
    """The ranks that are simulated, ascending, and for every rank the one of them that represents it."""

    simulated: tuple[int, ...]
    representatives: tuple[int, ...]


def find_symmetry(placement: Placement, costs: Costs, microbatches: int | None) -> ReplicaSymmetry:
    """The symmetry of a schedule with `microbatches` per minibatch; None if their number is not known."""
    if placement.split and costs.assumptions.slowdowns:
        raise PlanError(
            "slowdowns: expected none where replicas split microbatches, found some: all replicas of a stage compute "
            "at the same time, so scale the profile's seconds instead"
        )
    if not (placement.split or _runs_in_pipelines(placement, costs, microbatches)):
        every = tuple(range(placement.ranks))
        return ReplicaSymmetry(every, every)
    first = {rank: ranks[0] for ranks in placement.stages for rank in ranks}
    representatives = tuple(first[rank] for rank in range(placement.ranks))
    return ReplicaSymmetry(tuple(sorted(set(representatives))), representatives)


def _runs_in_pipelines(placement: Placement, costs: Costs, microbatches: int | None) -> bool:
    replicas = placement.replicas(0)
    if replicas == 1 or microbatches is None or microbatches % replicas or costs.assumptions.shared_nic:
        return False
    if costs.assumptions.slowdowns:
        return False
    if not placement.equal(range(len(placement.stages))):
        return False
    if costs.rank_times and any(len({costs.times_of(rank) for rank in ranks}) > 1 for ranks in placement.stages):
        return False
    if costs.cluster is None:
        return True
    far = [(placement.stages[here], placement.stages[there]) for (here, there), _ in costs.skips]
    pairs = {pair for pair in (*pairwise(placement.stages), *far) if pair[0] != pair[1]}
    return all(_links_are_equal(costs.cluster, here, there, costs.tensor_parallel) for here, there in pairs)


def _links_are_equal(cluster: Cluster, here: tuple[int, ...], there: tuple[int, ...], width: int) -> bool:
    kinds = {
        (
            slowest_link(cluster, (a * width + tp_rank,), (b * width + tp_rank,)),
            slowest_link(cluster, (b * width + tp_rank,), (a * width + tp_rank,)),
            cluster.message_costs(a * width + tp_rank, b * width + tp_rank),
            cluster.message_costs(b * width + tp_rank, a * width + tp_rank),
        )
        for a, b in zip(here, there, strict=True)
        for tp_rank in range(width)
    }
    return len(kinds) == 1
