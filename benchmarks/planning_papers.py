"""Prints what Penstock plans and predicts beside what the papers printed; docs/papers.md sums the tables up.

    python benchmarks/planning_papers.py --data DIR --save benchmarks/results/planning-papers.txt

Sources: PipeDream (SOSP'19, table 1) and the thesis (chapters 2 and 3); SPP (INFOCOM 2022, table III); the optima that
dnn-partitioning publishes for its graphs. Without DIR, what needs the graphs of dnn-partitioning is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from measurement.reports import Report, option_parser, table
from penstock.errors import PlanError
from penstock.planning.predictions import slowest_seconds
from penstock.planning.requests import Request
from penstock.planning.stage_costs import AllReduce, chain_costs
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile
from planners.baselines import plan_data_parallel, plan_gpipe, plan_hetpipe, plan_synchronous_pipedream
from planners.profiles import load_profiles
from planners.single_planners import partition, plan_pipedream, plan_spp

FLAT_A = Cluster.uniform(16, 1.25e9)
FLAT_B = Cluster.uniform(16, 3.125e9)
A = Cluster.hierarchical([(4, 12e9), (4, 1.25e9)])
A3 = Cluster.hierarchical([(4, 12e9), (3, 1.25e9)])
A1 = Cluster.uniform(4, 12e9)
B = Cluster.hierarchical([(8, 25e9), (2, 3.125e9)])
MODELS: tuple[AllReduce, ...] = ("shared", "released", "ring")

TESTBEDS = {
    "4 servers x 2, 50 Gbps": Cluster.hierarchical([(2, 16e9), (4, 6.25e9)]),
    "1 server x 4, 128 Gbps": Cluster.uniform(4, 16e9),
}
"""SPP's. The links inside the first one's servers are not printed: the second one's PCIe is taken."""

DNN_BYTES_PER_SECOND = 2.0**31 * 1e3
"""What the edges of dnn-partitioning cost: a millisecond for 2^31 bytes."""


@dataclass(frozen=True, slots=True)
class Published:
    """A row of PipeDream's table 1: its configuration and its speed-up over data parallelism."""

    model: str
    samples: int | None
    """Of a minibatch; None leaves the profile's."""
    machine: str
    cluster: Cluster
    replicas: str
    speedup: str


PUBLISHED = (
    Published("vgg16", 64, "4x4 A", A, "15-1", "5.28"),
    Published("vgg16", 64, "flat 16 at 10 Gbps", FLAT_A, "15-1", "5.28"),
    Published("vgg16", 128, "flat 16 at 10 Gbps", FLAT_A, "15-1", "5.28"),
    Published("vgg16", 64, "2x8 B", B, "15-1", "2.98"),
    Published("vgg16", 128, "flat 16 at 25 Gbps", FLAT_B, "15-1", "2.98"),
    Published("resnet50", None, "4x4 A", A, "16", "1"),
    Published("resnet50", None, "2x8 B", B, "16", "1"),
    Published("gnmt", None, "1x4 A", A1, "straight", "1.5"),
    Published("gnmt", None, "3x4 A", A3, "straight", "2.95"),
    Published("gnmt", None, "2x8 B", B, "16", "1"),
)


def pipedream(profiles: dict[str, Profile]) -> str:
    """Configurations, and speed-ups over data parallelism by the planner's own costs and by the simulator."""
    rows = []
    for row in PUBLISHED:
        profile = profiles[row.model]
        profile = profile if row.samples is None else profile.scaled(row.samples)
        for model in MODELS:
            plan = partition(profile, row.cluster, allreduce=model)
            everywhere = (Stage(0, len(profile), tuple(range(row.cluster.devices))),)
            costs = chain_costs(profile)
            alone = slowest_seconds(everywhere, costs, row.cluster, model)
            found = slowest_seconds(plan.stages, costs, row.cluster, model)
            simulated = "-" if model == "released" else f"{over_data_parallel(plan, profile, row.cluster, model):.2f}"
            what = [row.model, str(profile.microbatch_size), row.machine, row.replicas, row.speedup, model]
            rows.append([*what, short(plan), f"{found:.5f}", f"{alone / found:.2f}", simulated])
    head = ["model", "batch", "machine", "paper", "speed-up", "cost", "planned", "slowest s", "speed-up", "simulated"]
    return table(head, rows)


