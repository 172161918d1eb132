"""Programs as tables: one row for each rank, one word for each action, and the time at which each starts."""

import inspect
from fractions import Fraction

from penstock.scheduling.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Receive, Send, Update
from penstock.scheduling.schedules import Programs

Start = tuple[Action, Fraction]


def run_clock(
    programs: Programs,
    forward: Fraction = Fraction(1),
    backward: Fraction = Fraction(1),
    weight: Fraction = Fraction(0),
) -> list[list[Start]]:
    """When each compute action of each rank starts, if messages and updates take no time; `weight` of `backward`."""
    seconds = {
        Forward: forward,
        Backward: backward,
        BackwardInput: backward - weight,
        BackwardWeight: weight,
        Update: Fraction(0),
    }
    position = [0] * len(programs)
    clock = [Fraction(0)] * len(programs)
    arrival: dict[tuple[int, int, int], Fraction] = {}
    starts: list[list[Start]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(programs):
            while position[rank] < len(row):
                action = row[position[rank]]
                match action:
                    case Receive(stage, microbatch, source):
                        if (source, stage, microbatch) not in arrival:
                            break
                        clock[rank] = max(clock[rank], arrival[source, stage, microbatch])
                    case Send(stage, microbatch, target):
                        arrival[stage, target, microbatch] = clock[rank]
                    case Forward() | Backward() | BackwardInput() | BackwardWeight() | Update():
                        starts[rank].append((action, clock[rank]))
                        clock[rank] += seconds[type(action)]
                position[rank] += 1
                moved = True
    assert position == [len(row) for row in programs]
    return starts


def drawn_table(module) -> list[str]:
    """The table that is drawn in the comment above the order."""
    lines = inspect.getsource(module).splitlines()
    return [" ".join(line[1:].split()) for line in lines if line.startswith("#   rank")]


def short(action: Action) -> str:
    match action:
        case Forward(microbatch=k):
            return f"F{k}"
        case Backward(microbatch=k):
            return f"B{k}"
        case BackwardInput(microbatch=k):
            return f"I{k}"
        case BackwardWeight(microbatch=k):
            return f"W{k}"
        case Update(version=k):
            return f"U{k}"
        case _:
            return ""


def with_stage(action: Action) -> str:
    return f"{action.stage}{short(action)}"
