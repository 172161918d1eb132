"""The planner of PipeDream-2BW, which tries all widths and depths of parallel pipelines.

Algorithm 1 of [Narayanan 2021, section 3.3.2] takes, for all d and p on at most as many devices as there are, the
largest microbatch that fits (SEARCH), with and without recomputation. The highest throughput of all these wins. The
printed algorithm has errors and gaps; ours differs as follows:

  1. Throughput counts all d pipelines. d p need not be all devices, and g refers to the d p that are used.
  2. Each pipeline has m = p g microbatches, with the largest g for which d m b is at most the maximum safe batch; so
     m >= p, as 2bw requires. A flush also allows m < p: m = 1 is model parallelism without pipelining.
  3. Two kinds of stages are tried: equal numbers of blocks (layers before the blocks join stage 0, layers after them
     the last stage), and stages balanced by their times. An embedding or a head can make equal blocks a bad choice, and
     chains without repeated blocks have only the second kind.
  4. Under 2bw, which has no bubble, SEARCH takes the largest microbatch. Under a flush fewer, larger microbatches mean
     a larger bubble, so every size that fits is tried (`every_size`). Under gpipe memory also limits m.
  5. Memory includes gradients and the optimizer's state (`planning.memory`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from penstock.arguments import integer
from penstock.errors import PlanError
from penstock.planning.infeasibility import nothing_fits
from penstock.planning.memory import overfull_rank
from penstock.planning.requests import Request
from penstock.planning.two_bw.block_chains import BlockChain, StageCounts, stage_counts
from penstock.planning.two_bw.orientations import CONSECUTIVE_RANKS, LinkTable, Orientation
from penstock.planning.two_bw.parallel_pipelines import PipelineCandidate, filling, slowest_stage
from penstock.planning.two_bw.repeated_blocks import cut_positions, find_blocks
from penstock.scheduling.orders import GPIPE, ONE_F_ONE_B_FLUSH, TWO_BW
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["PIPELINE_SCHEDULES", "rank_pipelines", "simulated_cost"]

_Cost = Callable[[Plan, Profile, Cluster], Prediction]
"""A function that predicts the cost of a plan; the profile has the plan's microbatch size."""

_EFFORT = 1 << 14
"""The product of stages and positions to cut for which balancing takes seconds; its time grows with the square. A
longer chain without blocks is cut at fewer positions."""

PIPELINE_SCHEDULES = (TWO_BW, ONE_F_ONE_B_FLUSH, GPIPE)
"""The schedules that the closed form of parallel pipelines covers."""


def rank_pipelines(
    profiles: Profile | Sequence[Profile],
    cluster: Cluster,
    request: Request,
    *,
    batch_size: int | None = None,
    microbatch_sizes: Sequence[int] = (),
    every_size: bool | None = None,
    cost: _Cost | None = None,
    shortlist: int = 32,
) -> tuple[PipelineCandidate, ...]:
    """All parallel pipelines that fit, best first; among equally fast ones the simpler (fewer devices, no
    recomputation).

    `profiles`: one, or several of the same model at different microbatch sizes. Their sizes are tried, and those of
    `microbatch_sizes`, for which the nearest smaller profile is scaled. `batch_size`: the maximum safe global batch in
    samples; by default `request.microbatches` microbatches of the first profile. `request.recompute` requires
    recomputation; without it both are tried. `request.stages` fixes p, and `request.straight` sets d = 1.

    With `cost` (`simulated_cost`) the result is the best `shortlist` by the closed form that also fit by `cost`, ranked
    by `cost`. At most four times as many are tried.

    Raises `PlanError` for other schedules than `PIPELINE_SCHEDULES`, and if nothing fits; the error then names changes
    that would be enough.
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
        integer(1).check(name, count, PlanError)
    sized = _profiles_by_size(measured, microbatch_sizes)
    search = _PipelineSearch(cluster, request, batch, _block_chains(sized, cluster, request))
    every = request.definition.flushes if every_size is None else every_size
    candidates = sorted(search.candidates(every), key=_order)
    if not candidates:
        kind = f"parallel pipelines under {request.schedule}, of at most {batch} samples in a minibatch,"
        raise nothing_fits(kind, cluster, measured[0].parameter_bytes, search.sufficient_changes())
    if cost is None:
        return tuple(candidates)
    tried = candidates[: 4 * shortlist]
    predicted = (_predict(found, cost, sized[found.microbatch_size], cluster) for found in tried)
    fitting = sorted(islice(filter(None, predicted), shortlist), key=_order)
    if not fitting:
        raise PlanError(
            f"nothing fits: expected one of the best {len(tried)} candidates by the closed form, of {len(candidates)}, "
            "to fit by the given cost, found none. Use devices with more memory, a larger shortlist, or cost=None"
        )
    return tuple(fitting)


def simulated_cost(plan: Plan, profile: Profile, cluster: Cluster) -> Prediction:
    """The simulator's prediction, as a cost for `rank_pipelines`."""
    return evaluate(plan, profile, cluster).prediction()


