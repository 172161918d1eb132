"""Random schedules with streamed stages, and two programs that judge them: one by laws, one by seconds and bytes.

Neither shares code with the verifier, the simulator or the pass that places fetches.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from penstock.scheduling.actions import Action, Fetch, Release
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.written_programs import define_by_programs
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage

_ACTION = re.compile(r"(\d+)([A-Z])(-?\d+)(?:[@<>](-?\d+))?")


def read(action: object) -> tuple[int, str, int, int]:
    """Stage, letter, number, and the last number of an action, by its text; of `2S0>3` and `2R0<3` 3."""
    stage, letter, number, last = _ACTION.fullmatch(str(action)).groups()  # type: ignore[union-attr]
    return int(stage), letter, int(number), int(last or 0)


def random_rows(draw: Random, ranks: int, per_rank: int, microbatches: int) -> str:
    """What each rank computes in a step, in a random order that can run, with visits of random lengths."""
    stages, stays = ranks * per_rank, draw.random()
    forwards, backwards = [0] * stages, [0] * stages
    rows: list[list[str]] = [[] for _ in range(ranks)]
    last = dict.fromkeys(range(ranks), -1)
    while min(backwards) < microbatches:
        ready = [
            (stage, letter)
            for stage in range(stages)
            for letter, done, before in (
                ("F", forwards, forwards[stage - 1] if stage else microbatches),
                ("B", backwards, backwards[stage + 1] if stage < stages - 1 else forwards[stage]),
            )
            if done[stage] < min(before, microbatches if letter == "F" else forwards[stage])
        ]
        same = [each for each in ready if last[each[0] % ranks] == each[0]]
        stage, letter = draw.choice(same if same and draw.random() < stays else ready)
        done = forwards if letter == "F" else backwards
        rows[stage % ranks].append(f"{stage}{letter}{done[stage]}@0")
        done[stage] += 1
        last[stage % ranks] = stage
    for rank, row in enumerate(rows):
        row += [f"{stage}U1<0" for stage in range(rank, stages, ranks)]
    return "\n".join(map(" ".join, rows))


def random_streamed(draw: Random) -> Schedule:
    """A random order, or one of the library's with replicas, some of whose stages are streamed."""
    ranks, per_rank, microbatches = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
    stages = ranks * per_rank
    streamed = frozenset(stage for stage in range(stages) if draw.random() < 0.8)
    again = streamed | {stage for stage in range(stages) if draw.random() < 0.5}
    options = {"recomputed": frozenset(again), "streamed": streamed, "places": draw.randint(1, 3)}
    if draw.random() < 0.7:
        definition = define_by_programs("drawn", random_rows(draw, ranks, per_rank, microbatches))
        return Schedule(definition, ranks, microbatches, per_rank, **options)  # type: ignore[arg-type]
    replicas = draw.randint(1, 2)
    name = draw.choice(("breadth-first", "interleaved", *(("gpipe", "1f1b-flush") if per_rank == 1 else ())))
    at = tuple(tuple(range(rank * replicas, (rank + 1) * replicas)) for rank in range(ranks))
    count = ranks * replicas * draw.randint(1, 2) if name == "interleaved" else microbatches
    return Schedule.placed(name, Placement(at * per_rank), count, **options)  # type: ignore[arg-type]


def is_lawful(steps: Sequence[Programs], schedule: Schedule) -> bool:
    """Whether the fetches and releases of whole steps keep their laws."""
    return all(_is_lawful_row(row, number, schedule) for number, step in enumerate(steps) for row in step)


