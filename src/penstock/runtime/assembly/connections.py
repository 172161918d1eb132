"""The connections that a schedule needs: the pairs of ranks that send each other messages, and the groups that sum.

An edge costs time when a pipeline starts, and a communicator over a network, so a pair that never sends has none.
"""

import math
from collections.abc import Collection, Mapping
from itertools import pairwise

import torch
import torch.distributed as dist

from penstock.capturing.chain import LayerChain, StageModule
from penstock.runtime.engine.call_agreement import call_edges, comparing_rank
from penstock.runtime.transport.tensor_parallel_transport import connect_tensor_parallel
from penstock.runtime.transport.transport import Channel, Edge, Transport
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.values.plans import Plan


def buffered_stages(
    world: World, plan: Plan, chain: LayerChain, schedule: Schedule, modules: Mapping[int, StageModule]
) -> frozenset[int]:
    """The replicated stages whose modules have buffers. `modules`: those of this process that a hook has changed.
    Collective if there are replicas.
    """
    replicated = [stage for stage, ranks in enumerate(schedule.placement.stages) if len(ranks) > 1]
    if not replicated:
        return frozenset()
    mine = set()
    for index in replicated:
        stage = plan.stages[index]
        module = modules[index] if index in modules else chain.stage(stage.start, stage.stop)
        if any(True for _ in module.buffers()):
            mine.add(index)
    # A hook may have added buffers to a stage in the processes that hold it.
    return frozenset().union(*world.gather(mine, "while they compared the buffers of replicas"))


def edges_of(schedule: Schedule, buffered: Collection[int]) -> tuple[Edge, ...]:
    """The edges that messages travel on.

    They lead both ways between neighbour stages and between stages that share weights or a skip, if a microbatch or a
    gradient goes that way; from the last stage to every rank; both ways between the first rank of the last stage and
    every other one; and from the first replica of each stage in `buffered` to the others.
    """
    stages = schedule.placement.stages
    edges: dict[Edge, None] = {}
    for here, there in (*pairwise(stages), *((stages[a], stages[b]) for a, b in schedule.skips)):
        for one, other in _partners(here, there, schedule.placement.split):
            edges.update({Edge(one, other): None, Edge(other, one): None})
    for group in schedule.ties:
        for ranks in zip(*(stages[stage] for stage in group), strict=True):
            edges.update({Edge(here, there): None for here in ranks for there in ranks})
    edges.update({Edge(last, rank, Channel.REPORTS): None for last in stages[-1] for rank in range(schedule.ranks)})
    edges.update({Edge(stages[stage][0], rank, Channel.BUFFERS): None for stage in buffered for rank in stages[stage]})
    edges.update(dict.fromkeys(call_edges(schedule.ranks, comparing_rank(stages[-1]))))
    return tuple(edge for edge in edges if edge.source != edge.target)


def _partners(here: tuple[int, ...], there: tuple[int, ...], split: bool) -> list[tuple[int, int]]:
    """The pairs of replicas of neighbour stages between which some microbatch passes."""
    if split:
        return [(one, other) for one in here for other in there]
    rounds = math.lcm(len(here), len(there))
    return [(here[k % len(here)], there[k % len(there)]) for k in range(rounds)]


def connect(
    world: World,
    schedule: Schedule,
    *,
    buffered: Collection[int],
    device: torch.device,
    timeout_seconds: float,
    tp_group: dist.ProcessGroup | None,
) -> Transport:
    """The transport between the ranks of `schedule`. Collective.

    `buffered`: the stages whose replicas share buffers. `tp_group`: the processes of this rank, if they are several.
    """
    edges, groups = edges_of(schedule, sorted(buffered)), _groups_of(schedule)
    return connect_tensor_parallel(
        world, edges, device=device, timeout_seconds=timeout_seconds, groups=groups, tp_group=tp_group
    )


def _groups_of(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum gradients: for each replicated stage its ranks in replica order. Each group once."""
    return tuple(dict.fromkeys(ranks for ranks in schedule.placement.stages if len(ranks) > 1))
