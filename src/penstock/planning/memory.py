"""How many bytes a rank needs at its peak.

The papers say that memory is taken into account and leave the gradients and the optimizer out of their formulas
(thesis, chapter 3); then "does it fit" is answered wrongly. Here they are terms of their own:

    in flight x saved + recomputed + (weight versions + 1 gradient + optimizer copies) x parameters

With recomputation a microbatch in flight keeps only the stage's input, and one of them, recomputed, all that it saves.
For a stage of r replicas, with R workers in it and behind it:

    schedule      in flight                 weight versions
    gpipe         ceil(m / r)               1
    1f1b-flush    min(m, R) / r, up         1
    interleaved   chunks, see `peak_bytes`  1
    1f1b          ceil(R / r)               ceil(R / r); with vertical sync ceil(all workers / r)
    2bw           ceil(R / r)               2

Fragmentation, communication buffers and what the device's runtime takes are not in it.
"""

from math import ceil

from penstock.errors import PlanError
from penstock.planning.costs import ChainCosts, Matrix
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan

__all__ = ["OPTIMIZER_COPIES", "interval_bytes", "live_counts", "peak_bytes", "require_fit"]

OPTIMIZER_COPIES = 2.0
"""Optimizer state in units of the weights: 2 for Adam (the two moments), 1 for momentum, 0 for plain SGD."""


def live_counts(
    schedule: str, microbatches: int, replicas: int, behind: int, workers: int, *, vertical_sync: bool = False
) -> tuple[int, int]:
    """(Activations in flight, weight versions) on each replica of a stage.

    `behind` counts the workers of this stage and of all later ones, `workers` those of the pipeline. Not for
    `interleaved`, whose ranks hold several stages.
    """
    deep = ceil(behind / replicas)
    match schedule:
        case "gpipe":
            return ceil(microbatches / replicas), 1
        case "1f1b":
            return deep, ceil(workers / replicas) if vertical_sync else deep
        case "2bw":
            return deep, 2
        case _:
            return min(ceil(microbatches / replicas), deep), 1


def interval_bytes(
    costs: ChainCosts, in_flight: int, versions: int, optimizer_copies: float = OPTIMIZER_COPIES
) -> Matrix:
    """(N+1, N+1): the bytes of a stage of layers i up to and without j."""
    kept = in_flight * costs.saved_bytes + costs.recomputed_bytes
    return kept + (versions + 1 + optimizer_copies) * costs.parameter_bytes


def peak_bytes(plan: Plan, costs: ChainCosts, optimizer_copies: float = OPTIMIZER_COPIES) -> tuple[float, ...]:
    """Per rank. Under `interleaved` an upper bound: all chunks in flight are counted as the rank's largest.

    There, rank r of p with v stages has up to ``min(2(p-r-1) + (v-1)p + 1, m v)`` of them in flight (Megatron-LM).
    """
    if plan.schedule == "interleaved":
        return tuple(_interleaved_bytes(plan, rank, costs, optimizer_copies) for rank in range(plan.ranks))
    peaks = [0.0] * plan.ranks
    behind = plan.ranks
    for stage in plan.stages:
        replicas = len(stage.ranks)
        counts = live_counts(
            plan.schedule, plan.microbatches, replicas, behind, plan.ranks, vertical_sync=plan.vertical_sync
        )
        for rank in stage.ranks:
            peaks[rank] = float(interval_bytes(costs, *counts, optimizer_copies)[stage.start, stage.stop])
        behind -= replicas
    return tuple(peaks)


def require_fit(plan: Plan, peaks: tuple[float, ...], cluster: Cluster) -> None:
    """Raises `PlanError` if a rank needs more than the cluster's memory."""
    if cluster.memory_bytes is None:
        return
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    if peaks[worst] > cluster.memory_bytes:
        stage = next(index for index, stage in enumerate(plan.stages) if worst in stage.ranks)
        raise PlanError(
            f"stage {stage} ({plan.stages[stage]}) does not fit: expected at most {cluster.memory_bytes / 1e9:.4g} GB "
            f"on rank {worst}, found {peaks[worst] / 1e9:.4g} GB under {plan.schedule}. Use more devices, smaller "
            "microbatches, recompute=True, or a schedule that keeps less (1f1b-flush)"
        )


def _interleaved_bytes(plan: Plan, rank: int, costs: ChainCosts, optimizer_copies: float) -> float:
    own = [(stage.start, stage.stop) for stage in plan.stages if rank in stage.ranks]
    ranks, per_rank = plan.ranks, plan.stages_per_rank
    in_flight = min(2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1, plan.microbatches * per_rank)
    weights = sum(float(costs.parameter_bytes[interval]) for interval in own)
    kept = in_flight * max(float(costs.saved_bytes[interval]) for interval in own)
    kept += max(float(costs.recomputed_bytes[interval]) for interval in own)
    return kept + (2 + optimizer_copies) * weights
