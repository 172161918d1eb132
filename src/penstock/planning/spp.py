"""SPP: synchronous pipelines with replicated stages on any machine, near the least time per minibatch.

Source: Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", INFOCOM 2022, algorithm 3.
The devices are put in order (`device_orders`); for every number of stages the best plan in this order is found by its
busiest stage or link (`mappings`); and of these the one whose simulated minibatch is fastest is taken, not the one with
the least busy stage: deep pipelines are better balanced and take longer to fill. Beyond the text:

  1. A pipeline has a direction, an order of devices has none: the order is also taken backwards. (On random graphs of 4
     and 5 devices, W then exceeds the best over all orders by 3 %, instead of 6 to 7 %.)
  2. A memory limit excludes stages: what each keeps in flight under `spp` is known, min(m, 4 q + 1) with q stages
     behind it.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from penstock.errors import PlanError
from penstock.planning.costs import ChainCosts, Flags, chain_costs
from penstock.planning.device_orders import device_order, link_latencies, link_speeds
from penstock.planning.mappings import Machine, Mapping, cheapest_mappings
from penstock.planning.requests import Request
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["spp_candidates"]

_MOST_STEPS = 1e10
"""Elements that the dynamic program may look at: about ten seconds."""


def spp_candidates(profile: Profile, cluster: Cluster, request: Request) -> tuple[tuple[float, Plan], ...]:
    """(W, plan) for every number of stages, fewest first, and both directions of the order if they differ.

    `request.stages` fixes the number of stages, on all devices; with `straight`, on as many devices and without
    replicas. W in seconds for a minibatch. `PlanError` if there are more stages than layers or devices, if nothing fits
    in memory, or if the problem is too large.
    """
    most = _most_stages(profile, cluster, request)
    costs = chain_costs(profile, recompute=request.recompute)
    devices = most if request.straight else cluster.devices
    _check_size(devices, len(profile), most)
    candidates: list[tuple[float, Plan]] = []
    for machine in _machines(cluster, devices, request):
        fits = None if cluster.memory_bytes is None else _fitting(costs, cluster.memory_bytes, request)
        mappings = cheapest_mappings(costs, machine, request.microbatches, most, fits, straight=request.straight)
        wanted = mappings if request.stages is None else mappings[-1:]
        candidates += [(mapping.seconds, _plan(mapping, profile, request)) for mapping in wanted if mapping.stages]
    if not candidates:
        raise PlanError(
            f"nothing fits: expected a plan under spp with at most {(cluster.memory_bytes or inf) / 1e9:.4g} GB on "
            f"each of {devices} devices, found none for {profile.parameter_bytes / 1e9:.4g} GB of weights and "
            f"{request.microbatches} microbatches. Use more devices, fewer or smaller microbatches, recompute=True, or "
            "a schedule that keeps less (1f1b-flush)"
        )
    return tuple(sorted(candidates, key=lambda candidate: len(candidate[1].stages)))


def _most_stages(profile: Profile, cluster: Cluster, request: Request) -> int:
    """The number of stages asked for, or else the most there can be."""
    most = min(cluster.devices, len(profile))
    if request.stages is not None and request.stages > most:
        raise PlanError(
            f"stages: expected at most {most} ({len(profile)} layers on {cluster.devices} devices), found "
            f"{request.stages}: use fewer stages, describe more devices, or capture the model in finer layers"
        )
    if request.straight and request.stages is None and cluster.devices > len(profile):
        raise PlanError(
            f"cannot cut {len(profile)} layers into {cluster.devices} stages: expected at least one layer per stage. "
            "Use fewer stages (stages=), or allow replicas (straight=False)"
        )
    return most if request.stages is None else request.stages


def _check_size(devices: int, layers: int, stages: int) -> None:
    steps = stages * layers * (devices**2 / 2 * layers + devices**3 / 6)
    if steps > _MOST_STEPS:
        raise PlanError(
            f"planner spp: {devices} devices and {layers} layers are too many for its dynamic program: expected at "
            f"most {_MOST_STEPS:.0e} steps, found {steps:.0e}. Use planner pipedream, join layers, or fix stages="
        )


def _machines(cluster: Cluster, devices: int, request: Request) -> Sequence[Machine]:
    """The first `devices` devices in order, and in the reverse order if that is another machine."""
    speeds, latencies = link_speeds(cluster)[:devices, :devices], link_latencies(cluster)[:devices, :devices]
    order = device_order(speeds)
    machines: list[Machine] = []
    for ranks in (order, order[::-1]):
        own = np.ix_(ranks, ranks)
        machine = Machine(ranks, speeds[own], latencies[own], shared_medium=request.allreduce == "shared")
        if not any(
            np.array_equal(machine.speeds, other.speeds) and np.array_equal(machine.latencies, other.latencies)
            for other in machines
        ):
            machines.append(machine)
    return machines


def _fitting(costs: ChainCosts, memory_bytes: float, request: Request) -> Callable[[int, int], Flags]:
    """(Replicas, stages behind) to [i, j]: whether layers i up to and without j fit as such a stage.

    Replicas share every microbatch, so that each keeps its part of all that are in flight; weights are whole.
    """
    weights = (2 + request.optimizer_copies) * costs.parameter_bytes

    def fits(replicas: int, behind: int) -> Flags:
        in_flight = min(request.microbatches, 4 * behind + 1)
        kept = (in_flight * costs.saved_bytes + costs.recomputed_bytes) / replicas
        fitting: Flags = kept + weights <= memory_bytes
        return fitting

    return fits


def _plan(mapping: Mapping, profile: Profile, request: Request) -> Plan:
    return Plan(
        mapping.stages,
        "spp",
        request.microbatches,
        profile.microbatch_size,
        recompute=request.recompute,
        routing="split",
    )
