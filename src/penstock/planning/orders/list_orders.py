"""List scheduling: rows that are filled from event to event, each rank doing the best of what it can start.

A rank does a backward whose gradient has come; else a forward whose activation has come and whose bytes fit; else a
weight part that was left over. The rules differ in how much of a weight part, or of a forward, must be over before the
next backward is expected; that is known from an earlier pass, as the times of the same operations there. Where the
order of forwards and backwards is given, only the places of weight parts are chosen; or a forward waits until its bytes
fit, and what comes behind it goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TypeAlias

from penstock.planning.orders.rows import BACKWARD, FORWARD, ROUNDING, WEIGHT, Op, OrderCosts, Rows


@dataclass(frozen=True, slots=True)
class ListRule:
    """Holds what a rank prefers.

    `forward_share`, `weight_share`: how much of a forward or weight part must be over before the next backward (or
    forward) is expected, from 0 (start in any case) to 1. `ahead`: by stage, the most microbatches whose backward has
    not begun.
    """

    weight_share: float = 0.0
    forward_share: float = 0.0
    ahead: tuple[float, ...] = ()
    overtakes: bool = False
    """Whether a given backward also overtakes forwards that have not come, and not only those that do not fit."""


Choice: TypeAlias = tuple[Op | None, float]
"""The forward or backward that a rank does next if it can begin now, and when the next one is expected."""


@dataclass(slots=True)
class _Filling:
    """Rows that are being filled."""

    costs: OrderCosts
    rule: ListRule
    expected: dict[Op, float]
    """When data is expected, by an earlier pass."""
    given: Rows | None = None
    """By rank: its next forwards and backwards in the order in which they must come, if that is given."""
    delays: bool = False
    """Whether what is given goes on behind a forward that does not fit."""
    keeps: bool = False
    """Whether a forward leaves the bytes free that a backward recomputes: without, ranks may get stuck."""
    rows: Rows = field(init=False)
    arrived: dict[Op, float] = field(default_factory=dict)
    free_at: list[float] = field(init=False)
    held_bytes: list[float] = field(init=False)
    next_of: list[list[int]] = field(init=False)
    """By kind and stage: the next microbatch."""
    left_over: list[list[tuple[int, int]]] = field(init=False)
    """By rank: the stages and microbatches whose weight part is to be done, in the order of their backwards."""
    events: list[tuple[float, int]] = field(init=False)
    latest_first: list[tuple[int, ...]] = field(init=False)
    """By rank: its stages."""
    needed: tuple[list[float], list[float]] = field(init=False)
    """By kind and stage: the bytes that must be free for a forward or a backward."""
    left: int = field(init=False)
    """The operations that are in no row yet."""
    link_free: list[float] = field(init=False)
    """By number: when the link is free."""
    parked: set[int] = field(default_factory=set)
    """The ranks that nothing is known to arrive for."""

    def __post_init__(self) -> None:
        costs = self.costs
        self.rows = [[] for _ in range(costs.length)]
        self.left = costs.operations
        self.free_at, self.held_bytes = [0.0] * costs.length, [0.0] * costs.length
        self.next_of = [[0] * costs.stages for _ in range(2)]
        self.link_free = [0.0] * costs.length**2
        self.latest_first = [held[::-1] for held in costs.held]
        alone = self.given is not None and not self.delays
        behind = ([stage] if alone else costs.held[rank] for stage, rank in enumerate(costs.ranks))
        again = [self.keeps * max(costs.again[stage] for stage in costs.held[rank]) for rank in costs.ranks]
        forwards = [again[s] + sum(costs.saved[late] for late in held if late >= s) for s, held in enumerate(behind)]
        self.needed = forwards, list(costs.again)
        self.left_over = [[] for _ in range(costs.length)]
        self.events = [(0.0, rank) for rank in range(costs.length)]
        self.arrived = {(FORWARD, 0, microbatch): 0.0 for microbatch in range(costs.microbatches)}

    def run(self) -> Rows | None:
        """The rows; None if no rank can go on."""
        while self.left:
            if not self.events:
                rank = next((rank for rank in sorted(self.parked) if self.left_over[rank]), None)
                if rank is not None:
                    self.parked.discard(rank)
                    self._do_weight(rank, self.free_at[rank])
                elif not (self.delays and self._overtake()):
                    return None
            else:
                now, rank = heappop(self.events)
                if now >= self.free_at[rank]:
                    self._go_on(rank, now)
        return self.rows

    def _go_on(self, rank: int, now: float) -> None:
        op, soon = self._given_choice(rank, now) if self.given is not None else self._listed_choice(rank, now)
        left_over = self.left_over[rank]
        if op is not None:
            self._do(rank, op, now)
        elif left_over and soon >= now + self.rule.weight_share * self.costs.weight[left_over[0][0]]:
            self._do_weight(rank, now)
        else:
            known = [at for at in map(self.arrived.get, self._next_ops(rank)) if at and at > now]
            awaited = min([*known, soon]) if known or self.given is None else inf
            if awaited < inf:
                heappush(self.events, (awaited, rank))
            else:
                self.parked.add(rank)

    def _next_ops(self, rank: int) -> list[Op]:
        if self.given is not None:
            return self.given[rank][:1]
        return [
            (kind, stage, self.next_of[kind][stage])
            for kind in (BACKWARD, FORWARD)
            for stage in self.latest_first[rank]
            if self.next_of[kind][stage] < self.costs.microbatches
        ]

    def _given_choice(self, rank: int, now: float) -> Choice:
        soon = inf
        for op in self._fitting(rank):
            at = self.arrived.get(op)
            if at is not None and at <= now:
                return op, now
            soon = min(soon, self._awaited(op, now))
            if op[0] == BACKWARD or not self.rule.overtakes:
                break
        return None, soon

    def _fitting(self, rank: int) -> Iterator[Op]:
        """What is given, up to a forward that does not fit; with delays, without such forwards and their backwards."""
        assert self.given is not None
        late: dict[int, int] = {}
        for op in self.given[rank]:
            kind, stage, microbatch = op
            if stage in late and (kind == FORWARD or microbatch >= late[stage]):
                continue
            if self._fits(rank, kind, stage):
                yield op
            elif self.delays and kind == FORWARD:
                late[stage] = microbatch
            else:
                return

    def _overtake(self) -> bool:
        """Whether some rank can do a later operation, where all wait for data that others hold back."""
        for rank in sorted(self.parked):
            op = next((op for op in self._fitting(rank) if op in self.arrived), None)
            if op is not None:
                self.parked.discard(rank)
                self._do(rank, op, max(self.free_at[rank], self.arrived[op]))
                return True
        return False

    def _listed_choice(self, rank: int, now: float) -> Choice:
        soon = later = inf
        (forwards, backwards), arrived, ahead = self.next_of, self.arrived, self.rule.ahead
        stages = self.latest_first[rank]
        for stage in stages:
            if backwards[stage] < forwards[stage] and self._fits(rank, BACKWARD, stage):
                op = BACKWARD, stage, backwards[stage]
                if op in arrived and arrived[op] <= now:
                    return op, now
                soon = min(soon, self._awaited(op, now))
        for stage in stages:
            microbatch = forwards[stage]
            if microbatch == self.costs.microbatches or not self._fits(rank, FORWARD, stage):
                continue
            if ahead and microbatch - backwards[stage] >= ahead[stage]:
                continue
            op = FORWARD, stage, microbatch
            if op not in arrived or arrived[op] > now:
                later = min(later, self._awaited(op, now))
            elif soon >= now + self.rule.forward_share * self.costs.forward[stage]:
                return op, now
        return None, min(soon, later)

    def _awaited(self, op: Op, now: float) -> float:
        """When `op` can start, if that is known or expected to be after `now`."""
        at = self.arrived.get(op, self.expected.get(op, inf))
        return at if at > now else inf

    def _fits(self, rank: int, kind: int, stage: int) -> bool:
        """Whether an operation fits; where the place of a forward is not fixed, also the same microbatch on the rank's
        later stages.
        """
        return self.held_bytes[rank] + self.needed[kind][stage] <= self.costs.limits[rank] * ROUNDING

    def _do(self, rank: int, op: Op, now: float) -> None:
        kind, stage, microbatch = op
        self._append(rank, op, now)
        self.next_of[kind][stage] += 1
        if self.given is not None:
            self.given[rank].remove(op)
        done = self.free_at[rank]
        if kind == BACKWARD and stage not in self.costs.whole:
            self.left_over[rank].append((stage, microbatch))
        if kind == FORWARD and stage == self.costs.stages - 1:
            self.arrived[BACKWARD, stage, microbatch] = done
        elif kind == FORWARD or stage:
            waits, there, _, late, occupied, link = self.costs.routes[kind][stage]
            sent = max(done, self.link_free[link])
            self.link_free[link] = sent + occupied
            self._arrive((waits, there, microbatch), sent + late)

    def _do_weight(self, rank: int, now: float) -> None:
        stage, microbatch = self.left_over[rank].pop(0)
        self._append(rank, (WEIGHT, stage, microbatch), now)

    def _append(self, rank: int, op: Op, now: float) -> None:
        kind, stage, _ = op
        self.rows[rank].append(op)
        self.left -= 1
        self.held_bytes[rank] += self.costs.bytes_after[kind][stage]
        self.free_at[rank] = now + self.costs.seconds[kind][stage]
        heappush(self.events, (self.free_at[rank], rank))

    def _arrive(self, op: Op, at: float) -> None:
        self.arrived[op] = at
        rank = self.costs.ranks[op[1]]
        self.parked.discard(rank)
        heappush(self.events, (max(at, self.free_at[rank]), rank))


def list_order(costs: OrderCosts, rule: ListRule, expected: dict[Op, float]) -> Rows | None:
    """The rows of list scheduling by `rule`; None if it gets stuck under the limits.

    `expected`: when the data of each operation arrived in an earlier pass, where there was one.
    """
    rows = _Filling(costs, rule, expected).run()
    return rows or (_Filling(costs, rule, expected, keeps=True).run() if any(costs.again) else None)


def place_weights(costs: OrderCosts, rows: Rows, share: float, expected: dict[Op, float]) -> Rows | None:
    """`rows` with their weight parts where a rank would wait otherwise, or must free memory; None if it gets stuck.

    `share`: how much of a weight part must be over before the next operation is expected; see `list_order`.
    """
    return _Filling(costs, ListRule(weight_share=share), expected, _without_weights(rows)).run()


def delay_forwards(costs: OrderCosts, rows: Rows, rule: ListRule, expected: dict[Op, float]) -> Rows | None:
    """`rows` within the limits: a forward waits until its bytes fit, and what comes behind it goes on. None if that
    gets stuck. Weight parts are put as by `place_weights`.
    """
    return _Filling(costs, rule, expected, _without_weights(rows), delays=True).run()


def _without_weights(rows: Rows) -> Rows:
    return [[op for op in row if op[0] != WEIGHT] for row in rows]
