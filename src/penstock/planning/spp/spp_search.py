"""SPP: synchronous pipelines with replicated stages on any machine, near the least time per minibatch.

[SPP 2022, algorithm 3]. The devices are put in order (`device_orders`); for every number of stages the best plan in
this order is found by its busiest stage or link (`mappings`); and of these the one whose simulated minibatch is fastest
is taken, not the one with the least busy stage: deep pipelines are better balanced and take longer to fill. Beyond the
text:

  1. A pipeline has a direction, an order of devices has none: the order is also taken backwards. (On random graphs of 4
     and 5 devices, W then exceeds the best over all orders by 3 to 4 %, instead of 6 to 7 %.)
  2. A memory limit excludes stages: what each keeps in flight under `spp` is known, min(m, 4 q + 1) with q stages
     behind it.
  3. The time of the dynamic program grows with the fourth power of the devices. So a machine of many is planned as one
     of few, each of which stands for a group of g devices in a row. That is not exact: a stage computes g times as
     fast, a message between two groups has g^2 links, and an all-reduce takes about as long as before. So the small
     machine is planned twice, with links as they are and with links that are g times as fast.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from penstock.errors import PlanError
from penstock.planning.memory import overfull_rank
from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.spp.device_orders import device_order, link_latencies, link_speeds
from penstock.planning.spp.mappings import OrderedDevices, StageMapping, cheapest_mappings
from penstock.planning.stage_costs import ChainCosts, Flags, chain_costs, simulator_options
from penstock.scheduling.orders import SPP
from penstock.simulating.outcomes import Outcome, evaluate
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

_MOST_STEPS = 1e10
"""Elements that the dynamic program may examine, in about ten seconds."""

_QUICK_STEPS = 1e9
"""Elements for which the search asks the planner where there are many devices."""

_ROUNDING = 1 - 1e-9
"""The simulator adds in another order."""

_BUFFERS = 4
"""Messages of either kind that a stage holds beside what it keeps in flight: a stage runs up to 4 microbatches further
ahead than the next one, and takes gradients at most 4 behind it."""


def find_spp(profile: Profile, cluster: Cluster, request: Request, *, whole_samples: bool = False) -> Plan | None:
    """The plan whose simulated minibatch is the fastest; of equal ones, one with the fewest stages.

    None if nothing fits. It uses the schedule `spp`, whatever `request.schedule` is, and splits every microbatch over
    the replicas of a stage. `whole_samples` as for `spp_candidates`. Raises `PlanError` like that.
    """
    candidates = spp_candidates(profile, cluster, request, whole_samples=whole_samples)
    if cluster.least_memory_bytes is not None:
        more = spp_candidates(profile, cluster, request, whole_samples=whole_samples, buffers=_BUFFERS)
        candidates = (*candidates, *more)
    plans = list(dict.fromkeys(plan for _, plan in candidates))
    costs = chain_costs(profile, cluster, full_duplex=True)
    bounds = [_least_seconds(plan, costs, cluster) for plan in plans]
    found: tuple[float, int, int, Outcome] | None = None
    for index in sorted(range(len(plans)), key=bounds.__getitem__):
        if found is not None and bounds[index] > found[0]:
            break
        outcome = evaluate_for(request, plans[index], profile, cluster)
        if overfull_rank(outcome.peak_bytes, cluster) is None:
            own = outcome.minibatch_seconds, len(plans[index].stages), index, outcome
            found = own if found is None else min(found, own, key=lambda each: each[:3])
    return None if found is None else replace(plans[found[2]], predicted=found[3])


def _least_seconds(plan: Plan, costs: ChainCosts, cluster: Cluster) -> float:
    """The seconds that a minibatch of `plan` takes at least: the first microbatch comes to a stage, the stage or the
    link before it has its work, and the last gradient goes back. `costs`: one direction of each cut.
    """
    least = way = 0.0
    before: tuple[int, ...] = ()
    for stage in plan.stages:
        if before:
            directions = (before, stage.ranks), (stage.ranks, before)
            carried = float(costs.exchanged_bytes[stage.start]) / (len(before) * len(stage.ranks))
            sent = [carried / slowest_link(cluster, *ends)[0] for ends in directions]
            least = max(least, way + plan.microbatches * max(sent))
            way += sum(sent)
        seconds = float(costs.seconds_on(stage.ranks)[stage.start, stage.stop]) / len(stage.ranks)
        least = max(least, way + plan.microbatches * seconds)
        way += seconds
        before = stage.ranks
    return least * _ROUNDING


def evaluate_for(request: Request, plan: Plan, profile: Profile, cluster: Cluster) -> Outcome:
    """The outcome of `plan` by the simulator, with the all-reduce and the optimizer of `request`."""
    options = simulator_options(request.allreduce, request.optimizer_copies)
    options["shard_optimizer"] = request.shard_optimizer
    return evaluate(plan, profile, cluster, **options)


def spp_candidates(
    profile: Profile, cluster: Cluster, request: Request, *, whole_samples: bool = False, buffers: int = 0
) -> tuple[tuple[float, Plan], ...]:
    """(W, plan) for every number of stages, fewest first, and both directions of the order if they differ; empty if no
    plan fits in memory, or if `whole_samples` allows none.

    `request.stages` fixes the number of stages, on all devices; with `straight`, on as many devices and without
    replicas. `whole_samples`: the replicas of a stage share the samples of a microbatch equally; the paper allows
    fractions. W is in seconds per minibatch. The memory limit covers weights, gradients, optimizer state and
    activations in flight, and `buffers` waiting messages of either kind. Raises `PlanError` if there are more stages
    than layers or devices, or if the problem is too large.
    """
    most = _most_stages(profile, cluster, request)
    # A backward that directly follows its forward recomputes nothing: those of the last stage, and a single one.
    plain = chain_costs(profile, cluster)
    costs = chain_costs(profile, cluster, recompute=request.recompute and request.microbatches > 1)
    devices = most if request.straight else cluster.devices
    _check_size(devices, len(profile), most)
    fits = None
    least = cluster.least_memory_bytes
    if least is not None:
        fits = _fitting(costs, plain, least, request, buffers)
    counts = list(range(1, 2 if request.straight else devices + 1))
    if whole_samples:
        counts = [count for count in counts if profile.microbatch_size % count == 0]
    candidates: list[tuple[float, Plan]] = []
    for machine in _machines(cluster, devices, request):
        mappings = cheapest_mappings(costs, machine, request.microbatches, most, fits, last=plain, replicas=counts)
        wanted = mappings if request.stages is None else mappings[-1:]
        candidates += [(mapping.seconds, _plan(mapping, profile, request)) for mapping in wanted if mapping.stages]
    return tuple(sorted(candidates, key=lambda candidate: len(candidate[1].stages)))


def _most_stages(profile: Profile, cluster: Cluster, request: Request) -> int:
    """The number of stages of `request`, or the largest possible one."""
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


def _count_steps(devices: int, layers: int, stages: int) -> float:
    return stages * layers * (devices**2 / 2 * layers + devices**3 / 6)


def is_quick(profile: Profile, cluster: Cluster) -> bool:
    """Whether all devices of `cluster` can be planned within a second, for any number of stages."""
    devices, layers = cluster.devices, len(profile)
    return _count_steps(devices, layers, min(devices, layers)) <= _QUICK_STEPS


def _check_size(devices: int, layers: int, stages: int) -> None:
    steps = _count_steps(devices, layers, stages)
    if steps > _MOST_STEPS:
        raise PlanError(
            f"planner spp: {devices} devices and {layers} layers are too many for its dynamic program: expected at "
            f"most {_MOST_STEPS:.0e} steps, found {steps:.0e}. Use planner pipedream, join layers, or fix stages="
        )


def _machines(cluster: Cluster, devices: int, request: Request) -> Sequence[OrderedDevices]:
    """The first `devices` devices in order, and in the reverse order if that is another machine."""
    speeds, latencies = link_speeds(cluster)[:devices, :devices], link_latencies(cluster)[:devices, :devices]
    order = device_order(speeds)
    machines: list[OrderedDevices] = []
    for ranks in (order, order[::-1]):
        own = np.ix_(ranks, ranks)
        machine = OrderedDevices(ranks, speeds[own], latencies[own], shared_medium=request.allreduce == "shared")
        if not any(
            np.array_equal(machine.speeds, other.speeds) and np.array_equal(machine.latencies, other.latencies)
            for other in machines
        ):
            machines.append(machine)
    return machines


def _fitting(
    costs: ChainCosts, last: ChainCosts, memory_bytes: float, request: Request, buffers: int
) -> Callable[[int, int], Flags]:
    """A function of (replicas, stages behind) to [i, j]: whether layers i up to and without j fit as such a stage.

    Replicas share every microbatch, so that each keeps its share of all that are in flight; weights are whole. `last`
    has the costs of the last stage.
    """
    crossing = costs.exchanged_bytes / 2
    crossing[-1] = 0.0
    waiting = min(request.microbatches, buffers) * (crossing[:, None] + crossing)

    def fits(replicas: int, behind: int) -> Flags:
        in_flight = min(request.microbatches, 4 * behind + 1)
        own = costs if behind else last
        kept = (in_flight * own.saved_bytes + own.working_bytes + waiting) / replicas
        weights = (2 + request.copies(replicas)) * costs.parameter_bytes + costs.frozen_bytes
        fitting: Flags = kept + weights <= memory_bytes
        return fitting

    return fits


def _plan(mapping: StageMapping, profile: Profile, request: Request) -> Plan:
    return Plan(
        mapping.stages,
        SPP.name,
        request.microbatches,
        profile.microbatch_size,
        recompute=request.recompute,
        routing="split",
    )


MOST_ORDERED = 32
"""With more devices, groups of them are planned, too, unless the planner is named."""

_KEPT = 2
"""How many numbers of stages are proposed for each small machine."""


def propose_grouped(profile: Profile, cluster: Cluster, request: Request) -> Iterator[Plan]:
    """SPP's plans on groups of devices, for the smallest groups that leave few enough of them.

    Raises `PlanError` if there are none.
    """
    devices = cluster.devices
    sizes = (
        each
        for each in range(2, devices + 1)
        # All replicas are whole groups, and they share the samples equally.
        if devices % each == profile.microbatch_size % each == 0 and devices // each <= MOST_ORDERED // 2
    )
    size = next(sizes, 0)
    found = False
    for faster in (1.0, float(size)) if size else ():
        small = _group(cluster, size, faster)
        try:
            candidates = spp_candidates(profile, small, request, whole_samples=True)
        except PlanError:
            continue
        # A deep pipeline takes longer to fill than its busiest stage says.
        filled = sorted(candidates, key=lambda each: each[0] * (1 + len(each[1].stages) / request.microbatches))
        widened = [_widen(plan, size) for _, plan in filled]
        fitting = [plan for plan in widened if not any(profile.microbatch_size % count for count in plan.replicas)]
        costs = chain_costs(profile, recompute=request.recompute, full_duplex=True)
        for plan in fitting[:_KEPT]:
            found = True
            predicted = foresee(plan.stages, profile, costs, cluster, request).predicted
            yield replace(plan, predicted=predicted)
    if not found:
        raise PlanError(
            f"planner spp: expected groups of {cluster.devices} devices that share {profile.microbatch_size} samples "
            "equally, found none: use microbatches of another size"
        )


def _group(cluster: Cluster, size: int, faster: float) -> Cluster:
    """The machine of the first devices of all groups, with links that are `faster`."""
    firsts = range(0, cluster.devices, size)
    speeds = [[cluster.bandwidth(a, b) * faster for b in firsts] for a in firsts]
    latencies = [[cluster.latency(a, b) for b in firsts] for a in firsts]
    small = Cluster.from_matrix(speeds, cluster.memory_bytes, latencies)
    return replace(small, action_seconds=cluster.action_seconds, step_seconds=cluster.step_seconds)


def _widen(plan: Plan, size: int) -> Plan:
    stages = tuple(
        replace(stage, ranks=tuple(chain.from_iterable(range(rank * size, (rank + 1) * size) for rank in stage.ranks)))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, predicted=None)
