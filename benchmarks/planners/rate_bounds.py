"""Bounds: the samples per second that a plan cannot exceed by the simulator, from a few sums instead of a simulation.

They save the simulations of rivals that cannot win. A minibatch of M microbatches takes at least as long as

  1. the busiest rank computes. Of the r replicas of a stage one takes M / r microbatches or more;
  2. the busiest link carries messages, each direction on its own;
  3. the all-reduces of a stage take, one for every update;
  4. under a flush: the first microbatch takes to a rank's first stage, the rank's own computations, and the way of the
     last gradient back to stage 0. (Weight backwards may come after that gradient is sent, and then count without it.)

With the options of a plain `evaluate`, on equal devices, with profiles without skips and clusters without costs of
messages and actions; for others there is no bound.
"""

from collections import defaultdict
from itertools import accumulate, pairwise
from math import inf, lcm

from penstock.simulating.action_costs import reduce_seconds
from penstock.simulating.outcomes import steady_lengths
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import Profile

__all__ = ["RateBounds"]

_ROUNDING = 1e-9
"""The simulator's sums are in another order."""


class RateBounds:
    """The bounds of plans for one profile on one cluster."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self._cluster = cluster
        self._size = profile.microbatch_size
        self._known = cluster.is_equal and not cluster.kinds and not cluster.has_message_costs
        self._known = self._known and not profile.crossings and not cluster.action_seconds
        layers = profile.layers
        self._forward, self._backward, self._weight, self._parameters = (
            [0.0, *accumulate(getattr(layer, name) for layer in layers)]
            for name in ("forward_seconds", "backward_seconds", "weight_part_seconds", "parameter_bytes")
        )
        self._crossing = [0.0, *(layer.cut_bytes for layer in profile.on_wire.layers)]
        self._links: dict[tuple[tuple[int, ...], tuple[int, ...], bool], tuple[float, float, float]] = {}

    def most(self, plan: Plan) -> float:
        """The samples per second that `plan` cannot exceed; infinite if nothing is known about it."""
        if not self._known or plan.recompute or plan.tensor_parallel > 1 or plan.definition.name == "inference":
            return inf
        seconds = self._least_seconds(plan) * (1 - _ROUNDING)
        return plan.microbatches * self._size / seconds if seconds else inf

    def _least_seconds(self, plan: Plan) -> float:
        stages, definition = plan.stages, plan.definition
        split = plan.routing == "split"
        forward, backward, weight = (
            [(sums[stage.stop] - sums[stage.start]) / (len(stage.ranks) if split else 1) for stage in stages]
            for sums in (self._forward, self._backward, self._weight)
        )
        strides = [1 if split else len(stage.ranks) for stage in stages]
        counted = plan.microbatches
        per_minibatch = 1
        if not definition.flushes:
            shorter, longer = steady_lengths(schedule(plan))
            per_minibatch = longer - shorter
            counted *= per_minibatch
        least = self._reduces(plan, counted, per_minibatch)
        sent = [0.0]
        messages: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], float] = defaultdict(float)
        for index, (one, other) in enumerate(pairwise(stages)):
            if one.ranks == other.ranks:
                sent.append(0.0)
                continue
            fastest, slowest, latency = self._link(one.ranks, other.ranks, split=split)
            size = self._crossing[other.start] / (len(one.ranks) * len(other.ranks) if split else 1)
            sent.append(size / fastest + latency)
            # Every link between replicas carries this number of the messages or one more.
            turns = counted // lcm(strides[index], strides[index + 1]) / per_minibatch
            for ends in ((one.ranks, other.ranks), (other.ranks, one.ranks)):
                messages[ends] += turns * size / slowest
        least = max([least, *messages.values()])
        # The way to each stage, and from it back to stage 0.
        there = [0.0, *accumulate(map(sum, zip(forward, sent[1:], strict=False)))]
        inputs = [whole - part * definition.splits_backward for whole, part in zip(backward, weight, strict=True)]
        back = [0.0, *accumulate(map(sum, zip(inputs, sent[1:], strict=False)))]
        held: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, stage in enumerate(stages):
            held[stage.ranks].append(index)
        for indices in held.values():
            first, stride = indices[0], strides[indices[0]]
            whole = sum(forward[index] + backward[index] for index in indices)
            if not definition.flushes:
                least = max(least, whole * plan.microbatches / stride)
                continue
            turns = -(-counted // stride)
            without = sum(forward[index] + inputs[index] for index in indices)
            least = max(least, there[first] + turns * whole, there[first] + turns * without + back[first])
            if not definition.splits_backward:
                least = max(least, there[first] + turns * whole + back[first])
        return least

    def _reduces(self, plan: Plan, counted: int, per_minibatch: int) -> float:
        """The seconds of a minibatch's all-reduces on the stage where they take the longest."""
        longest = 0.0
        for stage in plan.stages:
            size = self._parameters[stage.stop] - self._parameters[stage.start]
            updates = counted // len(stage.ranks) / per_minibatch if plan.definition.updates_per_microbatch else 1.0
            longest = max(longest, updates * reduce_seconds(size, stage.ranks, self._cluster, "ring"))
        return longest

    def _link(self, one: tuple[int, ...], other: tuple[int, ...], *, split: bool) -> tuple[float, float, float]:
        """The largest and the least bandwidth, and the least latency, of the links between two stages."""
        key = one, other, split
        if key not in self._links:
            if split:
                bandwidth, latency = slowest_link(self._cluster, one, other)
                self._links[key] = bandwidth, bandwidth, latency
            else:
                count = lcm(len(one), len(other))
                pairs = {(one[turn % len(one)], other[turn % len(other)]) for turn in range(count)}
                bandwidths = [self._cluster.bandwidth(a, b) for a, b in pairs]
                latency = min(self._cluster.latency(a, b) for a, b in pairs)
                self._links[key] = max(bandwidths), min(bandwidths), latency
        return self._links[key]
