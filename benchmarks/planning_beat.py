"""Tries to beat `penstock.plan`: with random plans and hill climbing, and with the plan's own constraints.

    python benchmarks/planning_beat.py --data DIR --save benchmarks/results/planning-beat.txt

Two tables, one line per case. *rivals*: for every profile, link rate and machine, the samples per second of the answer,
and of the best of random plans and of hill climbing from the best random plan and from the answer, relative to that of
the answer. *wishes*: the same for the answers under constraints. Both are judged by the simulator; above 1.02 a rival
wins. The lines are written as they come, so that a run that was stopped continues where it was; `--sample N` takes
every N-th case.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
from measurement.reports import Report, option_parser
from penstock.errors import PenstockError
from penstock.scheduling.schedule_names import SCHEDULES
from penstock.values.clusters import Cluster
from penstock.values.profiles import Profile
from planners.profiles import load_profiles
from planners.rivals import Judge, climb, random_plan

RATES = (1, 10, 25, 100)
"""Gbit/s of the links, between the servers where there are any."""
MACHINES = ("4", "8", "16", "2x4", "4x4")
INNER = 12e9
"""Bytes per second inside a server."""
WON = 1.02
WISHES: tuple[dict[str, Any], ...] = (
    *({"schedule": name} for name in SCHEDULES),
    {"straight": True},
    {"synchronous": True},
    {"whole_backwards": True},
    {"recompute": True},
    {"synchronous": True, "straight": True},
    {"schedule": "1f1b-flush", "straight": True},
    {"schedule": "pipedream", "straight": True},
    {"schedule": "2bw", "straight": True},
    {"stages": 2},
    {"stages": 4},
)


def machine(name: str, gigabits: float) -> Cluster:
    """``8``: 8 devices; ``2x4``: 2 servers of 4."""
    if "x" not in name:
        return Cluster.uniform(int(name), gigabits * 1.25e8)
    servers, count = map(int, name.split("x"))
    return Cluster.hierarchical([(count, INNER), (servers, gigabits * 1.25e8)])


def cases(profiles: dict[str, Profile]) -> Iterator[tuple[str, str, int]]:
    for name in profiles:
        for kind in MACHINES:
            for gigabits in RATES:
                yield name, kind, gigabits


def rivals(profile: Profile, cluster: Cluster, draws: int, steps: int) -> dict[str, Any]:
    """The answer beside the best of `draws` random plans and of `steps` of hill climbing, half from either."""
    judge, draw = Judge(profile, cluster), random.Random(0)
    started = time.process_time()
    answer = penstock.plan(profile, cluster)
    seconds = time.process_time() - started
    rate = judge.rate
    own = rate(answer)
    drawn = (random_plan(draw, profile, cluster) for _ in range(draws))
    best = max(filter(None, drawn), key=rate)
    climbed = [climb(start, judge, draw, steps // 2, profile, cluster) for start in (best, answer)]
    found = max([best, *climbed], key=rate)
    return {
        "plan": shape(answer),
        "samples_per_second": own,
        "processor_seconds": seconds,
        "random": rate(best) / own,
        "from_random": rate(climbed[0]) / own,
        "from_answer": rate(climbed[1]) / own,
        "rival": shape(found) if rate(found) > WON * own else "",
        "simulated": judge.simulated,
    }


def wishes(profile: Profile, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The answers under each constraint, relative to the answer without."""
    free = penstock.plan(profile, cluster)
    assert free.predicted is not None
    for wish in WISHES:
        row: dict[str, Any] = {"wish": " ".join(f"{key}={value}" for key, value in wish.items())}
        try:
            made = penstock.plan(profile, cluster, **wish)
        except PenstockError as error:
            yield {**row, "refused": str(error).splitlines()[0]}
            continue
        assert made.predicted is not None
        kept = all(getattr(made, name) == wish[name] for name in ("schedule", "recompute") if name in wish)
        kept = kept and wish.get("stages") in (None, len(made.stages))
        ratio = made.predicted.samples_per_second / free.predicted.samples_per_second
        yield {**row, "plan": shape(made), "free": shape(free), "ratio": ratio, "kept": kept}


def shape(plan: penstock.Plan) -> str:
    counts = "-".join(map(str, plan.replicas)) if len(plan.stages) <= 8 else f"{len(plan.stages)} stages"
    return f"{plan.schedule} {counts} at {[stage.stop for stage in plan.stages[:-1]]}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    beaten = [row for row in rows if row["table"] == "rivals"]
    if beaten:
        worst = [max(row[key] for row in beaten) for key in ("random", "from_random", "from_answer")]
        won = [row for row in beaten if row["rival"]]
        slow = max(row["processor_seconds"] for row in beaten)
        yield (
            f"rivals: {len(beaten)} cases, {len(won)} beaten by more than 2 %; most: random {worst[0]:.3f}, climbing "
            f"from random {worst[1]:.3f}, from the answer {worst[2]:.3f}; planning took at most {slow:.2f} s of the "
            "processor"
        )
        for row in won:
            most = max(row["random"], row["from_random"], row["from_answer"])
            yield f"  {row['case']}: {row['plan']} loses to {row['rival']} by {most:.3f}"
    wished = [row for row in rows if row["table"] == "wishes" and "ratio" in row]
    if wished:
        faster = [row for row in wished if row["ratio"] > 1.001]
        lost = [row for row in wished if not row["kept"]]
        yield (
            f"wishes: {len(wished)} pairs, {len(faster)} faster than without the wish by more than 0.1 % (most "
            f"{max(row['ratio'] for row in wished):.4f}), {len(lost)} not kept"
        )
        for row in [*faster, *lost]:
            yield f"  {row['case']}, {row['wish']}: {row['plan']} is {row['ratio']:.4f} of {row['free']}"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, help="the folder with dnn-partitioning/ and piper/")
    parser.add_argument("--profiles", nargs="*", default=[])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sample", type=int, default=1, help="take every N-th case")
    parser.add_argument("--tables", nargs="*", default=["rivals", "wishes"], choices=["rivals", "wishes"])
    parser.add_argument("--machines", nargs="*", default=MACHINES, choices=MACHINES)
    options = parser.parse_args()
    profiles = load_profiles(options.data, options.profiles)
    lines = options.save.with_suffix(".jsonl") if options.save else None
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines and lines.exists() else []
    known = {(row["table"], row["case"]) for row in rows}
    for number, (name, kind, gigabits) in enumerate(cases(profiles)):
        case = f"{name}, {kind} at {gigabits} Gbit/s"
        for table in options.tables:
            if number % options.sample or kind not in options.machines or (table, case) in known:
                continue
            profile, cluster = profiles[name], machine(kind, gigabits)
            if table == "rivals":
                made = [rivals(profile, cluster, options.draws, options.steps)]
            else:
                made = list(wishes(profile, cluster))
            new = [{"table": table, "case": case, **row} for row in made]
            rows += new
            if lines:
                with lines.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
            for row in new:
                print(json.dumps(row), file=sys.stderr, flush=True)
    Report(options.save).add(f"$ python benchmarks/planning_beat.py {' '.join(sys.argv[1:])}", *summary(rows))


if __name__ == "__main__":
    main()
