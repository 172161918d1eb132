"""The planner of PipeDream-2BW: all widths and depths of parallel pipelines, tried one by one.

Thesis, section 3.3.2, Algorithm 1: for all d and p with d p devices or fewer, the largest microbatch that fits
(SEARCH), with and without recomputation, and of all these the highest throughput. Where the printed algorithm goes
wrong or is silent, ours is:

  1. Throughput counts all d pipelines; d p need not be all devices, and g is of the d p that are used.
  2. m = p g microbatches per pipeline, with the largest g for which d m b is no more than the maximum safe batch; so
     m >= p, as 2bw demands. A flush also takes m < p: at m = 1 this is model parallelism without pipelining.
  3. Stages of equally many blocks (what lies before the blocks joins stage 0, what lies behind them the last) are tried
     beside stages that are balanced by their times: an embedding or a head can make equal blocks a bad choice, and
     chains without repeated blocks have only these.
  4. Under 2bw, which has no bubble, SEARCH takes the largest microbatch. Under a flush fewer, larger microbatches mean
     a larger bubble, and every size that fits is tried (`every_size`). Under gpipe memory limits m too.
  5. Memory counts gradients and the optimizer's state (`planning.memory`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from penstock.errors import PlanError
from penstock.planning.requests import Request
from penstock.planning.two_bw.block_chains import BlockChain, Counts, stage_counts
from penstock.planning.two_bw.orientations import TOGETHER, LinkTable, Orientation
from penstock.planning.two_bw.parallel_pipelines import Candidate, filling, slowest_stage
from penstock.planning.two_bw.repeated_blocks import find_blocks, places_to_cut
from penstock.scheduling.orders import DEFAULT_SCHEDULE, GPIPE, ONE_F_ONE_B_FLUSH, TWO_BW
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.documents import is_count, text_of
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["PIPELINE_SCHEDULES", "Cost", "plan_two_bw", "rank_pipelines", "simulated_cost"]

Cost = Callable[[Plan, Profile, Cluster], Prediction]
"""What a plan takes; the profile has the plan's microbatch size."""

_EFFORT = 1 << 14
"""Stages times places to cut for which seconds are enough; balancing takes the square of this product. A chain of more
layers, without blocks, may be cut in fewer places."""

PIPELINE_SCHEDULES = (TWO_BW, ONE_F_ONE_B_FLUSH, GPIPE)
"""The schedules that the closed form of parallel pipelines is for."""


def plan_two_bw(
    profiles: Profile | Sequence[Profile],
    cluster: Cluster,
    request: Request,
    *,
    batch_size: int | None = None,
    microbatch_sizes: Sequence[int] = (),
    every_size: bool | None = None,
    cost: Cost | None = None,
    shortlist: int = 32,
) -> Plan:
    """The parallel pipelines with the highest throughput, as `rank_pipelines` ranks them. Raises `PlanError`."""
    ranked = rank_pipelines(
        profiles,
        cluster,
        request,
        batch_size=batch_size,
        microbatch_sizes=microbatch_sizes,
        every_size=every_size,
        cost=cost,
        shortlist=shortlist,
    )
    return ranked[0].plan(cluster)


def rank_pipelines(
    profiles: Profile | Sequence[Profile],
    cluster: Cluster,
    request: Request,
    *,
    batch_size: int | None = None,
    microbatch_sizes: Sequence[int] = (),
    every_size: bool | None = None,
    cost: Cost | None = None,
    shortlist: int = 32,
) -> tuple[Candidate, ...]:
    """All parallel pipelines that fit, best first; of equally fast ones the simpler (fewer devices, no recomputation).

    `profiles`: one, or several of the same model at different microbatch sizes. Their sizes are tried, and those of
    `microbatch_sizes`, for which the nearest smaller profile is scaled. `batch_size` is the maximum safe global batch,
    samples; by default `request.microbatches` microbatches of the first profile. `request.recompute` asks for it; else
    both ways are tried. `request.stages` fixes p, `request.straight` one pipeline.

    With `cost` (`simulated_cost`), the best `shortlist` by the closed form that also fit by that cost are ranked by it,
    and only these are returned; it is asked of four times as many at most.

    `PlanError` for other schedules than 2bw, 1f1b-flush and gpipe, and if nothing fits: it says what would be needed.
    """
    measured = (profiles,) if isinstance(profiles, Profile) else tuple(profiles)
    _check_profiles(measured)
    batch = request.microbatches * measured[0].microbatch_size if batch_size is None else batch_size
    counts = [
        ("batch_size", batch),
        ("shortlist", shortlist),
        *(("microbatch_sizes", size) for size in microbatch_sizes),
    ]
    for name, count in counts:
        if not is_count(count, least=1):
            raise PlanError(f"{name}: expected a whole number, 1 or more, found {text_of(count)}: give one")
    sized = _profiles_by_size(measured, microbatch_sizes)
    search = _Search(cluster, request, batch, _block_chains(sized, cluster, request))
    every = request.definition.flushes if every_size is None else every_size
    candidates = sorted(search.candidates(every), key=_order)
    if not candidates:
        raise PlanError(search.needs())
    if cost is None:
        return tuple(candidates)
    asked = candidates[: 4 * shortlist]
    judged = (_judge(found, cost, sized[found.microbatch_size], cluster) for found in asked)
    fitting = sorted(islice(filter(None, judged), shortlist), key=_order)
    if not fitting:
        raise PlanError(
            f"nothing fits: of {len(candidates)} candidates that do by the closed form, the cost that was given finds "
            f"none of the best {len(asked)} to fit. Use devices with more memory, a larger shortlist, or cost=None"
        )
    return tuple(fitting)