def over_data_parallel(plan: Plan, profile: Profile, cluster: Cluster, allreduce: AllReduce) -> float:
    """Samples per second of `plan` over those of one stage on all devices, which updates after every round."""
    medium = "shared" if allreduce == "shared" else "ring"
    devices = cluster.devices
    stage = Stage(0, len(profile), tuple(range(devices)))
    everywhere = Plan((stage,), "1f1b-flush", devices, profile.microbatch_size)
    rates = [evaluate(one, profile, cluster, allreduce=medium).samples_per_second for one in (plan, everywhere)]  # type: ignore[arg-type]
    return rates[0] / rates[1]


def short(plan: Plan) -> str:
    """The replicas; runs of single devices are counted: ``1*8-3-1``."""
    counts = [len(stage.ranks) for stage in plan.stages]
    parts: list[str] = []
    while counts:
        run = next((index for index, count in enumerate(counts) if count != counts[0]), len(counts))
        parts.append(f"{counts[0]}*{run}" if run > 3 else "-".join([str(counts[0])] * run))
        counts = counts[run:]
    return "-".join(parts)


SPP_ROWS = (
    ("vgg16", 32, 8, "VGG19", (("60.2", "17.9", "8.3", "49.9"), ("26.7", "2.1", "4.2", "-"))),
    ("resnet50", 4, 4, "ResNet152", (("22.4", "65.8", "OOM", "15.2"), ("45.3", "25.1", "4.9", "-"))),
    ("dnn/bert24", 1, 4, "BERT-large", (("28.1", "15.4", "2.9", "28.4"), ("138.3", "74.9", "13.9", "-"))),
)
"""Ours, samples of a microbatch, microbatches; theirs, and SPP's speed-ups over the baselines, percent, per testbed."""


def spp(profiles: dict[str, Profile]) -> str:
    """SPP beside its baselines, simulated, with table III's speed-ups of the nearest model."""
    rows = []
    for name, size, microbatches, theirs, printed in SPP_ROWS:
        if name not in profiles:
            continue
        profile = profiles[name].scaled(size)
        for (testbed, cluster), published in zip(TESTBEDS.items(), printed, strict=True):
            request = Request(schedule="1f1b-flush", microbatches=microbatches)
            own = plan_spp(profile, cluster, request)
            seconds = evaluate(own, profile, cluster).minibatch_seconds
            row = [name, f"{microbatches} x {size}", testbed, f"{seconds:.4f}", short(own)]
            makers = (plan_data_parallel, plan_gpipe, plan_synchronous_pipedream, plan_hetpipe)
            for make, percent in zip(makers, published, strict=True):
                try:
                    other = make(profile, cluster, request)
                except PlanError:
                    row += ["-"]
                    continue
                slower = evaluate(other, profile, cluster).minibatch_seconds / seconds - 1
                row += [f"{slower:+.1%} ({percent})"]
            rows.append([*row, theirs])
    head = ["model", "m x b", "testbed", "SPP s", "SPP plan", "DP", "GPipe", "PipeDream", "HetPipe", "theirs"]
    return table(head, rows)


OPTIMA = (("dnn/bert24", 41.7458, "49.40"), ("dnn/resnet50", 78.6318, "112.11"))


def optima(profiles: dict[str, Profile]) -> str:
    """The least maximum load on six devices, ms: by our partitioner, and with loads that add what crosses the cuts."""
    rows = []
    six = Cluster.uniform(6, DNN_BYTES_PER_SECOND)
    for name, optimum, expert in OPTIMA:
        if name in profiles:
            plan = partition(profiles[name], six, straight=True, stages=6)
            assert plan.predicted is not None
            ours, added = plan.predicted.bottleneck_seconds * 1e3, least_load(profiles[name], 6) * 1e3
            rows.append([name, f"{optimum}", expert, f"{ours:.4f}", f"{added:.4f}", f"{added / optimum - 1:+.3%}"])
    return table(["graph", "published", "expert", "partition", "loads added up", "difference"], rows)


