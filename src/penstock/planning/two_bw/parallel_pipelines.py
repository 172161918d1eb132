"""Parallel pipelines: d equal pipelines of p stages, and their time by a closed form.

[Narayanan 2021, section 3.3.3]. With m microbatches of b samples in each pipeline per minibatch, a pipeline takes one
every

    t = max over stages i of max( compute_i + sum over its cuts of 2 |activations| / B_in-pipeline , reduce_i / m )

    minibatch_seconds = (m + filling) t           filling: p - 1 under a flush, 0 under 2bw
    samples_per_second = d m b / minibatch_seconds

What crosses a cut is added to the compute time of both of its stages (no overlap), the all-reduce of the replicas is
hidden behind the microbatches of a minibatch (max). We add three things to the text: the factor d of the throughput,
without which the deepest pipeline always wins; the filling of a flush; latencies. With recomputation a stage computes
its measured forward once more; where a backward takes two forwards this is the factor of 4/3 in the text.

Not every runtime overlaps as in the text: the simulator, which can be used instead of this form, hides messages behind
computation, exposes the all-reduce where nothing hides it, and recomputes nothing on the last stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.planning.stage_costs import AllReduce, ChainCosts
from penstock.planning.two_bw.orientations import ConsecutiveRanks, LinkTable, Orientation
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.simulating.action_costs import reduce_rounds
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, Stage, require_schedule


@dataclass(frozen=True, slots=True)
class PipelineCandidate:
    """Holds one configuration of parallel pipelines, and its costs."""

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
    """``m``: the microbatches of one minibatch in ONE pipeline."""
    recompute: bool
    consecutive: ConsecutiveRanks
    microbatch_seconds: float
    """``t``: the time between two microbatches of a pipeline."""
    samples_per_second: float
    """The throughput of all pipelines."""
    compute_seconds: float
    """The time of one microbatch in all stages, with recomputation."""
    stage_bytes: tuple[float, ...]
    """The peak of each rank of each stage."""
    limit: str
    """The limit of the speed, in words."""

    @property
    def stages(self) -> int:
        """``p``."""
        return len(self.cuts) - 1

    @property
    def devices(self) -> int:
        """``d p``, which may be fewer than the cluster has."""
        return self.replicas * self.stages

    @property
    def batch_size(self) -> int:
        """The samples of a minibatch, ``d m b``."""
        return self.replicas * self.microbatches * self.microbatch_size

    @property
    def minibatch_seconds(self) -> float:
        """The time of a minibatch in the steady state."""
        return self.batch_size / self.samples_per_second

    @property
    def bubble(self) -> float:
        """Idle share of wall time, including the time that a stage waits for slower stages or links."""
        present = self.stages * self.minibatch_seconds
        return max(0.0, 1 - self.microbatches * self.compute_seconds / present) if present else 0.0

    def plan(self, cluster: Cluster) -> Plan:
        """This candidate as a plan, with its prediction."""
        ranks = LinkTable(cluster).orient(self.replicas, self.stages, self.consecutive).ranks.tolist()
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
            predicted=predicted,
        )


def filling(schedule: ScheduleDefinition | str, stages: int) -> int:
    """How many microbatches' time a minibatch under `schedule` takes to fill and drain `stages` stages."""
    return stages - 1 if require_schedule(schedule).flushes else 0


def slowest_stage(
    costs: ChainCosts, cuts: Sequence[int], orientation: Orientation, microbatches: int, allreduce: AllReduce
) -> tuple[float, str]:
    """(``t`` in seconds, what limits it) of pipelines whose stages have the layers between `cuts`."""
    replicas = orientation.ranks.shape[1]
    starts, stops = np.array(cuts[:-1]), np.array(cuts[1:])
    if costs.rank_seconds:
        own = zip(orientation.ranks.tolist(), starts, stops, strict=True)
        compute = np.array([costs.seconds_on(ranks)[start, stop] for ranks, start, stop in own])
    else:
        compute = costs.seconds[starts, stops]
    hops = costs.exchanged_bytes[starts[1:], None] * orientation.hop_seconds_per_byte + orientation.hop_latency_seconds
    # The slowest replica decides, and the slowest link of a ring.
    hops = hops.max(axis=1, initial=0.0)
    sent = np.concatenate([[0.0], hops])
    passed = np.concatenate([hops, [0.0]])
    work = compute + sent + passed
    reduced = reduce_rounds(replicas, shared=allreduce == "shared") * costs.parameter_bytes[starts, stops]
    rings = reduced[:, None] * orientation.ring_seconds_per_byte
    rings = rings + 2 * (replicas - 1) * orientation.ring_latency_seconds
    reduced = rings.max(axis=1) / microbatches

    times = np.maximum(work, reduced)
    slowest = int(times.argmax())
    return float(times[slowest]), _limit(slowest, compute, sent, passed, reduced)


def _limit(stage: int, *seconds: npt.NDArray[np.float64]) -> str:
    compute, sent, passed, reduced = (float(kind[stage]) for kind in seconds)
    if reduced > compute + sent + passed:
        return f"all-reduce of stage {stage}"
    if compute >= sent + passed:
        return f"stage {stage}"
    low = stage - 1 if sent >= passed else stage
    return f"link between stages {low} and {low + 1}"