def simulated_cost(plan: Plan, profile: Profile, cluster: Cluster) -> Prediction:
    """What the simulator says; a cost for `rank_pipelines`."""
    return evaluate(plan, profile, cluster).prediction()


@dataclass(frozen=True, slots=True)
class _Search:
    """Algorithm 1, for one question."""

    cluster: Cluster
    request: Request
    batch_size: int
    chains: tuple[tuple[BlockChain, ...], ...]
    """One row without and one with recomputation, as asked; in a row, the largest microbatches first."""

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
        """Blocks and single layers."""
        return self.chains[0][0].units

    @property
    def most_stages(self) -> int:
        """Of a pipeline."""
        return min(self.cluster.devices, self.units)

    def candidates(self, every_size: bool) -> Iterator[Candidate]:
        """For every p, d, recomputation and way to cut: that of the largest microbatch that fits, or of every one."""
        links = LinkTable(self.cluster)
        asked = self.request.stages
        for stages in range(1, self.most_stages + 1) if asked is None else (asked,):
            widest = 1 if self.request.straight else self.cluster.devices // stages
            for replicas in range(1, widest + 1):
                ways = TOGETHER if replicas > 1 and stages > 1 else TOGETHER[:1]
                orientations = [links.orient(replicas, stages, together) for together in ways]
                for row in self.chains:
                    found: list[Candidate] = []
                    for equal in (True, False):
                        tried = (self._fastest(chain, orientations, equal) for chain in row)
                        fitting = (candidate for candidate in tried if candidate is not None)
                        for candidate in fitting if every_size else islice(fitting, 1):
                            if replace(candidate, equal_blocks=True) not in found:
                                found.append(candidate)
                    yield from found

    def _fastest(self, chain: BlockChain, orientations: Sequence[Orientation], equal: bool) -> Candidate | None:
        """The better orientation, of equals the first, with as many microbatches as fit; None if nothing fits."""
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
            cuts = blocks if equal else self._balance(chain, orientation, microbatches, counts)
            if cuts is not None:
                time = slowest_stage(chain.costs, cuts, orientation, microbatches, self.request.allreduce)
                options.append((time, cuts, orientation))
        if not options:
            return None
        (seconds, limit), cuts, orientation = min(options, key=lambda option: option[0][0])
        samples = replicas * microbatches * chain.profile.microbatch_size
        total = (microbatches + filling(self.request.definition, stages)) * seconds
        return Candidate(
            schedule=self.request.schedule,
            replicas=replicas,
            cuts=chain.layers(cuts),
            equal_blocks=equal,
            microbatch_size=chain.profile.microbatch_size,
            microbatches=microbatches,
            recompute=chain.recompute,
            together=orientation.together,
            microbatch_seconds=seconds,
            samples_per_second=samples / total if total else inf,
            compute_seconds=float(chain.costs.seconds[0, -1]),
            stage_bytes=chain.stage_bytes(cuts, counts),
            limit=limit,
        )

    def _balance(
        self, chain: BlockChain, orientation: Orientation, microbatches: int, counts: Counts
    ) -> tuple[int, ...] | None:
        return chain.balanced_cuts(counts, orientation, microbatches, self.request.allreduce)

    def _most_microbatches(self, chain: BlockChain, replicas: int, stages: int, cuts: tuple[int, ...] | None) -> int:
        """The largest m that the batch and the memory allow, with these cuts or, if None, with any; 0 if there is none.

        m is a multiple of p, or less than p where the schedule flushes.
        """
        whole = self.batch_size // (replicas * chain.profile.microbatch_size)
        accumulation = whole // stages

        def count(step: int) -> int:
            """1, 2, ..., p - 1, p, 2 p, 3 p, ..."""
            return step if step < stages else stages * (step - stages + 1)

        def fits(step: int) -> bool:
            counts = stage_counts(self.request.schedule, count(step), stages)
            return chain.can_fit(counts) if cuts is None else chain.fits(cuts, counts)

        first = 1 if self.request.definition.flushes else stages
        last = stages - 1 + accumulation if accumulation else min(whole, stages - 1)
        if last < first or not fits(first):
            return 0
        # More microbatches never need less memory: the last step that fits, by halving.
        if fits(last):
            return count(last)
        return count(first + bisect_left(range(first, last), True, key=lambda step: not fits(step)) - 1)

    def needs(self) -> str:
        """Why nothing fits, and what would be needed."""
        memory = inf if self.cluster.memory_bytes is None else self.cluster.memory_bytes
        asked = self.request.stages
        chains = [chain for row in self.chains for chain in row]
        needs = []
        for stages in range(1, self.units + 1) if asked is None else (asked,):
            deep = 1 if self.request.definition.flushes else stages
            for chain in chains:
                least = chain.least_bytes(stage_counts(self.request.schedule, deep, stages))
                needs.append((least, stages, deep * chain.profile.microbatch_size, chain))
        here = [need for need in needs if need[1] <= self.cluster.devices]
        devices = "1 device" if self.cluster.devices == 1 else f"{self.cluster.devices} devices"
        size = "" if memory == inf else f" of {bytes_text(memory)}"
        text = (
            f"nothing fits: expected parallel pipelines under {self.request.schedule} on {devices}{size} with at most "
            f"{self.batch_size} samples in a minibatch, found none. "
        )
        roomy = [need for need in here if need[0] <= memory]
        if roomy:
            _, stages, batch, chain = min(roomy, key=lambda need: (need[2], need[1]))
            text += (
                f"What fits in memory needs batch_size={batch} or more ({_words(stages, chain)}). Allow that, or try "
            )
            flush = "" if self.request.definition.flushes or stages == 1 else f" or the schedule {DEFAULT_SCHEDULE}"
            return f"{text}smaller microbatches (microbatch_sizes){flush}"
        least, stages, batch, chain = min(here, key=lambda need: need[0])
        text += f"The least that a device needs is {bytes_text(least)} ({_words(stages, chain)}, batch_size={batch}). "
        deeper = [need for need in needs if need[0] <= memory]
        if deeper:
            _, stages, batch, chain = min(deeper, key=lambda need: (need[1], need[2]))
            text += f"{stages} devices would do ({_words(stages, chain)}, batch_size={batch}). "
        return text + "Use devices with more memory, more devices, or smaller microbatches (microbatch_sizes)"


