"""Sets predicted seconds and bytes beside those that Sailor's authors measured, on up to 256 GPUs.

    python benchmarks/sailor.py --data DIR --save benchmarks/results/sailor.txt

DIR/sailor/sailor.json has plans, layer times and links of eth-easl/sailor at cf2c8e3 (MIT, Copyright (c) 2023 - present
ETH Zurich; Strati et al., SOSP 2025). Two of its 27 plans cannot be right: their all-reduces take the same 1.06094 s.
A rank is a GPU. Layers take the seconds that were measured, with tensor parallelism and update. As the sizes say, each
GPU of a group sends its whole output, at the group's fitted rate for as many bytes; at 494eaa5 the runtime sends parts,
for which a line stands below. Its messages and all-reduces block, it holds 24 bytes for a parameter, and 5.06 GB of a
GPU are its context. Nothing is fitted to the plans.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from measurement.reports import Report, option_parser, table
from penstock.simulating import Outcome, evaluate
from penstock.values.clusters import Cluster
from penstock.values.link_tables import FREE, LinkLevels, MessageCosts
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile

BROKEN = "GPT-NEO/N4/N4_D4", "OPT-350/N4/N4_D4"
NUMBER_BYTES, CONTEXT_BYTES = 4, 5.06e9
OPTIMIZER_COPIES = 24 / NUMBER_BYTES - 2
"""Beside the parameter and its gradient."""

Record: TypeAlias = Mapping[str, Any]


def predict(record: Record, data: Record, *, parts: int = 1, blocking: float = 1.0) -> Outcome:
    """The outcome of one plan. `parts`: in how many a group cuts what it sends. `blocking`: of `MessageCosts`."""
    nodes, size = record["nodes"], record["mbs"]
    gpu, width = nodes[0][0]
    times = data["times"][f"{record['model']}/{gpu}/{size}/{width}"]
    numbers = data["memory"][f"{record['model']}/{width}"]
    layers = []
    for (forward, backward, update), (parameters, sent, kept) in zip(times, numbers, strict=True):
        sizes = (NUMBER_BYTES * each for each in (size * sent / parts, size * kept, parameters))
        layers.append(LayerProfile("", forward, backward, *sizes, update_seconds=update))
    profile = Profile(tuple(layers), size, record["model"], tensor_parallel=width, library_bytes=CONTEXT_BYTES)
    ends = [sum(record["cuts"][:stage]) for stage in range(len(nodes) + 1)]
    ranks = [
        tuple(width * (len(nodes) * replica + stage) + each for replica in range(len(row)) for each in range(width))
        for stage, row in enumerate(nodes)
    ]
    stages = tuple(map(Stage, ends, ends[1:], ranks))
    plan = Plan(stages, "1f1b-flush", record["gbs"] // size, size, tensor_parallel=width)
    rate = 0.0
    for coefficient in data["links"][f"{gpu}/{width}/{gpu}/{width}"]:
        rate = rate * math.log2(width * layers[0].cut_bytes / 1e6) + coefficient
    levels = (width, math.inf), (plan.ranks // width, 1e9 * rate / width)
    cluster = Cluster(LinkLevels(levels, message_costs=(FREE, MessageCosts(blocking=blocking))))
    return evaluate(plan, profile, cluster, optimizer_copies=OPTIMIZER_COPIES)


def summary(seconds: Sequence[float], records: Sequence[Record]) -> str:
    """Errors, and the order of the plans of each cluster for the same minibatch."""
    alike = defaultdict(list)
    for record, own in zip(records, seconds, strict=True):
        alike[record["model"], sum(map(len, record["nodes"])), record["gbs"]].append((record["seconds"], own))
    several = [own for own in alike.values() if len(own) > 1]
    pairs = [(one < other, mine < its) for own in several for (one, mine), (other, its) in combinations(own, 2)]
    won = [min(own)[1] == min(mine for _, mine in own) for own in several]
    found = [abs(own / record["seconds"] - 1) for own, record in zip(seconds, records, strict=True)]
    return (
        f"seconds off by {mean(found):.2%} in the mean, {median(found):.2%} in the median; "
        f"{sum(a == b for a, b in pairs)} of {len(pairs)} pairs in the right order, {sum(won)} of {len(won)} winners"
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with sailor/sailor.json")
    options = parser.parse_args()
    data = json.loads((options.data / "sailor" / "sailor.json").read_text())
    records = [record for record in data["plans"] if not record["name"].endswith(BROKEN)]
    found = [predict(record, data) for record in records]
    rows, sizes = [], []
    for record, own in zip(records, found, strict=True):
        sizes.append(max(own.peak_bytes) / record["bytes"] - 1)
        off = own.minibatch_seconds / record["seconds"] - 1
        numbers = f"{record['seconds']:.4f} {own.minibatch_seconds:.4f} {off:+.1%}".split()
        peaks = f"{record['bytes'] / 1e9:.2f} {max(own.peak_bytes) / 1e9:.2f} {sizes[-1]:+.1%}".split()
        rows.append([record["name"].removeprefix("clariden/"), *numbers, *peaks])
    seconds = [own.minibatch_seconds for own in found]
    free = [predict(record, data, blocking=0.0).minibatch_seconds for record in records]
    cut = [predict(record, data, parts=record["nodes"][0][0][1]).minibatch_seconds for record in records]
    Report(options.save).add(
        table(["plan", "measured s", "predicted", "", "measured GB", "predicted", ""], rows),
        f"\n{summary(seconds, records)}",
        f"bytes off by {mean(map(abs, sizes)):.2%} in the mean, {median(map(abs, sizes)):.2%} in the median",
        f"if no message blocked: {summary(free, records)}",
        f"if each GPU sent its part of the output: {summary(cut, records)}",
    )


if __name__ == "__main__":
    main()
