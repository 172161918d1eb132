"""The planner of PipeDream-2BW, which tries all widths and depths of parallel pipelines: d equal ones of p stages.

Algorithm 1 of [Narayanan 2021, section 3.3.2] tries all d and p on at most as many devices as there are. The highest
throughput of all these wins. The printed algorithm has errors and gaps; ours differs as follows:

  1. Throughput counts all d pipelines. d p need not be all devices, and g refers to the d p that are used.
  2. Each pipeline has m = p g microbatches, with the largest g for which d m is at most the requested microbatches; so
     m >= p, as 2bw requires. A flush also allows m < p: m = 1 is model parallelism without pipelining.
  3. Stages are balanced by their times. The text gives each equally many repeated blocks, which is as fast only where
     no embedding and no head makes a stage longer.
  4. The printed SEARCH takes the largest microbatch that fits, and tries recomputation, too. Here a microbatch has the
     size of the profile, and `planning.search` asks for every size, with and without recomputation. Under gpipe memory
     also limits m.
  5. Memory includes gradients and the optimizer's state (`planning.memory`).

The time is a closed form [section 3.3.3]. With m microbatches of b samples in each pipeline per minibatch, a pipeline
takes one every

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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.planning.requests import Request
from penstock.planning.stage_costs import AllReduce, ChainCosts
from penstock.planning.two_bw.orientations import CONSECUTIVE_RANKS, LinkTable, Orientation
from penstock.planning.two_bw.pipeline_chains import PipelineChain, StageCounts, cut_positions, stage_counts
from penstock.scheduling.orders import GPIPE, ONE_F_ONE_B_FLUSH, TWO_BW
from penstock.simulating.action_costs import reduce_rounds
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, Stage
from penstock.values.profiles import Profile

_EFFORT = 1 << 14
"""The product of stages and positions to cut for which balancing takes seconds; its time grows with the square. A
longer chain is cut at fewer positions."""

PIPELINE_SCHEDULES = (TWO_BW, ONE_F_ONE_B_FLUSH, GPIPE)
"""The schedules that the closed form of parallel pipelines covers."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineCandidate:
    """Holds one configuration of parallel pipelines, and its costs."""

    request: Request
    chain: PipelineChain
    orientation: Orientation
    counts: StageCounts
    positions: tuple[int, ...]
    """The cuts, counted in positions of the chain."""
    microbatches: int
    """``m``: the microbatches of one minibatch in ONE pipeline."""
    microbatch_seconds: float
    """``t``: the time between two microbatches of a pipeline."""
    limit: str
    """The limit of the speed, in words."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Stage s holds layers ``[cuts[s], cuts[s + 1])``."""
        return self.chain.layers(self.positions)

    @property
    def stages(self) -> int:
        """``p``."""
        return len(self.positions) - 1

    @property
    def replicas(self) -> int:
        """``d``: pipelines, and so replicas of every stage."""
        return len(self.orientation.ranks[0])

    @property
    def recompute(self) -> bool:
        """Whether every forward runs twice."""
        return self.chain.recompute

    @property
    def minibatch_seconds(self) -> float:
        """The time of a minibatch in the steady state."""
        filling = self.stages - 1 if self.request.definition.flushes else 0
        return (self.microbatches + filling) * self.microbatch_seconds

    @property
    def samples_per_second(self) -> float:
        """The throughput of all pipelines."""
        samples = self.replicas * self.microbatches * self.chain.profile.microbatch_size
        return samples / self.minibatch_seconds if self.minibatch_seconds else inf

    def plan(self) -> Plan:
        """This candidate as a plan, with its prediction."""
        ranks = self.orientation.ranks.tolist()
        stages = tuple(Stage(*cut, tuple(own)) for cut, own in zip(pairwise(self.cuts), ranks, strict=True))
        stage_bytes = self.chain.stage_bytes(self.positions, self.counts)
        peaks = {rank: peak for own, peak in zip(ranks, stage_bytes, strict=True) for rank in own}
        busy, present = self.microbatches * float(self.chain.costs.seconds[0, -1]), self.stages * self.minibatch_seconds
        predicted = Prediction(
            minibatch_seconds=self.minibatch_seconds,
            samples_per_second=self.samples_per_second,
            bottleneck_seconds=self.microbatch_seconds / self.replicas,
            peak_bytes=tuple(peaks[rank] for rank in sorted(peaks)),
            bubble=max(0.0, 1 - busy / present) if present else 0.0,
            limit=self.limit,
        )
        return Plan(
            stages,
            self.request.schedule,
            self.replicas * self.microbatches,
            self.chain.profile.microbatch_size,
            recompute=self.recompute,
            predicted=predicted,
        )


