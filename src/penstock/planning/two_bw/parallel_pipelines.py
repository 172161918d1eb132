"""Parallel pipelines: d equal pipelines of p stages, and what they take by the closed form of the thesis.

Thesis, section 3.3.3. With m microbatches of b samples in each pipeline per minibatch, a pipeline takes one every

    t = max over stages i of max( compute_i + sum over its cuts of 2 |activations| / B_in-pipeline , reduce_i / m )

    minibatch_seconds = (m + filling) t           filling: p - 1 under a flush, 0 under 2bw
    samples_per_second = d m b / minibatch_seconds

What crosses a cut is added to the compute time of both of its stages (no overlap), the all-reduce of the replicas is
hidden behind the microbatches of a minibatch (max). Three things that the text leaves out or prints otherwise: the
factor d of the throughput, without which the deepest pipeline always wins; the filling of a flush; latencies. With
recomputation a stage computes its measured forward once more; where a backward takes two forwards this is the thesis's
factor of 4/3.

The text's overlap is not what every runtime does: the simulator, asked instead of this form, hides messages behind
computation, shows what of an all-reduce nothing hides, and lets a last stage that never recomputes do without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.planning.costs import AllReduce, ChainCosts
from penstock.planning.two_bw.orientations import LinkTable, Orientation, Together
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, Stage, require_schedule

__all__ = ["Candidate", "filling", "reduce_rounds", "slowest_stage"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train with parallel pipelines, and what it takes."""

    schedule: ScheduleDefinition | str
    replicas: int
    """``d``: pipelines, and so replicas of every stage."""
    cuts: tuple[int, ...]
    """Stage s holds layers ``[cuts[s], cuts[s + 1])``."""
    equal_blocks: bool
    """Whether every stage has equally many repeated blocks; else the stages are balanced by their times."""
    microbatch_size: int
    """``b``, samples."""
    microbatches: int
    """``m``: of one minibatch in ONE pipeline."""
    recompute: bool
    together: Together
    """What is on consecutive ranks."""
    microbatch_seconds: float
    """``t``: each pipeline takes one more microbatch every so often."""
    samples_per_second: float
    """Of all pipelines; by the closed form, or by what was asked instead of it."""
    compute_seconds: float
    """Of one microbatch in all stages, with recomputation."""
    stage_bytes: tuple[float, ...]
    """The peak of each rank of each stage."""
    limit: str
    """What keeps the pipelines from being faster."""
    predicted: Prediction | None = None
    """What was asked instead of the closed form."""

    @property
    def stages(self) -> int:
        """``p``."""
        return len(self.cuts) - 1

    @property
    def devices(self) -> int:
        """``d p``: may be fewer than the cluster has."""
        return self.replicas * self.stages

    @property
    def gradient_accumulation(self) -> int:
        """``g = m / p``; 0 if there are fewer microbatches than stages."""
        return self.microbatches // self.stages

    @property
    def batch_size(self) -> int:
        """Samples in a minibatch, ``d m b``."""
        return self.replicas * self.microbatches * self.microbatch_size

    @property
    def minibatch_seconds(self) -> float:
        """Of a minibatch in the steady state."""
        return self.batch_size / self.samples_per_second

    @property
    def bubble(self) -> float:
        """Idle share of wall time; waiting for a slower stage or a link is idle too."""
        present = self.stages * self.minibatch_seconds
        return max(0.0, 1 - self.microbatches * self.compute_seconds / present) if present else 0.0

    def plan(self, cluster: Cluster) -> Plan:
        """This candidate as a plan, with its prediction."""
        ranks = LinkTable(cluster).orient(self.replicas, self.stages, self.together).ranks.tolist()
        stages = tuple(Stage(*cut, tuple(own)) for cut, own in zip(pairwise(self.cuts), ranks, strict=True))
        peaks = {rank: peak for own, peak in zip(ranks, self.stage_bytes, strict=True) for rank in own}
        predicted = Prediction(
            minibatch_seconds=self.minibatch_seconds,
            samples_per_second=self.samples_per_second,
            bottleneck_seconds=self.microbatch_seconds / self.replicas,
            peak_bytes=tuple(peaks[rank] for rank in range(self.devices)),
            bubble=self.bubble,
            limit=self.limit,
        )
        return Plan(
            stages,
            self.schedule,
            self.replicas * self.microbatches,
            self.microbatch_size,
            recompute=self.recompute,
            predicted=self.predicted or predicted,
        )


def filling(schedule: ScheduleDefinition | str, stages: int) -> int:
    """How many microbatches' time a minibatch of `schedule` spends on filling and draining `stages` stages."""
    return stages - 1 if require_schedule(schedule).flushes else 0


def reduce_rounds(replicas: int, allreduce: AllReduce) -> float:
    """How many times the weights of a stage pass over one link while its `replicas` gradients are summed."""
    return 2.0 * (replicas - 1) if allreduce == "shared" else 2 * (replicas - 1) / replicas


def slowest_stage(
    costs: ChainCosts, cuts: Sequence[int], orientation: Orientation, microbatches: int, allreduce: AllReduce
) -> tuple[float, str]:
    """(``t`` in seconds, what limits it) of pipelines whose stages have the layers between `cuts`."""
    replicas = orientation.ranks.shape[1]
    starts, stops = np.array(cuts[:-1]), np.array(cuts[1:])
    compute = costs.seconds[starts, stops]
    hops = costs.exchanged_bytes[starts[1:], None] * orientation.hop_seconds_per_byte + orientation.hop_latency_seconds
    # The slowest replica decides, and the slowest link of a ring.
    hops = hops.max(axis=1, initial=0.0)
    sent = np.concatenate([[0.0], hops])
    passed = np.concatenate([hops, [0.0]])
    work = compute + sent + passed
    reduced = reduce_rounds(replicas, allreduce) * costs.parameter_bytes[starts, stops]
    rings = reduced[:, None] * orientation.ring_seconds_per_byte
    rings = rings + 2 * (replicas - 1) * orientation.ring_latency_seconds
    reduced = rings.max(axis=1) / microbatches

    times = np.maximum(work, reduced)
    slowest = int(times.argmax())
    return float(times[slowest]), _limit(slowest, compute, sent, passed, reduced)


def _limit(stage: int, *parts: npt.NDArray[np.float64]) -> str:
    compute, sent, passed, reduced = (float(part[stage]) for part in parts)
    if reduced > compute + sent + passed:
        return f"all-reduce of stage {stage}"
    if compute >= sent + passed:
        return f"stage {stage}"
    low = stage - 1 if sent >= passed else stage
    return f"link between stages {low} and {low + 1}"
