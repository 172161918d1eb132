"""Tries to beat `penstock.plan` with random plans and hill climbing.

    python benchmarks/planning_beat.py --data DIR --save benchmarks/results/planning-beat.txt

For every profile, link rate and machine: the samples per second of the answer, and of the best of random plans and of
hill climbing from the best random plan and from the answer, relative to that of the answer. The simulator judges all of
them; above 1.02 a rival wins. Lines are written to a `.jsonl` beside the text as they come, so that a run that was
stopped continues where it was; `--sample N` takes every N-th case.
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


def shape(plan: penstock.Plan) -> str:
    counts = "-".join(map(str, plan.replicas)) if len(plan.stages) <= 8 else f"{len(plan.stages)} stages"
    return f"{plan.schedule} {counts} at {[stage.stop for stage in plan.stages[:-1]]}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    worst = [max(row[key] for row in rows) for key in ("random", "from_random", "from_answer")]
    won = [row for row in rows if row["rival"]]
    slow = max(row["processor_seconds"] for row in rows)
    yield (
        f"{len(rows)} cases, {len(won)} beaten by more than 2 %; most: random {worst[0]:.3f}, climbing from random "
        f"{worst[1]:.3f}, from the answer {worst[2]:.3f}; planning took at most {slow:.2f} s of the processor"
    )
    for row in won:
        most = max(row["random"], row["from_random"], row["from_answer"])
        yield f"  {row['case']}: {row['plan']} loses to {row['rival']} by {most:.3f}"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, help="the folder with dnn-partitioning/ and piper/")
    parser.add_argument("--profiles", nargs="*", default=[])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sample", type=int, default=1, help="take every N-th case")
    parser.add_argument("--machines", nargs="*", default=MACHINES, choices=MACHINES)
    options = parser.parse_args()
    profiles = load_profiles(options.data, options.profiles)
    lines = options.save.with_suffix(".jsonl") if options.save else None
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines and lines.exists() else []
    known = {row["case"] for row in rows}
    for number, (name, kind, gigabits) in enumerate(cases(profiles)):
        case = f"{name}, {kind} at {gigabits} Gbit/s"
        if number % options.sample or kind not in options.machines or case in known:
            continue
        rows.append({"case": case, **rivals(profiles[name], machine(kind, gigabits), options.draws, options.steps)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if lines:
            with lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    Report(options.save).add(f"$ python benchmarks/planning_beat.py {' '.join(sys.argv[1:])}", *summary(rows))


if __name__ == "__main__":
    main()