def _is_lawful_row(row: Sequence[object], step: int, schedule: Schedule) -> bool:
    actions = [read(action) for action in row]
    held = 0
    for stage, letter, number, version in actions:
        held += (letter == "G") - (letter == "Q")
        if held > schedule.places or (letter in "GQ" and (number != step or stage not in schedule.streamed)):
            return False
        if stage in schedule.streamed and letter in "FBC" and version != step:
            return False
    for stage in schedule.streamed:
        text = "".join(letter for of, letter, _, _ in actions if of == stage and letter in "GQFBCAU")
        # Visits, the sum of gradients in one of them if there are any, and the update when the stage is away.
        if not re.fullmatch(r"(G[FBCA]*Q)*U?" if "B" in text else r"(GA?Q|A)*U?", text):
            return False
        visit, made = 0, {}
        for place, (of, letter, number, _) in enumerate(actions):
            visit += of == stage and letter == "G"
            if of == stage and (letter == "C" or (letter == "F" and _is_direct(actions, place))):
                made[number] = visit
            elif of == stage and letter == "B" and made.get(number) != visit:
                return False
    return True


def _is_direct(actions: Sequence[tuple[int, str, int, int]], place: int) -> bool:
    """Whether the backward of the forward there is the rank's next computation."""
    after = next((action for action in actions[place + 1 :] if action[1] in "FBCU"), (-1, "", -1, 0))
    return (after[0], after[1], after[2]) == (actions[place][0], "B", actions[place][2])


def spoiled(draw: Random, row: Sequence[Action]) -> tuple[Action, ...]:
    """`row` with one fetch or release dropped, doubled, moved, or made of another version."""
    places = [place for place, action in enumerate(row) if read(action)[1] in "GQ"]
    if not places:
        return tuple(row)
    place, wrong = draw.choice(places), draw.choice(("drop", "double", "move", "version"))
    action, rest = row[place], [*row[:place], *row[place + 1 :]]
    if wrong == "version" and isinstance(action, Fetch | Release):
        rest.insert(place, replace(action, version=action.version + draw.choice((1, 2))))
    elif wrong != "drop":
        rest.insert(draw.randint(0, len(rest)), action)
        if wrong == "double":
            rest.insert(draw.randint(0, len(rest)), action)
    return tuple(rest)


@dataclass(frozen=True)
class Sizes:
    """Whole seconds and bytes of each stage; the host's link carries one byte a second, other links are instant."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: tuple[int, ...]
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    saved: tuple[int, ...]

    @classmethod
    def drawn(cls, draw: Random, stages: int) -> "Sizes":
        """Random ones."""
        return cls(*(tuple(draw.randint(least, 9) for _ in range(stages)) for least in (1, 1, 1, 0, 0, 0)))

    def problem(self, made: Schedule) -> tuple[Plan, Profile, Cluster]:
        """What the simulator is asked."""
        layers = tuple(
            LayerProfile(
                f"{stage}",
                forward_seconds=self.forward[stage],
                backward_seconds=self.backward[stage],
                cut_bytes=0.0,
                saved_bytes=self.saved[stage],
                parameter_bytes=self.trained[stage],
                frozen_bytes=self.frozen[stage],
                update_seconds=self.update[stage],
            )
            for stage in range(made.stages)
        )
        stages = tuple(Stage(stage, stage + 1, ranks) for stage, ranks in enumerate(made.placement.stages))
        plan = Plan(
            *(stages, made.method, made.microbatches),
            recompute=tuple(made.recomputed),
            streamed=tuple(made.streamed),
            places=made.places,
        )
        return plan, Profile(layers, 1), replace(Cluster.uniform(made.ranks, inf), host_bandwidth=1.0)


OPTIMIZER = 2
"""The optimizer's state in units of the weights."""


