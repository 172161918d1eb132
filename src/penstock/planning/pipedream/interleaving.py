"""Dealing a chain to ranks that hold several stages each, so that the slowest rank, not the slowest stage, is fastest.

Under interleaving rank q of p holds the stages q, p + q, 2p + q, ..., under `zb-v` q and 2p - 1 - q. What it takes is
the sum of them, so a long stage may stand beside a short one. The recurrence does not know such sums: they tie stages
that are far from each other. Where there are few ways to cut, all are tried. Else cuts are moved, one alone or several
neighbours by one layer, as long as that makes the slowest rank or link faster, or all ranks more equal; it starts from
cuts of equal work, of equal length, of equal weights, and from the fastest slowest stage, and takes the best of what it
ends with. That is a heuristic: tests hold it to 1.25 times the optimum on random chains, and it mostly finds the
optimum itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

import numpy as np

from penstock.planning.costs import ChainCosts, Counts, Matrix
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.pipedream.chain_cuts import cut_evenly, least_slowest

__all__ = ["Deal", "deal_stages"]

_TRY_ALL = 20_000
"""So many ways to cut are all tried: well below a second."""

_QUICK_SWEEPS = 5
"""Enough to come near the best where a message, not a plan, depends on it."""

_MINOR = 1e-6
"""What a square of a stage's seconds counts beside one of a rank's: equal stages fill and drain a pipe sooner."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Cuts: stage s holds layers ``[cuts[s], cuts[s + 1])``."""

    cuts: tuple[int, ...]
    seconds: float
    """Of the slowest rank or link."""
    worst_bytes: float
    """Of the rank that needs most."""


def deal_stages(
    costs: ChainCosts,
    exchange: Sequence[Matrix],
    in_flight: Sequence[int],
    size_bytes: float,
    optimizer_copies: float = OPTIMIZER_COPIES,
    *,
    places: Sequence[int] = (),
    try_all: int = _TRY_ALL,
    quick: bool = False,
) -> Deal:
    """The best deal found that needs no more than `size_bytes` on a rank; else the one that needs least.

    ``exchange[s]`` (N+1,): the seconds of the cut behind stage s, wherever it is; one less than there are stages.
    ``in_flight[q]``: the stages of rank q, of all its, that wait for their backward at once, at most. ``places[s]``:
    the rank of stage s; s mod p if they are left out. `try_all`: up to so many ways to cut all are tried. `quick`:
    where they are not, move each cut a few times only, from simple starts.
    """
    sent = np.array([*exchange, np.zeros(costs.layers + 1)])
    places = places or [stage % len(in_flight) for stage in range(len(sent))]
    game = _Game(costs, sent, tuple(in_flight), size_bytes, optimizer_copies, _held(places), _joined(places))
    if comb(costs.layers - 1, len(exchange)) <= try_all:
        ways = list(combinations(range(1, costs.layers), len(exchange)))
        inner = np.array(ways, dtype=np.int64).reshape(len(ways), len(exchange))
        best = game.best(np.pad(inner, ((0, 0), (1, 0))), costs.layers)
    else:
        starts = [*_simple_starts(game), *([] if quick else [_fastest_stages(game)])]
        ends = [_improve(game, start, _QUICK_SWEEPS if quick else costs.layers) for start in starts]
        best = game.best(np.array([end[:-1] for end in ends]), costs.layers)
    seconds, _, held = game.judge(best[None])
    return Deal(tuple(int(cut) for cut in best), float(seconds[0]), float(held[0]))


@dataclass(frozen=True, slots=True, eq=False)
class _Game:
    """What cuts are worth."""

    costs: ChainCosts
    exchange: Matrix
    """(stages, N+1): behind the last stage nothing is sent."""
    in_flight: tuple[int, ...]
    size_bytes: float
    optimizer_copies: float
    held: Counts
    """(v, ranks): the stages of every rank."""
    joined: Counts
    """(most cuts of a link, links): the cuts between every two ranks, by the stage before them; filled up with the last
    stage, behind which nothing is sent."""

    def best(self, heads: Counts, layers: int) -> Counts:
        """The best of the cuts whose last, `layers`, is left out of `heads` (K, stages)."""
        cuts = np.pad(heads, ((0, 0), (0, 1)), constant_values=layers)
        seconds, squares, held = self.judge(cuts)
        excess = np.maximum(held - self.size_bytes, 0.0)
        best: Counts = cuts[np.lexsort((squares, seconds, excess))[0]]
        return best

    def judge(self, cuts: Counts) -> tuple[Matrix, Matrix, Matrix]:
        """Of each of the `cuts` (K, stages + 1): the slowest seconds, the sum of squares, the worst rank's bytes.

        Squares are those of the ranks' seconds; where these are equal, those of the stages decide.
        """
        stages = cuts.shape[1] - 1
        flat = cuts[:, :-1] * (self.costs.layers + 1) + cuts[:, 1:]

        def by_rank(matrix: Matrix) -> Matrix:
            return matrix.take(flat)[:, self.held]

        stage_seconds = by_rank(self.costs.seconds)
        loads = stage_seconds.sum(axis=1)
        squares = (loads**2).sum(axis=1) + _MINOR * (stage_seconds**2).sum(axis=(1, 2))
        sent = self.exchange.take(np.arange(stages) * self.exchange.shape[1] + cuts[:, 1:])
        links = sent[:, self.joined].sum(axis=1)
        held = np.array(self.in_flight) * by_rank(self.costs.saved_bytes).max(axis=1)
        held = held + by_rank(self.costs.working_bytes).max(axis=1)
        held = held + (2 + self.optimizer_copies) * by_rank(self.costs.parameter_bytes).sum(axis=1)
        slowest = np.maximum(loads.max(axis=1), links.max(axis=1))
        return slowest, squares, held.max(axis=1)