def _judge(candidate: Candidate, cost: Cost, profile: Profile, cluster: Cluster) -> Candidate | None:
    """The candidate with what `cost` says of it; None if by that it does not fit."""
    found = cost(candidate.plan(cluster), profile, cluster)
    if cluster.memory_bytes is not None and max(found.peak_bytes) > cluster.memory_bytes:
        return None
    return replace(candidate, samples_per_second=found.samples_per_second, limit=found.limit, predicted=found)


def _words(stages: int, chain: BlockChain) -> str:
    recompute = ", recompute" if chain.recompute else ""
    depth = "1 stage" if stages == 1 else f"{stages} stages"
    return f"{depth}, microbatches of {chain.profile.microbatch_size}{recompute}"


def _order(candidate: Candidate) -> tuple[float | int, ...]:
    """Fastest first. Twelve digits, so that rounding does not decide between equals, but the simpler one wins."""
    return (
        -float(f"{candidate.samples_per_second:.12g}"),
        candidate.devices,
        candidate.recompute,
        candidate.stages,
        not candidate.equal_blocks,
        -candidate.microbatch_size,
        -candidate.microbatches,
    )


def _check_profiles(profiles: tuple[Profile, ...]) -> None:
    if not profiles:
        raise PlanError("profiles: expected one profile or more, found none: measure one")
    first = profiles[0]
    weights = [layer.parameter_bytes for layer in first.layers]
    for index, profile in enumerate(profiles):
        if [layer.parameter_bytes for layer in profile.layers] != weights:
            raise PlanError(
                f"profiles[{index}]: expected {len(first)} layers with the same weights as in profiles[0], found "
                f"{len(profile)} layers with {profile.parameter_bytes / 1e9:.4g} GB: give profiles of one model"
            )
        if profile.microbatch_size in [other.microbatch_size for other in profiles[:index]]:
            raise PlanError(
                f"profiles[{index}]: expected another microbatch size than before, found {profile.microbatch_size} "
                "again: give one profile per size"
            )


def _profiles_by_size(measured: tuple[Profile, ...], microbatch_sizes: Sequence[int]) -> dict[int, Profile]:
    """A profile for each size, the largest first: measured, or scaled from the nearest smaller one."""
    known = {profile.microbatch_size: profile for profile in measured}
    sized = {}
    for size in sorted({*known, *microbatch_sizes}, reverse=True):
        # Small microbatches run less efficiently: a smaller profile promises too little rather than too much.
        source = max((each for each in known if each <= size), default=min(known))
        sized[size] = known[size] if size in known else known[source].scaled(size)
    return sized


def _block_chains(sized: dict[int, Profile], cluster: Cluster, request: Request) -> tuple[tuple[BlockChain, ...], ...]:
    # The largest microbatches are measured with the least noise.
    profile = next(iter(sized.values()))
    blocks = find_blocks(profile)
    depth = min(cluster.devices, len(profile)) if request.stages is None else request.stages
    places = places_to_cut(profile, blocks, max(3 * depth, _EFFORT // depth))
    return tuple(
        tuple(
            BlockChain(
                profile,
                blocks,
                places,
                recompute=recompute,
                optimizer_copies=request.optimizer_copies,
                memory_bytes=cluster.memory_bytes,
                buffers=request.buffers,
            )
            for profile in sized.values()
        )
        for recompute in ((True,) if request.recompute else (False, True))
    )