class Clock:
    """Runs the rows of one step: when each rank is done, and what it holds from when on."""

    def __init__(self, made: Schedule, rows: Programs, sizes: Sizes) -> None:
        self._made, self._sizes = made, sizes
        self._rows = [[read(action) for action in row] for row in rows]
        self.now = [0] * made.ranks
        self._in, self._out = [0] * made.ranks, [0] * made.ranks
        """When the links from and to the hosts are free."""
        self._home: list[dict[int, int]] = [{} for _ in rows]
        """By stage, when its release has ended."""
        self._there: list[dict[int, int]] = [{} for _ in rows]
        """By stage, when its weights have come."""
        self._gradients: list[dict[int, str]] = [{} for _ in rows]
        self._sent: dict[tuple[int, int, int], int] = {}
        self._sums: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.changes: list[list[tuple[int, int]]] = [[] for _ in rows]
        """(second, bytes more)."""
        places, moved = [0] * len(rows), True
        while moved:
            moved = False
            for rank, row in enumerate(self._rows):
                while places[rank] < len(row) and self._run(rank, places[rank]):
                    places[rank], moved = places[rank] + 1, True
        assert all(place == len(row) for place, row in zip(places, self._rows, strict=True))

    def peak(self, rank: int) -> int:
        """The most bytes that the rank holds at once."""
        held = most = sum(
            (1 + (0 if self._made.streamed else OPTIMIZER)) * self._sizes.trained[stage] + self._sizes.frozen[stage]
            for stage in self._made.stages_of(rank)
            if stage not in self._made.streamed
        )
        for second in sorted({at for at, _ in self.changes[rank]}):
            held += sum(size for at, size in self.changes[rank] if at == second)
            most = max(most, held)
        return most

    def _run(self, rank: int, place: int) -> bool:
        row, sizes = self._rows[rank], self._sizes
        stage, letter, number, other = row[place]
        streamed, now, gradients = stage in self._made.streamed, self.now[rank], self._gradients[rank]
        trained, changes = sizes.trained[stage], self.changes[rank]
        if letter in "FBC":
            start = max(now, self._there[rank].get(stage, 0))
            stop = self.now[rank] = start + (sizes.backward if letter == "B" else sizes.forward)[stage]
            saves = letter == "C" or stage not in self._made.recomputed or _is_direct(row, place)
            if letter == "B":
                changes.append((stop, -sizes.saved[stage]))
                if gradients.get(stage) != "here":
                    gradients[stage] = "here"
                    changes.append((stop, trained))
            elif saves:
                changes.append((start, sizes.saved[stage]))
        elif letter == "S":
            self._sent[stage, number, other] = now
        elif letter == "R":
            if (other, number, stage) not in self._sent:
                return False
            self.now[rank] = max(now, self._sent[other, number, stage])
        elif letter == "A":
            self._sums[stage][rank] = now
            if len(self._sums[stage]) < len(self._made.placement.stages[stage]):
                return False
            self.now[rank] = max(self._sums[stage].values())
        elif letter == "G":
            visit = next(letter for of, letter, *_ in row[place + 1 :] if of == stage and letter in "QB")
            back = trained if gradients.get(stage) == "away" and visit == "B" else 0
            size = trained + sizes.frozen[stage] + back
            start = max(now, self._in[rank] if size else 0, self._home[rank].get(stage, 0))
            self._there[rank][stage] = start + size
            self._in[rank] = max(self._in[rank], start + size)
            changes.append((now, size))
            if gradients.get(stage) == "away" and visit == "B":
                gradients[stage] = "here"
        elif letter == "Q":
            changes.append((now, -trained - sizes.frozen[stage]))
            here = gradients.get(stage) == "here"
            size = trained if here else 0
            stop = max(now, self._out[rank] if size else 0) + size
            self._home[rank][stage], self._out[rank] = stop, max(self._out[rank], stop)
            if here:
                gradients[stage] = "away"
                changes.append((stop, -trained))
        elif self._made.streamed:
            start = max(now, self._in[rank], self._home[rank].get(stage, 0))
            back = max(start, self._out[rank]) + (OPTIMIZER + streamed) * trained
            self._in[rank], self._out[rank] = start + (OPTIMIZER + 2 * streamed) * trained, back
            stop = self.now[rank] = max(start + sizes.update[stage], self._in[rank], back)
            changes.append((stop, -trained if not streamed and gradients.get(stage) == "here" else 0))
        else:
            stop = self.now[rank] = now + sizes.update[stage]
            changes.append((stop, -trained if gradients.get(stage) == "here" else 0))
        return True