def _held(places: Sequence[int]) -> Counts:
    """The stages of every rank, one below the other; all ranks have equally many."""
    return np.argsort(np.array(places), kind="stable").reshape(max(places) + 1, -1).T


def _joined(places: Sequence[int]) -> Counts:
    """The cuts of every link between two ranks; where the stages go there and back again, of both halves."""
    links: dict[tuple[int, ...], list[int]] = {}
    folded = list(places) == list(reversed(places))
    for stage, ends in enumerate(pairwise(places)):
        links.setdefault(tuple(sorted(ends)) if folded else ends, []).append(stage)
    last = len(places) - 1
    longest = max(map(len, links.values()), default=0)
    columns = [[*cuts, *[last] * (longest - len(cuts))] for cuts in links.values()]
    return np.array(columns or [[last]], dtype=np.int64).T


def _simple_starts(game: _Game) -> Iterator[Counts]:
    """Cuts to start from: stages of equal work, of equal length, of equal weights."""
    layers, stages = game.costs.layers, len(game.exchange)
    shares = np.arange(1, stages) / stages
    lengths = np.arange(1, layers + 1, dtype=np.float64)
    for sizes in (game.costs.seconds[0, 1:], lengths, game.costs.parameter_bytes[0, 1:]):
        wanted = np.searchsorted(sizes, shares * sizes[-1]) + 1
        # At least one layer for every stage before and behind.
        firsts = np.arange(1, stages)
        inner = np.maximum.accumulate(wanted - firsts) + firsts
        yield np.concatenate([[0], np.minimum(inner, layers - firsts[::-1]), [layers]])


def _fastest_stages(game: _Game) -> Counts:
    """Cuts to start from: those of the fastest slowest stage."""
    positions = np.arange(game.costs.layers + 1)

    def seconds(stage: int, starts: Counts) -> Matrix:
        return np.where(positions > starts[:, None], game.costs.seconds[starts], np.inf)

    exchange = list(game.exchange[:-1])
    cuts = cut_evenly(seconds, exchange, least_slowest(seconds, exchange))
    return np.array(cuts, dtype=np.int64)


def _improve(game: _Game, cuts: Counts, sweeps: int) -> Counts:
    """The cuts after moving them for as long as something gets better; of every group of moves the best is taken."""
    layers, count = game.costs.layers, len(cuts) - 2
    for _ in range(sweeps):
        before = cuts
        for cut in range(1, count + 1):
            cuts = game.best(_places(cuts, cut), layers)
        cuts = game.best(_shifts(cuts), layers)
        if (before == cuts).all():
            break
    return cuts


def _places(cuts: Counts, cut: int) -> Counts:
    """All places of one cut between its neighbours, where it is first; the last of all cuts left out."""
    places = np.arange(cuts[cut - 1] + 1, cuts[cut + 1])
    moved = np.repeat(cuts[None, :-1], len(places) + 1, axis=0)
    moved[1:, cut] = places
    return moved


def _shifts(cuts: Counts) -> Counts:
    """The cuts as they are, then runs of neighbours one layer up or down; the last of all cuts left out."""
    rows = [cuts]
    count = len(cuts) - 2
    for length in {*(2**power for power in range(1, count.bit_length())), count} - {0, 1}:
        for first in range(1, count - length + 2):
            for step in (-1, 1):
                moved = cuts.copy()
                moved[first : first + length] += step
                rows.append(moved)
    every = np.array(rows)
    return every[(np.diff(every, axis=1) > 0).all(axis=1), :-1]
