"""Where the time of a minibatch goes: what each kind of wait costs, by simulating the plan without it.

The parts are found one after the other, each with what came before it taken away, too: what a step takes before its
first and after its last action, the time of ranks for messages, the latency of links, the transfer of messages,
all-reduces, and copies of streamed weights. A part says how much faster a minibatch would be without it, and can be
less than nothing where a wait happens to order the messages better. What remains is computation, the mean over the
ranks; the imbalance, by which the busiest rank has more to compute than the mean; and the bubble, in which that rank
waits even without any communication. So the parts add up to the whole.
"""

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Unpack

from penstock.simulating.assumptions import Options
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import seconds_text

_LEAST_SHARE = 0.0005
"""Smaller parts are left out of the text."""
_NAMES = {"bubble": "waits of the schedule", "all_reduce": "all-reduce"}
"""In the text, where a bubble is all idle time of the ranks, with the imbalance."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The seconds of a minibatch in parts, which add up to the whole."""

    computation: float
    """Forwards, backwards and updates: the mean over the ranks."""
    bubble: float
    """Waits of the busiest rank that the schedule has without any communication."""
    imbalance: float
    """How much more the busiest rank has to compute than the mean."""
    all_reduce: float
    """Waits for sums of gradients over replicas."""
    transfer: float
    """Waits for the bytes of activations and gradients on links."""
    latency: float
    """Waits for the latency of links."""
    handling: float
    """Time of the ranks for messages, which they hand over, take in and copy, and which keep them from computing."""
    host: float = 0.0
    """Waits for the weights and the state of streamed stages, which pass between device and host."""
    start: float = 0.0
    """What a step takes before its first and after its last action (`Cluster.step_seconds`)."""

    @property
    def seconds(self) -> float:
        """The whole minibatch."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, computation first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        whole = self.seconds
        if not whole:
            return "a minibatch takes no time"
        shown = [
            f"{_NAMES.get(name, name)} {seconds_text(part)} ({part / whole:.1%})"
            for name, part in self.parts.items()
            if part >= _LEAST_SHARE * whole
        ]
        return f"{seconds_text(whole)} of a minibatch, in the mean of the ranks: {', '.join(shown)}"


def find_losses(plan: Plan, profile: Profile, cluster: Cluster, **options: Unpack[Options]) -> Losses:
    """Where the time of `plan` goes in the steady state; keywords and errors as for `evaluate`."""
    start, cluster = cluster.step_seconds, replace(cluster, step_seconds=0.0)
    silent = replace(
        profile, layers=tuple(replace(layer, cut_bytes=0.0, wire_bytes=None) for layer in profile.layers), crossings=()
    )
    free = cluster.with_costs(action_seconds=cluster.action_seconds)
    links: Any = free.links
    none = {"latency_seconds": ()} if isinstance(links, LinkLevels) else {"latency_rows": ()}
    prompt = replace(free, links=replace(links, **none))
    instant = replace(prompt, links=Cluster.uniform(cluster.devices, inf).links)
    hosted = evaluate(plan, silent, instant, **options)
    at_once = replace(instant, host_bandwidth=inf)
    alone = evaluate(plan, silent, at_once, **options) if plan.streamed else hosted
    computation = alone.minibatch_seconds * (1 - alone.bubble)
    busiest = alone.bottleneck_seconds * plan.microbatches
    # Many clusters have no costs of messages and no latencies: then one simulation is enough.
    known = {links: evaluate(plan, profile, links, **options).minibatch_seconds for links in {cluster, free, prompt}}
    whole, without_handling, without_latency = known[cluster], known[free], known[prompt]
    without_transfer = evaluate(plan, silent, prompt, **options).minibatch_seconds
    return Losses(
        computation=computation,
        bubble=alone.minibatch_seconds - busiest,
        imbalance=busiest - computation,
        host=hosted.minibatch_seconds - alone.minibatch_seconds,
        all_reduce=without_transfer - hosted.minibatch_seconds,
        transfer=without_latency - without_transfer,
        latency=without_handling - without_latency,
        handling=whole - without_handling,
        start=start,
    )
