"""Random orders, those of a search among them, with offloads strewn over them: most as the laws want, some not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from penstock.planning.orders.list_orders import ListRule, list_order
from penstock.planning.orders.local_moves import improve
from penstock.planning.orders.rows import OrderCosts, text_of_rows, time_rows
from penstock.scheduling.actions import Forward, InputGradients, Offload, Reload, parse
from penstock.scheduling.definitions import Entry, PipelineShape, ScheduleDefinition, Segment
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.written_programs import define_by_programs

FOLDED = ("zb-v", "v-half", "v-min")
NAMED = ("gpipe", "1f1b-flush", "spp", "zb-h1", "pipedream", "2bw", *FOLDED)


def strewn(row: Sequence[Entry], seed: int, share: float, faults: float, period: int = 2**62) -> Iterator[Entry]:
    """`row` with this `share` of its microbatches offloaded, and these `faults` among them. What is drawn depends on
    the seed, the stage and the microbatch modulo `period` alone, so that the parts of an order in several steps agree.
    """
    gaps: list[list[Entry]] = [[] for _ in range(len(row) + 1)]
    forwards = {(e.stage, e.microbatch): place for place, e in enumerate(row) if isinstance(e, Forward)}
    backwards = {(e.stage, e.microbatch): place for place, e in enumerate(row) if isinstance(e, InputGradients)}
    for stage, microbatch in sorted({*forwards, *backwards}):
        draw = Random(f"{seed} {stage} {microbatch % period}")
        if draw.random() >= share:
            continue
        wrong = draw.choice(("early", "late", "lost", "twice")) if draw.random() < faults else ""
        begin, end = forwards.get((stage, microbatch)), backwards.get((stage, microbatch))
        here = there = 0
        if begin is not None:
            here = begin if wrong == "early" else draw.randint(begin + 1, len(row) if end is None else end)
            gaps[here] += [Offload(stage, microbatch)] * (2 if wrong == "twice" else 1)
        if end is not None and wrong != "lost":
            there = end + 1 if wrong == "late" else draw.randint(0 if begin is None else max(here, begin + 1), end)
            gaps[there].append(Reload(stage, microbatch))
    for place, entry in enumerate([*row, None]):
        # Offloads come first where both are in one gap.
        yield from sorted(gaps[place], key=lambda added: isinstance(added, Reload))
        if entry is not None:
            yield entry


def with_offloads(definition: ScheduleDefinition, seed: int, share: float, faults: float = 0.0) -> ScheduleDefinition:
    """A named or written schedule, strewn with offloads."""
    if definition.programs:
        rows = [[parse(word) for word in row.split()] for row in definition.programs]
        made = [strewn(row, seed, share, faults) for row in rows]  # type: ignore[arg-type]
        return define_by_programs(definition.name, "\n".join(" ".join(map(str, row)) for row in made))

    def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
        row = list(definition.order(shape, rank, segment))
        # In a V all steps have to be alike: the order in which messages arrive is that of the first.
        yield from strewn(row, seed, share, faults, *([shape.microbatches] if definition.name in FOLDED else []))

    return replace(definition, name=f"{definition.name} {seed}", order=order)


def found_order(draw: Random, most_ranks: int, most_microbatches: int, most_stages: int = 8) -> Schedule:
    """What list scheduling and a few local moves find for random times, bytes and limits."""
    while True:
        ranks, per_rank = draw.randint(1, most_ranks), draw.choice((1, 1, 2, 2))
        microbatches = draw.randint(1, most_microbatches)
        folded = draw.random() < 0.5
        once = tuple(range(ranks))
        placed = (once + (once[::-1] if folded else once)) if per_rank == 2 else once
        stages = len(placed)
        if stages > most_stages:
            continue
        times = [tuple(draw.randint(1, 9) * 1.0 for _ in placed) for _ in range(3)]
        late = [tuple(draw.choice((0.0, 0.5, 2.0)) for _ in placed[1:]) for _ in range(2)]
        saved = tuple(draw.randint(1, 5) * 1.0 for _ in placed)
        least = [sum(size for size, at in zip(saved, placed, strict=True) if at == rank) for rank in once]
        costs = OrderCosts(
            ranks=placed,
            microbatches=microbatches,
            forward=times[0],
            backward=times[1],
            weight=times[2],
            activation=late[0],
            gradient=late[1],
            saved=saved,
            limits=tuple(size * draw.uniform(1, ranks + 2) for size in least),
            whole=frozenset({0} | {stage for stage in range(stages) if draw.random() < 0.3}),
        )
        rule = ListRule(draw.random(), draw.random(), overtakes=draw.random() < 0.5)
        rows = list_order(costs, rule, {})
        timed = None if rows is None else time_rows(costs, rows)
        if timed is not None:
            best = improve(costs, timed, draw.choice((0, 10)))
            return Schedule(
                define_by_programs("found", text_of_rows(costs, best.rows, repeats=False)),
                ranks,
                microbatches,
                per_rank,
            )


def named_order(draw: Random, most_stages: int, most_replicas: int, most_microbatches: int) -> Schedule:
    """A named schedule with the versions that it has, on replicas or with skips and ties."""
    name, stages = draw.choice(NAMED), draw.randint(1, most_stages)
    sync, split = name == "pipedream" and draw.random() < 0.3, draw.random() < 0.5
    alike = name in FOLDED or sync or draw.random() < 0.3
    count = draw.randint(1, most_replicas)
    counts = [count if alike else draw.randint(1, most_replicas) for _ in range(stages)]
    dealt = iter(range(sum(counts)))
    at = tuple(tuple(next(dealt) for _ in range(count)) for count in counts)
    at = (*at, *reversed(at)) if name in FOLDED else at
    placement = Placement(at, split and sum(counts) > stages)
    least = sum(counts) if name == "2bw" else 1
    made = Schedule.placed(name, placement, draw.randint(least, max(least, most_microbatches)), vertical_sync=sync)
    pairs = [(a, b) for a in range(made.stages) for b in range(a + 2, made.stages)]
    skips = tuple(sorted(pair for pair in pairs if draw.random() < 0.3 and not set(at[pair[0]]) & set(at[pair[1]])))
    return replace(made, skips=skips)


def is_lawful(schedule: Schedule, minibatches: int) -> bool:
    """Whether offloads keep their laws, by a look at each action in turn."""
    away: dict[tuple[int, int, int], str] = {}
    begun: dict[tuple[int, int, int], int] = {}
    segments = [*(schedule.step(number) for number in range(minibatches)), schedule.drain(minibatches)]
    for number, rows in enumerate(segments):
        for rank, row in enumerate(rows):
            for action in row:
                if not isinstance(action, Forward | InputGradients | Offload | Reload):
                    continue
                key = rank, action.stage, action.microbatch
                if isinstance(action, Forward):
                    away[key], begun[key] = "here", number
                elif isinstance(action, Offload):
                    if away.get(key) != "here" or begun[key] != number:
                        return False
                    away[key] = "away"
                elif isinstance(action, Reload):
                    if away.get(key) != "away":
                        return False
                    away[key] = "back"
                elif away.pop(key) == "away":
                    return False
    return not away
