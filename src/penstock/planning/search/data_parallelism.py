"""What training without a pipeline would take: data parallelism and fully sharded data parallelism, by formulas.

They are no plans, and nothing is simulated: two rows that show when not to use a pipeline. n devices share the
minibatch of M microbatches; each does k = ceil(M / n) of them, and the slowest device decides. With t_f and t_b the
seconds of a microbatch's forward and backward, u those of an update and s those of a step's start, W the bytes of the
weights, B the slowest bandwidth of a ring over all devices, L its largest latency, and o the optimizer's state in units
of the weights:

    data parallelism     (k - 1) (t_f + t_b) + t_f + max(t_b, 2 (n-1)/n W/B + 2 (n-1) L) + u + s
                         bytes: (2 + o) W + activations + workspace
    fully sharded        k (max(t_f, g) + max(t_b, 2 g)) + u/n + s,  g = (n-1)/n W/B + (n-1) L
                         bytes: (2 + o) W / n + 2 of the largest layers + activations + workspace

In data parallelism the ring [Patarasuk 2009] runs during the last backward [Li 2020]. Fully sharded, each device holds
a share of weights, gradients and optimizer state; for every microbatch the weights are gathered in the forward and
again in the backward, which also scatters the gradients, all during the computation [Rajbhandari 2020]. Two layers'
weights are whole at a time. Activations are those of one microbatch.
"""

from dataclasses import dataclass
from math import ceil, inf

from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text


@dataclass(frozen=True, slots=True)
class WithoutPipeline:
    """A way of training without stages, and what its formulas say."""

    name: str
    minibatch_seconds: float
    samples_per_second: float
    peak_bytes: float
    """Of every device."""
    fits: bool
    """Whether every device has so much memory."""

    def __str__(self) -> str:
        speed = f"{self.name} {self.samples_per_second:.4g} samples/s"
        return f"{speed}, peak {bytes_text(self.peak_bytes)}" + ("" if self.fits else " (does not fit)")


def without_pipelines(
    profile: Profile, cluster: Cluster, microbatches: int, optimizer_copies: float = OPTIMIZER_COPIES
) -> tuple[WithoutPipeline, ...]:
    """Data parallelism and fully sharded data parallelism on all devices of `cluster`."""
    devices = cluster.devices
    every = tuple(range(devices))
    times = [profile.times_on(kind) for kind in {cluster.class_of(rank) for rank in every}]
    forward = max(sum(time.forward_seconds) for time in times)
    backward = max(sum(time.backward_seconds) for time in times)
    bandwidth, latency = slowest_link(cluster, every, every)
    weights, frozen = profile.parameter_bytes, profile.frozen_bytes
    reduced, gathered = (
        (devices - 1) / devices * size / bandwidth + (devices - 1) * latency for size in (weights, weights + frozen)
    )
    rounds = ceil(microbatches / devices)
    activations = sum(layer.saved_bytes for layer in profile.layers)
    activations += max(layer.workspace_bytes for layer in profile.layers) + profile.library_bytes
    largest = sum(sorted(layer.parameter_bytes + layer.frozen_bytes for layer in profile.layers)[-2:])
    state = (2 + optimizer_copies) * weights + frozen
    updates = sum(layer.update_seconds for layer in profile.layers)
    memory = min((size for rank in every if (size := cluster.memory_of(rank)) is not None), default=inf)
    found = []
    for name, seconds, size in (
        (
            "data parallel",
            (rounds - 1) * (forward + backward) + forward + max(backward, 2 * reduced) + updates + cluster.step_seconds,
            state,
        ),
        (
            "fully sharded",
            rounds * (max(forward, gathered) + max(backward, gathered + reduced))
            + updates / devices
            + cluster.step_seconds,
            state if devices == 1 else state / devices + largest,
        ),
    ):
        samples = microbatches * profile.microbatch_size
        rate = samples / seconds if seconds else inf
        found.append(WithoutPipeline(name, seconds, rate, size + activations, size + activations <= memory))
    return tuple(found)
