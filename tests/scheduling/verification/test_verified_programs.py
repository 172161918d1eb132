"""What the verifier lets pass is right: programs run on symbols, sound ones and ones broken at random.

The oracle is a little interpreter with real queues and with weight slots that get overwritten. A program that passes
must run to its end and come to the weights that its method promises.
"""

import re
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Send,
    SendNorms,
    SendTied,
    Update,
    carried_norms,
    parse_programs,
)
from penstock.scheduling.lowering import partners
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.verifier import verify_programs
from support.schedule_strategies import schedules, waiting_schedules


def interpret(programs: Programs, schedule: Schedule) -> list[object]:
    """The weights of every stage after `programs`, as symbols. Queues carry values alone, slots are overwritten."""
    stages, last = range(schedule.stages), schedule.stages - 1
    slots: list[list[object]] = [[("initial", s)] * schedule.versions(s) for s in stages]
    newest = [0] * schedule.stages
    size = schedule.microbatches_per_update
    sums: defaultdict[tuple[int, int], list[object]] = defaultdict(list)  # by stage and version of the update
    tied: dict[tuple[int, int, int], object] = {}  # to stage, from stage, version
    norms: list[dict[tuple[int, int], object]] = [{} for _ in range(schedule.ranks)]
    saved: dict[tuple[int, int], object] = {}
    halves: dict[tuple[int, int], object] = {}  # what a weight part still needs
    made: dict[tuple[int, int, int], object] = {}  # by stage, to stage, microbatch
    queues: defaultdict[tuple[int, int], deque[object]] = defaultdict(deque)
    position = [0] * schedule.ranks
    blocked = False

    def recall(rank: int, stages: range, version: int) -> list[object]:
        """The norms of `stages`: of one here, as its gradients are now, else what this rank has received."""
        here = schedule.stages_of(rank)
        return [tuple(sums[of, version]) if of in here else norms[rank][of, version] for of in stages]

    while not blocked:
        blocked = True
        for rank, row in enumerate(programs):
            while position[rank] < len(row):
                match row[position[rank]]:
                    case Forward(s, k, version):
                        saved[s, k] = made.pop((s - 1, s, k)) if s else ("input", k)
                        weights = slots[s][version % len(slots[s])]
                        made[s, s + 1, k] = hash(("forward", weights, saved[s, k]))
                    case Backward(s, k, version):
                        upstream = made.pop((s + 1, s, k)) if s < last else ("loss", made.pop((s, s + 1, k)))
                        weights = slots[s][version % len(slots[s])]
                        gradient = hash(("backward", weights, saved.pop((s, k)), upstream))
                        made[s, s - 1, k] = gradient
                        sums[s, k // size + 1].append(gradient)
                    case BackwardInput(s, k, version):
                        upstream = made.pop((s + 1, s, k)) if s < last else ("loss", made.pop((s, s + 1, k)))
                        weights = slots[s][version % len(slots[s])]
                        made[s, s - 1, k] = hash(("backward", weights, saved[s, k], upstream))
                        halves[s, k] = upstream
                    case BackwardWeight(s, k, version):
                        weights = slots[s][version % len(slots[s])]
                        gradient = hash(("backward", weights, saved.pop((s, k)), halves.pop((s, k))))
                        sums[s, k // size + 1].append(gradient)
                    case Update(s, version, _):
                        before = slots[s][newest[s] % len(slots[s])]
                        parts = {s: tuple(sums[s, version])}
                        for other in partners(s, schedule.ties):
                            here = rank == schedule.rank_of(other)
                            parts[other] = tuple(sums[other, version]) if here else tied.pop((s, other, version))  # type: ignore[assignment]
                        known = tuple(recall(rank, stages, version)) if schedule.norms else ()
                        made_of = tuple(parts[stage] for stage in sorted(parts))
                        slots[s][version % len(slots[s])] = hash(("update", before, made_of, known))
                        newest[s] = version
                    case SendTied(s, version, target):
                        queues[rank, schedule.rank_of(target)].append(tuple(sums[s, version]))
                    case SendNorms(s, version, target):
                        reported = recall(rank, carried_norms(schedule.stages, s, target), version)
                        queues[rank, schedule.rank_of(target)].append(reported)
                    case Send(s, k, target):
                        queues[rank, schedule.rank_of(target)].append(made.pop((s, target, k)))
                    case Receive(s, k, source) | ReceiveTied(s, k, source) | ReceiveNorms(s, k, source) as action:
                        queue = queues[schedule.rank_of(source), rank]
                        if not queue:
                            break
                        if isinstance(action, ReceiveTied):
                            tied[s, source, k] = queue.popleft()
                        elif isinstance(action, ReceiveNorms):
                            names = [(of, k) for of in carried_norms(schedule.stages, source, s)]
                            norms[rank].update(zip(names, queue.popleft(), strict=True))  # type: ignore[call-overload]
                        else:
                            made[source, s, k] = queue.popleft()
                position[rank] += 1
                blocked = False
    assert position == [len(row) for row in programs]
    assert not saved and not halves and not any(queues.values()) and not tied
    assert all(version <= newest[s] for s, version in sums)
    return [slots[s][newest[s] % len(slots[s])] for s in stages]


def promised_weights(schedule: Schedule, minibatches: int) -> list[object]:
    """What the method means, microbatch by microbatch in a single process (specs sections 2.4, 3.1 and 3.2)."""
    p, m = schedule.stages, schedule.microbatches
    weights: list[list[object]] = [[("initial", s)] for s in range(p)]
    sums: list[list[object]] = [[] for _ in range(p)]
    summed: list[list[object]] = [[] for _ in range(p)]
    every = 1 if schedule.method == "pipedream" else m
    for k in range(minibatches * m):
        if schedule.method == "pipedream":
            versions = [max(0, k - (p - 1 - (0 if schedule.vertical_sync else s))) for s in range(p)]
        else:
            versions = [max(k // m - (schedule.method == "2bw"), 0)] * p
        read = [weights[s][versions[s]] for s in range(p)]
        inputs: list[object] = [("input", k)]
        for s in range(p):
            inputs.append(hash(("forward", read[s], inputs[s])))
        upstream: object = ("loss", inputs[p])
        for s in reversed(range(p)):
            upstream = hash(("backward", read[s], inputs[s], upstream))
            sums[s].append(upstream)
        if (k + 1) % every == 0:
            for s in range(p):
                summed[s].append(tuple(sums[s]))
                sums[s] = []
            for s in range(p):
                sharing = {s, *(other for group in schedule.ties if s in group for other in group)}
                made_of = tuple(summed[stage][-1] for stage in sorted(sharing))
                known = tuple(parts[-1] for parts in summed) if schedule.norms else ()
                weights[s].append(hash(("update", weights[s][-1], made_of, known)))
    return [versions[-1] for versions in weights]


@settings(max_examples=80, deadline=None)
@given(st.one_of(schedules(6, 12), waiting_schedules(5, 8)), st.integers(1, 4))
def test_programs_come_to_the_promised_weights(schedule: Schedule, minibatches: int) -> None:
    assert interpret(schedule.program(minibatches), schedule) == promised_weights(schedule, minibatches)


def mutate(data: st.DataObject, programs: Programs) -> Programs:
    rows = [list(row) for row in programs]
    row = data.draw(st.sampled_from([row for row in rows if row]))
    place = data.draw(st.integers(0, len(row) - 1))
    other = data.draw(st.integers(max(0, place - 4), min(len(row) - 1, place + 4)))
    match data.draw(st.sampled_from(["swap", "swap", "move", "drop", "repeat"])):
        case "swap":
            row[place], row[other] = row[other], row[place]
        case "move":
            row.insert(other, row.pop(place))
        case "drop":
            row.pop(place)
        case "repeat":
            row.insert(other, row[place])
    return tuple(map(tuple, rows))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.one_of(schedules(3, 4), waiting_schedules(3, 4)), st.integers(1, 3), st.integers(1, 2), st.data())
def test_what_passes_is_right(schedule: Schedule, minibatches: int, times: int, data: st.DataObject) -> None:
    """Whatever is done to a program: if the verifier accepts it, it runs to its end and to the promised weights."""
    programs = schedule.program(minibatches)
    for _ in range(times):
        programs = mutate(data, programs)
    try:
        verify_programs(programs, schedule, minibatches)
    except ScheduleError:
        return
    assert interpret(programs, schedule) == promised_weights(schedule, minibatches)


SMALL = [
    Schedule("gpipe", 2, 2),
    Schedule("1f1b-flush", 3, 2),
    Schedule("pipedream", 3, 2),
    Schedule("pipedream", 2, 1, vertical_sync=True),
    Schedule("2bw", 2, 2),
    Schedule("interleaved", 2, 2, 2),
    Schedule("zb-h1", 2, 2),
    Schedule("zb-h1", 3, 2, ties=((0, 2),), norms=True),
    Schedule("zb-v", 2, 2, 2),
    Schedule("zb-v", 2, 3, 2, ties=((0, 2),), norms=True),
    Schedule("2bw", 2, 2, ties=((0, 1),)),
    Schedule("2bw", 3, 3, ties=((0, 2),), norms=True),
    Schedule("interleaved", 2, 2, 2, ties=((0, 3),), norms=True),
]


def ident(schedule: Schedule) -> str:
    facts = {"sync": schedule.vertical_sync, "tied": schedule.ties, "norms": schedule.norms}
    return "-".join([schedule.name, str(schedule.ranks), *(name for name, there in facts.items() if there)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SMALL, ids=ident)
def test_no_action_can_be_dropped_or_repeated_and_no_number_changed(schedule: Schedule) -> None:
    """Every single one, in three minibatches, or in two where a minibatch begins when the one before it has ended."""
    minibatches = 3 if schedule.method in ("pipedream", "2bw") else 2
    programs = schedule.program(minibatches)
    for rank, row in enumerate(programs):
        for index, action in enumerate(row):
            text = str(action)
            others = [(), (action, action)]
            for number in re.finditer(r"\d+", text):
                for value in {int(number[0]) + 1, max(int(number[0]) - 1, 0)} - {int(number[0])}:
                    others.append(parse_programs(f"{text[: number.start()]}{value}{text[number.end() :]}")[0])
            for instead in others:
                broken = (*programs[:rank], (*row[:index], *instead, *row[index + 1 :]), *programs[rank + 1 :])
                with pytest.raises(ScheduleError):
                    verify_programs(broken, schedule, minibatches)
