"""The bytes that a rank needs at its peak.

The papers take memory into account, but their formulas leave out the gradients and the optimizer [Narayanan 2021,
chapter 3], so they accept plans that do not fit. Our formula has terms for both, of which the copies are divided by the
number of replicas where these share the optimizer's state:

    in flight x saved + working + (weight versions + 1 gradient + optimizer copies) x trained parameters + frozen

`working` is for the microbatch that is being computed: the largest workspace of the stage's layers. With recomputation
a microbatch in flight keeps only the stage's input, and the one being computed also has all that the stage saves. The
schedule guarantees how many microbatches are in flight and how many versions there are (`Guarantees`).

If replicas split microbatches, each holds 1/r of every one, and as many are in flight as without replicas. With tensor
parallelism the profile describes one rank of a group, and so do these bytes. Fragmentation, communication buffers and
the memory of the device's runtime are not included.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from penstock.errors import PlanError
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, VersionRule
from penstock.scheduling.orders import DEFAULT_SCHEDULE, INTERLEAVED
from penstock.scheduling.placements import Placement
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, require_schedule

OPTIMIZER_COPIES = 2.0
"""The size of the optimizer's state in units of the weights: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""


def live_counts(
    schedule: ScheduleDefinition | str,
    microbatches: int,
    replicas: int,
    behind: int,
    workers: int,
    *,
    vertical_sync: bool = False,
) -> tuple[int, int]:
    """(Activations in flight, weight versions) on each replica of a stage whose replicas take microbatches in turn.

    `behind` counts the workers of this stage and of all later ones, `workers` those of the pipeline. It does not apply
    to schedules whose ranks hold several stages.
    """
    definition = require_schedule(schedule)
    before, after = workers - behind, behind - replicas
    # If this stage has one replica, all others have one. If it has several, the workers before it count as one stage,
    # and so do those after it.
    counts = (1,) * workers if replicas == 1 else tuple(count for count in (before, replicas, after) if count)
    stage = before if replicas == 1 else int(before > 0)
    guarantees = _guarantees_of(definition, microbatches, counts, vertical_sync)
    versions = guarantees.versions[stage]
    if guarantees.rule is VersionRule.INPUT_STAGE:
        # All stages keep as many versions as a first stage with as many replicas.
        first = tuple(count for count in (replicas, workers - replicas) if count)
        versions = _guarantees_of(definition, microbatches, first, vertical_sync).versions[0]
    return guarantees.in_flight[stage], versions


@lru_cache(maxsize=1 << 14)
def _guarantees_of(
    definition: ScheduleDefinition, microbatches: int, replicas: tuple[int, ...], vertical_sync: bool
) -> Guarantees:
    ranks = iter(range(sum(replicas)))
    placement = Placement(tuple(tuple(next(ranks) for _ in range(count)) for count in replicas))
    return definition.guarantees(PipelineShape(placement, microbatches, vertical_sync))