def least_load(profile: Profile, devices: int) -> float:
    """The least maximum of compute plus what crosses both cuts, there and back; any number of stages to `devices`."""
    costs, count = chain_costs(profile), len(profile)
    crossing = costs.exchange_seconds(DNN_BYTES_PER_SECOND)
    best = [0.0] + [inf] * count
    for _ in range(devices):
        best = [0.0] + [
            min(
                max(best[start], float(costs.seconds[start, stop] + crossing[start] + crossing[stop]))
                for start in range(stop)
            )
            for stop in range(1, count + 1)
        ]
    return best[count]


def gpipe_slowdowns(profiles: dict[str, Profile]) -> str:
    """GPipe beside 1F1B on the same stages without replicas, 16 devices: thesis 2.5.4."""
    rows = []
    for machine, cluster, noam, most in (("4x4 A", A, "55%", "35%"), ("2x8 B", B, "71%", "42%")):
        profile = profiles["gnmt"]
        busy = plan_pipedream(profile, cluster, Request(schedule="pipedream", straight=True))
        rate = evaluate(busy, profile, cluster).samples_per_second
        for microbatches in (16, 32, 64):
            flushed = Request(schedule="gpipe", microbatches=microbatches).arrange(busy.stages, profile)
            slower = 1 - evaluate(flushed, profile, cluster).samples_per_second / rate
            rows.append(
                [machine, str(microbatches), f"{slower:.0%}", noam if microbatches == 16 else f"{most} at most m"]
            )
    return table(["machine", "m", "fewer samples/s", "thesis, GNMT-16"], rows)


def beside_model_parallel(profiles: dict[str, Profile]) -> str:
    """Pipelining alone, and with replicas, over model parallelism (one microbatch at a time): thesis 2.5.3, 3.4.2."""
    rows = []
    cases = [("vgg16", A1, "14.9 with replicas"), ("resnet50", A1, ""), ("gnmt", A1, "")]
    cases += [("dnn/bert24", Cluster.uniform(8, 12e9), "flush 4.1 to 5.3, 2BW to 6.1 (GPT 2.2 billion)")]
    for name, cluster, printed in cases:
        if name not in profiles:
            continue
        profile, devices = profiles[name], cluster.devices
        stages = plan_pipedream(profile, cluster, Request(schedule="pipedream", straight=True)).stages

        def rate(schedule: str, count: int, held: tuple[Stage, ...] = stages, profile: Profile = profile) -> float:
            plan = Request(schedule=schedule, microbatches=count).arrange(held, profile)
            return evaluate(plan, profile, cluster).samples_per_second  # noqa: B023 - called here

        alone = rate("gpipe", 1)
        best = partition(profile, cluster)
        shares = [rate("gpipe", devices), rate("1f1b-flush", devices), rate("1f1b-flush", 4 * devices)]
        shares += [rate("pipedream", 1), rate("2bw", devices), rate("pipedream", 1, best.stages)]
        row = [name, str(devices), *(f"{share / alone:.2f}" for share in shares)]
        rows.append([*row, short(best), printed])
    flushed = ["gpipe m=p", "flush m=p", "flush m=4p"]
    return table(["model", "devices", *flushed, "pipedream", "2bw", "pipedream, replicas", "plan", "thesis"], rows)


def sections(profiles: dict[str, Profile]) -> Iterator[tuple[str, str]]:
    yield "PIPEDREAM, table 1 (speed-up: over data parallelism)", pipedream(profiles)
    yield "SPP, table III (how much longer a minibatch takes than SPP's; in brackets theirs, percent)", spp(profiles)
    yield "DNN-PARTITIONING, training on six devices, ms", optima(profiles)
    yield "THESIS 2.5.4: GPipe beside 1F1B, GNMT-8, 16 stages", gpipe_slowdowns(profiles)
    yield "THESIS 2.5.3 and 3.4.2: speed-up over model parallelism", beside_model_parallel(profiles)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with dnn-partitioning/")
    options = parser.parse_args()
    names = ["vgg16", "resnet50", "gnmt"]
    names += ["dnn/bert24", "dnn/resnet50"] if options.data is not None else []
    report = Report(options.save)
    for title, text in sections(load_profiles(options.data, names)):
        report.add(title, f"{text}\n")


if __name__ == "__main__":
    main()
