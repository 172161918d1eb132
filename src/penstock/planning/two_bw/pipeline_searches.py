"""The planner of PipeDream-2BW, which tries all widths and depths of parallel pipelines.

Algorithm 1 of [Narayanan 2021, section 3.3.2] tries all d and p on at most as many devices as there are, with and
without recomputation. The highest throughput of all these wins. The printed algorithm has errors and gaps; ours differs
as follows:

  1. Throughput counts all d pipelines. d p need not be all devices, and g refers to the d p that are used.
  2. Each pipeline has m = p g microbatches, with the largest g for which d m is at most the requested microbatches; so
     m >= p, as 2bw requires. A flush also allows m < p: m = 1 is model parallelism without pipelining.
  3. Two kinds of stages are tried: equal numbers of blocks (layers before the blocks join stage 0, layers after them
     the last stage), and stages balanced by their times. An embedding or a head can make equal blocks a bad choice, and
     chains without repeated blocks have only the second kind.
  4. The printed SEARCH takes the largest microbatch that fits. Here a microbatch has the size of the profile, and
     `planning.search` asks for every size. Under gpipe memory also limits m.
  5. Memory includes gradients and the optimizer's state (`planning.memory`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from penstock.errors import PlanError
from penstock.planning.requests import Request
from penstock.planning.two_bw.block_chains import BlockChain, cut_positions, find_blocks, stage_counts
from penstock.planning.two_bw.orientations import CONSECUTIVE_RANKS, LinkTable, Orientation
from penstock.planning.two_bw.parallel_pipelines import PipelineCandidate, filling, slowest_stage
from penstock.scheduling.orders import GPIPE, ONE_F_ONE_B_FLUSH, TWO_BW
from penstock.values.clusters import Cluster
from penstock.values.profiles import Profile

_EFFORT = 1 << 14
"""The product of stages and positions to cut for which balancing takes seconds; its time grows with the square. A
longer chain without blocks is cut at fewer positions."""

PIPELINE_SCHEDULES = (TWO_BW, ONE_F_ONE_B_FLUSH, GPIPE)
"""The schedules that the closed form of parallel pipelines covers."""


def rank_pipelines(profile: Profile, cluster: Cluster, request: Request) -> tuple[PipelineCandidate, ...]:
    """All parallel pipelines that fit, best first; among equally fast ones the simpler (fewer devices, no
    recomputation).

    `request.microbatches` is the most microbatches of a minibatch, over all pipelines. `request.recompute` requires
    recomputation; without it both are tried. `request.stages` fixes p, and `request.straight` sets d = 1. Raises
    `PlanError` for other schedules than `PIPELINE_SCHEDULES`, and if nothing fits.
    """
    candidates = sorted(
        _PipelineSearch(cluster, request, _block_chains(profile, cluster, request)).candidates(), key=_order
    )
    if not candidates:
        raise PlanError(
            f"expected parallel pipelines under {request.schedule} of at most {request.microbatches} microbatches that "
            "fit in memory, found none: use more microbatches, or devices with more memory"
        )
    return tuple(candidates)


@dataclass(frozen=True, slots=True)
class _PipelineSearch:
    """Runs Algorithm 1 for one request."""

    cluster: Cluster
    request: Request
    chains: tuple[BlockChain, ...]
    """Without and with recomputation, as requested."""

    def __post_init__(self) -> None:
        schedule, stages = self.request.definition, self.request.stages
        if schedule not in PIPELINE_SCHEDULES:
            raise PlanError(
                f"schedule: expected one of {', '.join(map(str, PIPELINE_SCHEDULES))} for parallel pipelines, found "
                f"{schedule}: choose one of them, or the planner pipedream"
            )
        if self.request.allreduce == "released":
            raise PlanError(
                "allreduce: expected ring or shared for parallel pipelines, found released, which hides no all-reduce "
                "behind the compute: choose one of them, or the planner pipedream"
            )
        if stages is not None and stages > self.most_stages:
            raise PlanError(
                f"stages: expected at most {self.most_stages} ({self.cluster.devices} devices, {self.units} blocks and "
                f"single layers), found {stages}: use fewer stages or describe more devices"
            )

    @property
    def units(self) -> int:
        """The number of blocks and single layers."""
        return self.chains[0].units

    @property
    def most_stages(self) -> int:
        return min(self.cluster.devices, self.units)

    def candidates(self) -> Iterator[PipelineCandidate]:
        """The candidates for all p, d, recomputation and kinds of cuts."""
        links = LinkTable(self.cluster)
        fixed = self.request.stages
        for stages in range(1, self.most_stages + 1) if fixed is None else (fixed,):
            widest = 1 if self.request.straight else self.cluster.devices // stages
            for replicas in range(1, widest + 1):
                ways = CONSECUTIVE_RANKS if replicas > 1 and stages > 1 else CONSECUTIVE_RANKS[:1]
                orientations = [links.orient(replicas, stages, consecutive) for consecutive in ways]
                for chain in self.chains:
                    blocks, balanced = (self._fastest(chain, orientations, equal) for equal in (True, False))
                    if blocks is not None:
                        yield blocks
                    if balanced is not None and replace(balanced, equal_blocks=True) != blocks:
                        yield balanced

    def _fastest(self, chain: BlockChain, orientations: Sequence[Orientation], equal: bool) -> PipelineCandidate | None:
        """The candidate with as many microbatches as fit and the faster orientation (the first of equal ones), or None
        if nothing fits.
        """
        stages, replicas = orientations[0].ranks.shape
        blocks = chain.equal_cuts(stages)
        if blocks is None if equal else stages == 1:
            return None
        microbatches = self._most_microbatches(chain, replicas, stages, blocks if equal else None)
        if not microbatches:
            return None
        counts = stage_counts(self.request.schedule, microbatches, stages)
        options = []
        for orientation in orientations:
            allreduce = self.request.allreduce
            cuts = blocks if equal else chain.balanced_cuts(counts, orientation, microbatches, allreduce)
            if cuts is not None:
                time = slowest_stage(chain.costs, cuts, orientation, microbatches, allreduce)
                options.append((time, cuts, orientation))
        if not options:
            return None
        (seconds, limit), cuts, orientation = min(options, key=lambda option: option[0][0])
        samples = replicas * microbatches * chain.profile.microbatch_size
        total = (microbatches + filling(self.request.definition, stages)) * seconds
        return PipelineCandidate(
            schedule=self.request.schedule,
            replicas=replicas,
            cuts=chain.layers(cuts),
            equal_blocks=equal,
            microbatch_size=chain.profile.microbatch_size,
            microbatches=microbatches,
            recompute=chain.recompute,
            consecutive=orientation.consecutive,
            microbatch_seconds=seconds,
            samples_per_second=samples / total if total else inf,
            compute_seconds=float(chain.costs.seconds[0, -1]),
            stage_bytes=chain.stage_bytes(cuts, counts),
            limit=limit,
        )

    def _most_microbatches(self, chain: BlockChain, replicas: int, stages: int, cuts: tuple[int, ...] | None) -> int:
        """The largest m that request and memory allow with these cuts (None: with any cuts); 0 if there is none.

        m is a multiple of p, or less than p if the schedule flushes.
        """
        whole = self.request.microbatches // replicas
        accumulation = whole // stages

        def count(step: int) -> int:
            """The sequence 1, 2, ..., p - 1, p, 2 p, 3 p, ..."""
            return step if step < stages else stages * (step - stages + 1)

        def fits(step: int) -> bool:
            counts = stage_counts(self.request.schedule, count(step), stages)
            return chain.can_fit(counts) if cuts is None else chain.fits(cuts, counts)

        first = 1 if self.request.definition.flushes else stages
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
        candidate.devices,
        candidate.recompute,
        candidate.stages,
        not candidate.equal_blocks,
        -candidate.microbatch_size,
        -candidate.microbatches,
    )


def _block_chains(profile: Profile, cluster: Cluster, request: Request) -> tuple[BlockChain, ...]:
    depth = min(cluster.devices, len(profile)) if request.stages is None else request.stages
    recompute = (True,) if request.recompute else (False, True)
    return tuple(
        _block_chain(
            profile,
            cluster,
            depth,
            recompute=again,
            optimizer_copies=request.optimizer_copies,
            buffers=request.buffers,
        )
        for again in recompute
    )


@lru_cache(maxsize=8)
def _block_chain(
    profile: Profile, cluster: Cluster, depth: int, *, recompute: bool, optimizer_copies: float, buffers: int
) -> BlockChain:
    """Kept, since all schedules are planned with the same chains."""
    blocks = find_blocks(profile)
    return BlockChain(
        profile,
        blocks,
        cut_positions(profile, blocks, max(3 * depth, _EFFORT // depth)),
        recompute=recompute,
        optimizer_copies=optimizer_copies,
        cluster=cluster,
        buffers=buffers,
    )