@lru_cache(maxsize=1 << 10)
def chunks_in_flight(
    ranks: int, stages_per_rank: int, microbatches: int, schedule: ScheduleDefinition | str = INTERLEAVED
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The microbatches in flight on each rank of one pipeline, summed over its stages, and on each stage."""
    definition = require_schedule(schedule)
    placement = Placement.of_layout(definition.layout, ranks, stages_per_rank)
    guarantees = definition.guarantees(PipelineShape(placement, microbatches))
    return guarantees.in_flight_of_rank, guarantees.in_flight


def interval_bytes(
    costs: ChainCosts,
    in_flight: float,
    versions: int,
    optimizer_copies: float = OPTIMIZER_COPIES,
    starts: Counts | None = None,
) -> Matrix:
    """(N+1, N+1): the bytes of a stage of layers i up to and without j. With `starts`, only the rows of these i."""
    rows = slice(None) if starts is None else starts
    kept = in_flight * costs.saved_bytes[rows] + costs.working_bytes[rows]
    return kept + (versions + 1 + optimizer_copies) * costs.parameter_bytes[rows] + costs.frozen_bytes[rows]


def peak_bytes(
    plan: Plan, costs: ChainCosts, optimizer_copies: float = OPTIMIZER_COPIES, *, shared: bool = False
) -> tuple[float, ...]:
    """The peak bytes of each rank. `shared`: whether replicas share the optimizer's state."""
    peaks = peaks_of_cuts(plan, np.array([cuts_of(plan)]), costs, optimizer_copies, shared=shared)[0].tolist()
    groups = dict.fromkeys(stage.ranks for stage in plan.stages)
    by_rank = {rank: peak for ranks, peak in zip(groups, peaks, strict=True) for rank in ranks}
    return tuple(by_rank[rank] for rank in range(plan.ranks))


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Where the stages of `plan` begin, and where the last one stops."""
    return (0, *(stage.stop for stage in plan.stages))


def peaks_of_cuts(
    plan: Plan, cuts: Counts, costs: ChainCosts, optimizer_copies: float, *, shared: bool = False
) -> Matrix:
    """(K, groups): the peak bytes of a rank of each group of replicas of `plan`, with each row of `cuts` as its cuts.

    If a rank holds several stages it is an upper bound, the lesser of two: every microbatch in flight counts as one of
    the stage that saves most; or each stage has its most in flight.
    """
    placement = plan.placement
    guarantees = plan.definition.guarantees(PipelineShape(placement, plan.microbatches, plan.vertical_sync))
    firsts = [ranks[0] for ranks in dict.fromkeys(placement.stages)]
    held = np.array([placement.stages_of(rank) for rank in firsts])
    versions = np.array(guarantees.versions)[held].max(axis=1)
    if guarantees.rule is VersionRule.INPUT_STAGE:
        # Counted as in `live_counts`, since planners also try unequal replicas, which cannot run.
        versions = np.array([placement.full_depth(stage) for stage in held[:, 0].tolist()])
    starts, stops = cuts[:, held], cuts[:, held + 1]
    replicas = np.array(plan.replicas)[held[:, 0]]
    sharers = replicas if placement.split else 1
    saved = costs.saved_bytes[starts, stops] / np.reshape(sharers, (-1, 1))
    working = costs.working_bytes[starts, stops].max(axis=2) / sharers
    weights, frozen = (size[starts, stops].sum(axis=2) for size in (costs.parameter_bytes, costs.frozen_bytes))
    kept = kept_bytes(saved, np.array(guarantees.in_flight_of_rank)[firsts], np.array(guarantees.in_flight)[held])
    copies = optimizer_copies / replicas if shared else optimizer_copies
    peaks: Matrix = kept + working + (versions + 1 + copies) * weights + frozen
    return peaks


def kept_bytes(saved: Matrix, of_ranks: Counts, of_stages: Counts) -> Matrix:
    """(K, ranks): the most bytes in flight. `saved` (K, ranks, v) is of a microbatch on each stage of a rank, and
    `of_ranks` (ranks,) and `of_stages` (ranks, v) are numbers of microbatches.
    """
    kept: Matrix = np.minimum(of_ranks * saved.max(axis=2), (of_stages * saved).sum(axis=2))
    return kept


def overfull_rank(peaks: Sequence[float], cluster: Cluster) -> int | None:
    """The rank that exceeds the memory of its device most, if one does; rank r is on device r of `cluster`."""
    if cluster.least_memory_bytes is None:
        return None
    excess = {rank: peak - memory for rank, peak in enumerate(peaks) if (memory := cluster.memory_of(rank)) is not None}
    worst = max(excess, key=excess.__getitem__, default=None)
    return worst if worst is not None and excess[worst] > 0 else None


def require_fit(plan: Plan, peaks: tuple[float, ...], cluster: Cluster) -> None:
    """Raises `PlanError` if a rank needs more than the memory of its device."""
    worst = overfull_rank(peaks, cluster)
    memory = None if worst is None else cluster.memory_of(worst)
    if worst is not None and memory is not None:
        stage = next(index for index, stage in enumerate(plan.stages) if worst in stage.ranks)
        raise PlanError(
            f"stage {stage} ({plan.stages[stage]}) does not fit: expected at most {memory / 1e9:.4g} GB "
            f"on rank {worst}, found {peaks[worst] / 1e9:.4g} GB under {plan.schedule}. Use more devices, smaller "
            "microbatches, recompute=True, state_on_host=True, shard_optimizer=True with replicas, or a schedule that "
            f"keeps less ({DEFAULT_SCHEDULE})"
        )
