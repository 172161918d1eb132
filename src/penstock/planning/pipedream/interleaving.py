"""Cuts a chain for ranks that hold several stages each: minimizes the time of the slowest rank, not of a stage.

Under interleaving rank q of p holds the stages q, p + q, 2p + q, ..., and under `zb-v` q and 2p - 1 - q. A rank takes
the sum of their times, so a long stage can be combined with a short one. The recurrence cannot express such sums, which
couple distant stages. If there are few ways to cut, all are tried. Otherwise a local search moves a single cut, or
several adjacent cuts by one layer, as long as that makes the slowest rank or link faster, or the ranks more equal. It
starts from stages of equal work, of equal length, of equal weights, and from those with the fastest slowest stage, and
takes the best result. This is a heuristic that usually finds the optimum. Tests require at most 1.25 times the optimum
on random chains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from math import comb

import numpy as np
import numpy.typing as npt

from penstock.planning.memory import OPTIMIZER_COPIES, kept_bytes
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix
from penstock.values.chain_cuts import cut_evenly, least_bottleneck

_TRY_ALL = 20_000
"""Up to this many ways to cut are all tried, which takes well below a second."""

_MINOR = 1e-6
"""The weight of the stages' squared seconds relative to the ranks'. Equal stages fill and drain faster."""


@dataclass(frozen=True, slots=True)
class _InterleavedCuts:
    """Holds the cuts (stage s has layers ``[cuts[s], cuts[s + 1])``) and their costs."""

    cuts: tuple[int, ...]
    seconds: float
    """The time of the slowest rank or link."""
    worst_bytes: float
    """The bytes of the rank that needs most."""


def cut_interleaved(
    costs: ChainCosts,
    exchange: Sequence[Matrix],
    in_flight: tuple[Sequence[int], Sequence[int]],
    size_bytes: float,
    optimizer_copies: float = OPTIMIZER_COPIES,
    *,
    stage_ranks: Sequence[int] = (),
    try_all: int = _TRY_ALL,
) -> _InterleavedCuts:
    """The best cuts found that need no more than `size_bytes` on a rank; if there are none, those that need least.

    ``exchange[s]`` (N+1,): the seconds of the cut after stage s, at each position; the last stage has none.
    `in_flight`: the most microbatches in flight on each rank, summed over its stages, and on each stage.
    ``stage_ranks[s]``: the rank of stage s; s mod p if they are left out. `try_all`: if there are at most this many
    ways to cut, all are tried.
    """
    sent = np.array([*exchange, np.zeros(costs.layers + 1)])
    stage_ranks = stage_ranks or [stage % len(in_flight[0]) for stage in range(len(sent))]
    problem = _CutProblem(
        costs,
        exchange=sent,
        of_ranks=np.array(in_flight[0]),
        of_stages=np.array(in_flight[1]),
        size_bytes=size_bytes,
        optimizer_copies=optimizer_copies,
        held=_stages_of_ranks(stage_ranks),
        joined=_cuts_of_links(stage_ranks),
    )
    if comb(costs.layers - 1, len(exchange)) <= try_all:
        ways = list(combinations(range(1, costs.layers), len(exchange)))
        inner = np.array(ways, dtype=np.int64).reshape(len(ways), len(exchange))
        best = problem.best(np.hstack([np.zeros((len(ways), 1), dtype=np.int64), inner]), costs.layers)
    else:
        starts = [*_simple_starts(problem), _fastest_stages(problem)]
        ends = [_improve(problem, start, costs.layers) for start in starts]
        best = problem.best(np.array([end[:-1] for end in ends]), costs.layers)
    seconds, worst = problem.evaluate(best[None])[0], problem.worst_bytes(best[None])
    return _InterleavedCuts(tuple(int(cut) for cut in best), float(seconds[0]), float(worst[0]))


@dataclass(frozen=True, slots=True, eq=False)
class _CutProblem:
    """Evaluates cuts of one chain for one cluster."""

    costs: ChainCosts
    exchange: Matrix
    """(stages, N+1): the seconds of the cut after each stage; zero after the last stage."""
    of_ranks: Counts
    """(ranks,): the microbatches in flight."""
    of_stages: Counts
    """(stages,): the microbatches in flight."""
    size_bytes: float
    optimizer_copies: float
    held: Counts
    """(v, ranks): the stages of every rank."""
    joined: Counts
    """(most cuts of a link, links): the cuts of every link, each given by the stage before it; padded with the last
    stage, which sends nothing."""

    def best(self, heads: Counts, layers: int) -> Counts:
        """The best of the cuts `heads` (K, stages), from which the last cut, `layers`, is left out."""
        cuts = np.empty((heads.shape[0], heads.shape[1] + 1), dtype=np.int64)
        cuts[:, :-1], cuts[:, -1] = heads, layers
        if self.size_bytes < np.inf:
            cuts = cuts[_least(np.maximum(self.worst_bytes(cuts) - self.size_bytes, 0.0))]
        seconds, loads, stage_seconds = self.evaluate(cuts)
        equal = _least(seconds)
        if len(equal) > 1:
            # The squares of the ranks' seconds, with a small share of the stages', decide between equals.
            squares = (loads[equal] ** 2).sum(axis=1) + _MINOR * (stage_seconds[equal] ** 2).sum(axis=(1, 2))
            equal = equal[squares.argmin() :]
        best: Counts = cuts[equal[0]]
        return best

    def evaluate(self, cuts: Counts) -> tuple[Matrix, Matrix, Matrix]:
        """The slowest seconds, (K,), those of every rank, (K, ranks), and of its stages, (K, v, ranks), for each of
        `cuts` (K, stages + 1).
        """
        stages = cuts.shape[1] - 1
        flat = cuts[:, :-1] * (self.costs.layers + 1) + cuts[:, 1:]
        if self.costs.rank_seconds:
            # (v, ranks, K): the intervals of the stages of each rank, on that rank.
            held = [
                [self.costs.rank_seconds[rank].take(flat[:, stage]) for rank, stage in enumerate(row)]
                for row in self.held.tolist()
            ]
            stage_seconds = np.moveaxis(np.array(held), -1, 0)
        else:
            stage_seconds = self.costs.seconds.take(flat[:, self.held])
        loads = stage_seconds.sum(axis=1)
        sent = self.exchange.take(np.arange(stages) * self.exchange.shape[1] + cuts[:, 1:])
        links = sent[:, self.joined].sum(axis=1)
        return np.maximum(loads.max(axis=1), links.max(axis=1)), loads, stage_seconds

    def worst_bytes(self, cuts: Counts) -> Matrix:
        """The bytes of the rank that needs most, for each of `cuts`."""
        flat = (cuts[:, :-1] * (self.costs.layers + 1) + cuts[:, 1:])[:, self.held]
        saved = np.moveaxis(self.costs.saved_bytes.take(flat), 1, 2)
        kept = kept_bytes(saved, self.of_ranks, self.of_stages[self.held.T])
        kept = kept + self.costs.working_bytes.take(flat).max(axis=1)
        kept = kept + (2 + self.optimizer_copies) * self.costs.parameter_bytes.take(flat).sum(axis=1)
        kept = kept + self.costs.frozen_bytes.take(flat).sum(axis=1)
        worst: Matrix = kept.max(axis=1)
        return worst


def _stages_of_ranks(stage_ranks: Sequence[int]) -> Counts:
    """(v, ranks): the stages of every rank; all ranks have the same number."""
    return np.argsort(np.array(stage_ranks), kind="stable").reshape(max(stage_ranks) + 1, -1).T


def _cuts_of_links(stage_ranks: Sequence[int]) -> Counts:
    """The cuts of every link between two ranks; under `zb-v`, those of both directions."""
    links: dict[tuple[int, ...], list[int]] = {}
    folded = list(stage_ranks) == list(reversed(stage_ranks))
    for stage, pair in enumerate(pairwise(stage_ranks)):
        links.setdefault(tuple(sorted(pair)) if folded else pair, []).append(stage)
    last = len(stage_ranks) - 1
    longest = max(map(len, links.values()), default=0)
    columns = [[*cuts, *[last] * (longest - len(cuts))] for cuts in links.values()]
    return np.array(columns or [[last]], dtype=np.int64).T


def _simple_starts(problem: _CutProblem) -> Iterator[Counts]:
    """Initial cuts: stages of equal work, of equal length, of equal weights."""
    layers, stages = problem.costs.layers, len(problem.exchange)
    shares = np.arange(1, stages) / stages
    lengths = np.arange(1, layers + 1, dtype=np.float64)
    for sizes in (problem.costs.seconds[0, 1:], lengths, problem.costs.parameter_bytes[0, 1:]):
        wanted = np.searchsorted(sizes, shares * sizes[-1]) + 1
        # Every stage before and after a cut needs at least one layer.
        firsts = np.arange(1, stages)
        inner = np.maximum.accumulate(wanted - firsts) + firsts
        yield np.concatenate([[0], np.minimum(inner, layers - firsts[::-1]), [layers]])


def _fastest_stages(problem: _CutProblem) -> Counts:
    """Initial cuts: those with the fastest slowest stage."""
    positions = np.arange(problem.costs.layers + 1)

    def seconds(stage: int, starts: Counts) -> Matrix:
        return np.where(positions > starts[:, None], problem.costs.seconds[starts], np.inf)

    exchange = list(problem.exchange[:-1])
    cuts = cut_evenly(seconds, exchange, least_bottleneck(seconds, exchange))
    return np.array(cuts, dtype=np.int64)


def _improve(problem: _CutProblem, cuts: Counts, sweeps: int) -> Counts:
    """The cuts after a local search, which takes the best move of every group as long as the cuts improve."""
    layers, count = problem.costs.layers, len(cuts) - 2
    unchanged = 0
    for _ in range(sweeps):
        for cut in range(1, count + 2):
            moved = problem.best(_positions(cuts, cut) if cut <= count else _shifts(cuts), layers)
            unchanged = unchanged + 1 if (moved == cuts).all() else 0
            cuts = moved
            if unchanged > count:
                return cuts
    return cuts


def _least(values: Matrix) -> Counts:
    """The indices of the least of `values`."""
    return np.flatnonzero(values == values.min())


def _positions(cuts: Counts, cut: int) -> Counts:
    """The given cuts, then those with one cut at every position between its neighbors; all without the last cut."""
    positions = np.arange(cuts[cut - 1] + 1, cuts[cut + 1])
    moved = np.repeat(cuts[None, :-1], len(positions) + 1, axis=0)
    moved[1:, cut] = positions
    return moved


def _shifts(cuts: Counts) -> Counts:
    """The given cuts, then those with adjacent cuts moved up or down by one layer; all without the last cut."""
    count = len(cuts) - 2
    lengths = tuple(sorted({*(2**power for power in range(1, count.bit_length())), count} - {0, 1}))
    moved = cuts + joint_moves(count, lengths, (-1, 1))
    every = np.concatenate([cuts[None], moved])
    return every[(np.diff(every, axis=1) > 0).all(axis=1), :-1]


@cache
def joint_moves(count: int, lengths: tuple[int, ...], steps: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """(K, count + 2): by how many layers each of `count` cuts moves, and the ends of the chain, which do not. Every row
    moves adjacent cuts, as many as one of `lengths`, by one of `steps`.
    """
    rows = []
    for length in lengths:
        for first in range(1, count - length + 2):
            row = np.zeros(count + 2, dtype=np.int8)
            row[first : first + length] = 1
            rows += [step * row for step in steps]
    return np.array(rows, dtype=np.int8).reshape(len(rows), count + 2)