def rank_pipelines(profile: Profile, cluster: Cluster, request: Request) -> tuple[PipelineCandidate, ...]:
    """All parallel pipelines that fit, best first; of equally fast ones first the one on fewer devices.

    `request.microbatches` is the most microbatches of a minibatch, over all pipelines. `request.stages` fixes p, and
    `request.straight` sets d = 1. Raises `PlanError` for schedules other than `PIPELINE_SCHEDULES`, or if nothing fits.
    """
    if request.definition not in PIPELINE_SCHEDULES:
        raise PlanError(
            f"schedule: expected one of {', '.join(map(str, PIPELINE_SCHEDULES))} for parallel pipelines, found "
            f"{request.schedule}: choose one of them, or the planner pipedream"
        )
    if request.allreduce == "released":
        raise PlanError(
            "allreduce: expected ring or shared for parallel pipelines, found released, which hides no all-reduce "
            "behind the compute: choose one of them, or the planner pipedream"
        )
    depth = min(cluster.devices, len(profile)) if request.stages is None else request.stages
    chain = _chain(
        profile,
        cluster,
        depth,
        recompute=request.recompute,
        optimizer_copies=request.optimizer_copies,
        shard_optimizer=request.shard_optimizer,
        buffers=request.buffers,
    )
    most = min(cluster.devices, chain.units)
    if request.stages is not None and request.stages > most:
        raise PlanError(
            f"stages: expected at most {most} ({cluster.devices} devices, {chain.units} layers or runs of layers), "
            f"found {request.stages}: use fewer stages or describe more devices"
        )
    links = LinkTable(cluster)
    candidates: list[PipelineCandidate] = []
    for stages in range(1, most + 1) if request.stages is None else (request.stages,):
        widest = 1 if request.straight else cluster.devices // stages
        for replicas in range(1, widest + 1):
            ways = CONSECUTIVE_RANKS if replicas > 1 and stages > 1 else CONSECUTIVE_RANKS[:1]
            orientations = [links.orient(replicas, stages, consecutive) for consecutive in ways]
            found = _fastest(chain, orientations, request)
            candidates += [] if found is None else [found]
    if not candidates:
        raise PlanError(
            f"expected parallel pipelines under {request.schedule} of at most {request.microbatches} microbatches that "
            "fit in memory, found none: use more microbatches, or devices with more memory"
        )
    return tuple(sorted(candidates, key=_order))


def _fastest(chain: PipelineChain, orientations: Sequence[Orientation], request: Request) -> PipelineCandidate | None:
    """The candidate with as many microbatches as fit and the faster orientation (the first of equal ones), or None
    if nothing fits.
    """
    stages, replicas = orientations[0].ranks.shape
    microbatches = _most_microbatches(chain, replicas, stages, request)
    if not microbatches:
        return None
    counts = stage_counts(request.schedule, microbatches, stages)
    options = []
    for orientation in orientations:
        cuts = chain.balanced_cuts(counts, orientation, microbatches, request.allreduce)
        if cuts is not None:
            seconds, limit = slowest_stage(chain.costs, cuts, orientation, microbatches, request.allreduce)
            options.append(
                PipelineCandidate(
                    request=request,
                    chain=chain,
                    orientation=orientation,
                    counts=counts,
                    positions=cuts,
                    microbatches=microbatches,
                    microbatch_seconds=seconds,
                    limit=limit,
                )
            )
    return min(options, key=lambda option: option.microbatch_seconds, default=None)


def _most_microbatches(chain: PipelineChain, replicas: int, stages: int, request: Request) -> int:
    """The largest m that request and memory allow; 0 if there is none.

    m is a multiple of p, or less than p if the schedule flushes.
    """
    whole = request.microbatches // replicas
    accumulation = whole // stages

    def count(step: int) -> int:
        """The sequence 1, 2, ..., p - 1, p, 2 p, 3 p, ..."""
        return step if step < stages else stages * (step - stages + 1)

    def fits(step: int) -> bool:
        return chain.can_fit(stage_counts(request.schedule, count(step), stages))

    first = 1 if request.definition.flushes else stages
    last = stages - 1 + accumulation if accumulation else min(whole, stages - 1)
    if last < first or not fits(first):
        return 0
    # More microbatches never need less memory, so we bisect for the last step that fits.
    if fits(last):
        return count(last)
    return count(first + bisect_left(range(first, last), True, key=lambda step: not fits(step)) - 1)


def _order(candidate: PipelineCandidate) -> tuple[float | int, ...]:
    """A key that sorts the fastest first. It has twelve digits, so that rounding does not decide between equals."""
    return (
        -float(f"{candidate.samples_per_second:.12g}"),
        candidate.replicas * candidate.stages,
        candidate.stages,
        -candidate.microbatches,
    )


@lru_cache(maxsize=8)
def _chain(
    profile: Profile,
    cluster: Cluster,
    depth: int,
    *,
    recompute: bool,
    optimizer_copies: float,
    shard_optimizer: bool,
    buffers: int,
) -> PipelineChain:
    """Kept, since all schedules are planned with the same chains."""
    return PipelineChain(
        profile,
        cut_positions(profile, max(3 * depth, _EFFORT // depth)),
        recompute=recompute,
        optimizer_copies=optimizer_copies,
        shard_optimizer=shard_optimizer,
        cluster=cluster,
        buffers=buffers,
    )


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