@dataclass(frozen=True, slots=True)
class _PipelineSearch:
    """Runs Algorithm 1 for one request."""

    cluster: Cluster
    request: Request
    batch_size: int
    chains: tuple[tuple[BlockChain, ...], ...]
    """One row without and one with recomputation, as requested; each row has the largest microbatches first."""

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
        return self.chains[0][0].units

    @property
    def most_stages(self) -> int:
        """The most stages of a pipeline."""
        return min(self.cluster.devices, self.units)

    def candidates(self, every_size: bool) -> Iterator[PipelineCandidate]:
        """The candidates of the largest microbatch, or of every one, for all p, d, recomputation and kinds of cuts."""
        links = LinkTable(self.cluster)
        fixed = self.request.stages
        for stages in range(1, self.most_stages + 1) if fixed is None else (fixed,):
            widest = 1 if self.request.straight else self.cluster.devices // stages
            for replicas in range(1, widest + 1):
                ways = CONSECUTIVE_RANKS if replicas > 1 and stages > 1 else CONSECUTIVE_RANKS[:1]
                orientations = [links.orient(replicas, stages, consecutive) for consecutive in ways]
                for row in self.chains:
                    found: list[PipelineCandidate] = []
                    for equal in (True, False):
                        tried = (self._fastest(chain, orientations, equal) for chain in row)
                        fitting = (candidate for candidate in tried if candidate is not None)
                        for candidate in fitting if every_size else islice(fitting, 1):
                            if replace(candidate, equal_blocks=True) not in found:
                                found.append(candidate)
                    yield from found

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
            cuts = blocks if equal else self._balance(chain, orientation, microbatches, counts)
            if cuts is not None:
                time = slowest_stage(chain.costs, cuts, orientation, microbatches, self.request.allreduce)
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

    def _balance(
        self, chain: BlockChain, orientation: Orientation, microbatches: int, counts: StageCounts
    ) -> tuple[int, ...] | None:
        return chain.balanced_cuts(counts, orientation, microbatches, self.request.allreduce)

    def _most_microbatches(self, chain: BlockChain, replicas: int, stages: int, cuts: tuple[int, ...] | None) -> int:
        """The largest m that the batch and the memory allow with these cuts (None: with any cuts); 0 if there is none.

        m is a multiple of p, or less than p if the schedule flushes.
        """
        whole = self.batch_size // (replicas * chain.profile.microbatch_size)
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

    def sufficient_changes(self) -> Iterator[list[str]]:
        """The attempts for `nothing_fits`: the least memory, batch size or devices, with the other two unchanged."""
        least = self.cluster.least_memory_bytes
        memory = inf if least is None else least
        limits = {"memory": memory, "batch": self.batch_size, "devices": self.cluster.devices}
        fixed = self.request.stages
        found: dict[str, list[tuple[float, str]]] = {name: [] for name in limits}
        for stages in range(1, self.units + 1) if fixed is None else (fixed,):
            deep = 1 if self.request.definition.flushes else stages
            for chain in (chain for row in self.chains for chain in row):
                least = chain.least_bytes(stage_counts(self.request.schedule, deep, stages))
                needs = {"memory": least, "batch": deep * chain.profile.microbatch_size, "devices": stages}
                excess = [name for name in limits if needs[name] > limits[name]]
                if len(excess) == 1:
                    found[excess[0]].append((needs[excess[0]], _words(stages, chain)))
        for name, text in (("memory", "{} on each device"), ("batch", "batch_size={}"), ("devices", "{} devices")):
            if found[name]:
                least, words = min(found[name], key=lambda need: need[0])
                yield [f"{text.format(bytes_text(least) if name == 'memory' else least)} (for {words})"]


def _predict(candidate: PipelineCandidate, cost: _Cost, profile: Profile, cluster: Cluster) -> PipelineCandidate | None:
    """The candidate with its prediction by `cost`; None if it does not fit by that prediction."""
    found = cost(candidate.plan(cluster), profile, cluster)
    if overfull_rank(found.peak_bytes, cluster) is not None:
        return None
    return replace(candidate, samples_per_second=found.samples_per_second, limit=found.limit, predicted=found)


def _words(stages: int, chain: BlockChain) -> str:
    recompute = ", recompute" if chain.recompute else ""
    depth = "1 stage" if stages == 1 else f"{stages} stages"
    return f"{depth}, microbatches of {chain.profile.microbatch_size}{recompute}"


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
    """A profile for each size, the largest first, which is measured or scaled from the nearest smaller one."""
    known = {profile.microbatch_size: profile for profile in measured}
    sized = {}
    for size in sorted({*known, *microbatch_sizes}, reverse=True):
        # Small microbatches run less efficiently, so scaling a smaller profile up is pessimistic.
        source = max((each for each in known if each <= size), default=min(known))
        sized[size] = known[size] if size in known else known[source].scaled(size)
    return sized


def _block_chains(sized: dict[int, Profile], cluster: Cluster, request: Request) -> tuple[tuple[BlockChain, ...], ...]:
    # The times of the largest microbatches have the least noise.
    profile = next(iter(sized.values()))
    blocks = find_blocks(profile)
    depth = min(cluster.devices, len(profile)) if request.stages is None else request.stages
    positions = cut_positions(profile, blocks, max(3 * depth, _EFFORT // depth))
    return tuple(
        tuple(
            BlockChain(
                profile,
                blocks,
                positions,
                recompute=recompute,
                optimizer_copies=request.optimizer_copies,
                cluster=cluster,
                buffers=request.buffers,
            )
            for profile in sized.values()
        )
        for recompute in ((True,) if request.recompute else (False, True))
    )
