"""Simulates tables and figures of the papers that no other script covers; docs/papers.md names them.

    python studies/papers_study.py
    python studies/papers_study.py --only table-5.3 table-6.3 --data DIR

Nothing is timed. Models are PipeDream's profiles of tests/data, or transformers by the cost model of `ptd-p`.
DIR holds the public data of stanford-futuredata/gavel (`simulation_throughputs.json`, and `max_min_fairness.trace` and
`minimize_makespan.trace` of its physical cluster) and training_on_a_dime, in folders `gavel` and `prices`.
"""

import ast
import csv
import json
import sys
import time
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fleet_figures as figures  # noqa: E402
import fleet_policies as fleets  # noqa: E402
from fleets.baselines import blind, gandiva  # noqa: E402
from fleets.workloads import poisson_workload, thesis_types  # noqa: E402
from measurement.reports import Report, conditions  # noqa: E402
from penstock.errors import PlanError  # noqa: E402
from penstock.fleet import Arrival, Job, Kind, fifo, max_min_fairness, min_makespan, simulate_fleet  # noqa: E402
from penstock.planning import find_order  # noqa: E402
from penstock.planning.predictions import prediction_of, slowest_seconds  # noqa: E402
from penstock.planning.ptd_p.accelerator_models import A100  # noqa: E402
from penstock.planning.ptd_p.parallel_configs import ConfigEstimate  # noqa: E402
from penstock.planning.ptd_p.three_d import ThreeDRequest, rank_three_d  # noqa: E402
from penstock.planning.ptd_p.transformer_costs import profile_of  # noqa: E402
from penstock.planning.requests import Request  # noqa: E402
from penstock.planning.stage_costs import chain_costs  # noqa: E402
from penstock.scheduling import define_by_programs  # noqa: E402
from penstock.simulating.outcomes import evaluate  # noqa: E402
from penstock.values.clusters import Cluster  # noqa: E402
from penstock.values.plans import Plan, Stage  # noqa: E402
from penstock.values.profiles import LayerProfile, Profile  # noqa: E402
from penstock.values.transformers import Transformer  # noqa: E402
from planners.baselines import plan_data_parallel, plan_gpipe, plan_hetpipe, plan_synchronous_pipedream  # noqa: E402
from planners.profiles import load_profiles  # noqa: E402
from planners.single_planners import partition, plan_spp  # noqa: E402

GIB = 2**30
V100 = replace(A100, name="V100", peak_operations=125e12, memory_bandwidth=0.9e12, half_wave=40 * 128 * 256)
FOUR, EIGHT = Cluster.uniform(4, 12e9), Cluster.uniform(8, float("inf"))
BASELINES = {
    "DP": plan_data_parallel,
    "GPipe": plan_gpipe,
    "PipeDream": plan_synchronous_pipedream,
    "HetPipe": plan_hetpipe,
}
MODELS = ("vgg16", "resnet50", "gnmt")


def everywhere(profile: Profile, devices: int) -> tuple[Stage, ...]:
    return (Stage(0, len(profile), tuple(range(devices))),)


def pipedream_16(data: Path | None) -> Iterator[str]:
    """Peak of the fullest of four stages over that of data parallelism. Optimizer: SGD with momentum."""
    for name, profile in load_profiles(data, list(MODELS)).items():
        plans = [
            partition(profile, FOUR, straight=True, stages=4),
            Plan(everywhere(profile, 4), "1f1b-flush", 4, profile.microbatch_size),
        ]
        most, alone = (max(evaluate(plan, profile, FOUR, optimizer_copies=1).peak_bytes) for plan in plans)
        yield f"{name}: four stages {most / 1e9:.2f} GB, data parallel {alone / 1e9:.2f} GB, ratio {most / alone:.2f}"


def pipedream_17(data: Path | None) -> Iterator[str]:
    """Bytes that all four devices send for a sample."""
    for name, profile in load_profiles(data, list(MODELS)).items():
        profile = profile.scaled(64) if name == "vgg16" else profile
        costs, size = chain_costs(profile), len(profile)
        plans = [partition(profile, FOUR, straight=True, stages=4).stages]
        plans += [
            (Stage(0, cut, tuple(range(first))), Stage(cut, size, tuple(range(first, 4))))
            for first in (1, 2, 3)
            for cut in range(1, size)
        ]
        best = min(plans, key=lambda stages, costs=costs: slowest_seconds(stages, costs, FOUR, "shared"))  # type: ignore[misc]
        whole, cut_up = sent(profile, everywhere(profile, 4)), sent(profile, best)
        replicas = "-".join(str(len(stage.ranks)) for stage in best)
        sizes = f"data parallel {whole / 1e6:.1f} MB, {replicas} {cut_up / 1e6:.1f} MB"
        yield f"{name}: {sizes}, ratio {cut_up / whole:.3f}"


def sent(profile: Profile, stages: tuple[Stage, ...]) -> float:
    """Activations and gradients over each cut, and a ring over the replicas of each stage, which take turns."""
    total = 0.0
    for stage in stages:
        weights = sum(layer.parameter_bytes for layer in profile.layers[stage.start : stage.stop])
        total += 2 * (len(stage.ranks) - 1) * weights / len(stage.ranks)
        total += 2 * profile.layers[stage.stop - 1].cut_bytes * (stage.stop < len(profile))
    return total / profile.microbatch_size


def figure_2_13(data: Path | None) -> Iterator[str]:
    """VGG-16 on 3-1: 1F1B over as many microbatches as replicas without a pipeline; and over a model cut four ways."""
    profile = load_profiles(data, ["vgg16"])["vgg16"].scaled(64)
    costs, size = chain_costs(profile), len(profile)
    plans = [(Stage(0, cut, (0, 1, 2)), Stage(cut, size, (3,))) for cut in range(1, size)]
    hybrid = min(plans, key=lambda stages: slowest_seconds(stages, costs, FOUR, "shared"))
    cut_up = partition(profile, FOUR, straight=True, stages=4).stages

    def rate(schedule: str, microbatches: int, stages: tuple[Stage, ...]) -> float:
        plan = Request(schedule=schedule, microbatches=microbatches).arrange(stages, profile)
        return evaluate(plan, profile, FOUR).samples_per_second

    best = rate("pipedream", 1, hybrid)
    yield f"3-1 over the same without a pipeline: {best / rate('gpipe', 3, hybrid):.1f}x"
    yield f"3-1 over model parallelism: {best / rate('gpipe', 1, cut_up):.1f}x"


def limited(limit: int, microbatches: int, ranks: int = 4) -> str:
    """Programs of a step in which the first stage has at most `limit` inputs in flight, and each later one fewer."""
    rows = []
    for rank in range(ranks):
        ahead = max(limit - rank, 1) - 1
        turns = [
            f"{rank}F{turn}@0 " * (turn < microbatches) + f"{rank}B{turn - ahead}@0 " * (turn >= ahead)
            for turn in range(microbatches + ahead)
        ]
        rows.append(f"rank {rank}: {''.join(turns)}{rank}U1<0")
    return "\n".join(rows)


def pipedream_18(data: Path | None) -> Iterator[str]:
    """GNMT-8 on four stages with one version of the weights. The rate is that between two lengths of a step."""
    profile = load_profiles(data, ["gnmt"])["gnmt"]
    stages = partition(profile, FOUR, straight=True, stages=4).stages
    for limit in (1, 2, 4, 7):
        found = []
        for microbatches in (16, 64):
            schedule = define_by_programs(f"limit-{limit}", limited(limit, microbatches))
            plan = Request(schedule=schedule, microbatches=microbatches).arrange(stages, profile)
            found.append(evaluate(plan, profile, FOUR, optimizer_copies=1))
        rate = 48 * profile.microbatch_size / (found[1].minibatch_seconds - found[0].minibatch_seconds)
        gigabytes = ", ".join(f"{peak / 1e9:.2f}" for peak in found[1].peak_bytes)
        yield f"{limit} in flight: {rate:.0f} samples per second, {gigabytes} GB"


def spp_row(label: str, profile: Profile, cluster: Cluster, microbatches: int) -> str:
    request = Request(schedule="1f1b-flush", microbatches=microbatches)
    own = evaluate(plan_spp(profile, cluster, request), profile, cluster).minibatch_seconds
    cells = []
    for name, make in BASELINES.items():
        try:
            other = evaluate(make(profile, cluster, request), profile, cluster).minibatch_seconds
        except PlanError:
            cells.append(f"{name} -")
            continue
        cells.append(f"{name} {other / own - 1:+.0%}")
    return f"{label}: SPP {own:.3f} s; longer than that: {', '.join(cells)}"


def servers(devices: int = 4, count: int = 8, gigabits: float = 36) -> Cluster:
    return Cluster.hierarchical([(devices, 16e9), (count, gigabits / 8 * 1e9)])


def bert(layers: int = 24) -> Profile:
    """BERT-large with sequences of 384 tokens, 6 in a microbatch, in 16 bits."""
    shape = Transformer(layers=layers, hidden=1024, heads=16, sequence=384, vocabulary=30522)
    return profile_of(shape, V100, servers(), microbatch_size=6)


def spp_6(data: Path | None) -> Iterator[str]:
    for microbatches in (8, 32, 64):
        yield spp_row(f"{microbatches} microbatches", bert(), servers(), microbatches)


def spp_7(data: Path | None) -> Iterator[str]:
    for gigabits in (10, 36, 100):
        yield spp_row(f"{gigabits} Gbit/s", bert(), servers(gigabits=gigabits), 32)


def spp_8(data: Path | None) -> Iterator[str]:
    for devices, count in ((1, 16), (2, 8), (4, 4), (8, 2)):
        yield spp_row(f"{count} servers x {devices}", bert(), servers(devices, count), 32)


def spp_9(data: Path | None) -> Iterator[str]:
    for layers in (24, 48, 72):
        yield spp_row(f"{layers} layers", bert(layers), servers(), 32)


def spp_10(data: Path | None) -> Iterator[str]:
    for factor in (1, 2, 4):
        profile = bert()
        layers = tuple(replace(layer, cut_bytes=layer.cut_bytes * factor) for layer in profile.layers)
        yield spp_row(f"activations x {factor}", replace(profile, layers=layers), servers(), 32)


def spp_11(data: Path | None) -> Iterator[str]:
    """Seconds of a minibatch by the number of stages; the planner's own choice is the fastest."""
    profile, cluster = bert(), servers()
    for stages in (2, 3, 4, 5, 6, 8, 12, 16):
        plan = plan_spp(profile, cluster, Request(schedule="spp", microbatches=32, stages=stages))
        found = evaluate(plan, profile, cluster)
        yield f"{stages} stages: {found.minibatch_seconds:.4f} s"
    yield f"chosen: {len(plan_spp(profile, cluster, Request(schedule='spp', microbatches=32)).stages)} stages"


SHAPES = {
    "1 billion": Transformer(layers=4, hidden=4096, heads=128),
    "175 billion": Transformer(layers=96, hidden=12288, heads=96),
    "530 billion": Transformer(layers=105, hidden=20480, heads=128),
    "1008 billion": Transformer(layers=128, hidden=25600, heads=160),
}


def arranged(model: Transformer, devices: int, batch: int, **fixed: Any) -> ConfigEstimate:
    """The best arrangement with what is `fixed`, on servers of eight A100."""
    memory = fixed.pop("memory", 80 * GIB)
    cluster = Cluster.hierarchical([(8, 300e9), (max(devices // 8, 1), 25e9)], memory_bytes=memory)
    request = ThreeDRequest(model, cluster, batch, **{"recompute": True, "devices": devices, **fixed})
    return rank_three_d(request, 0)[0]


def teraflops(model: Transformer, devices: int, batch: int, **fixed: Any) -> float:
    """Per device and second, by equation 4.2."""
    return arranged(model, devices, batch, **fixed).device_operations / 1e12


def table_4_2(data: Path | None) -> Iterator[str]:
    """By closed form; one row (530 billion parameters, 560 devices) was fitted."""
    rows = [("175 billion", 1536, 12, *row) for row in ((384, 153), (768, 149), (1536, 141))]
    rows += [("530 billion", 2240, 35, *row) for row in ((560, 171), (1120, 167), (2240, 159))]
    rows += [("1008 billion", 3072, 64, 3072, 163)]
    for name, batch, pipeline, devices, printed in rows:
        found = teraflops(SHAPES[name], devices, batch, pipeline=pipeline, tensor=8, microbatch_size=1)
        yield f"{name} on {devices}: {found:.0f} TFLOP/s, thesis {printed}"


def figure_4_11(data: Path | None) -> Iterator[str]:
    """Three layers a stage, t = 8, b = 1: TFLOP/s of p = 1, 2, 4, 8."""
    for batch in (8, 128):
        rates = []
        for pipeline in (1, 2, 4, 8):
            model = Transformer(layers=3 * pipeline, hidden=20480, heads=128)
            fixed = {"pipeline": pipeline, "tensor": 8, "microbatch_size": 1, "stages_per_rank": 1, "memory": 200 * GIB}
            rates.append(f"{teraflops(model, 8 * pipeline, batch, **fixed):.0f}")
        yield f"batch {batch}: {', '.join(rates)}"


def ratios_of_chapter_4(data: Path | None) -> Iterator[str]:
    """Figures 4.7, 4.12, 4.13, 4.16, 4.17 and 4.18, and the checkpoint of section 4.5.10."""
    rates = [teraflops(SHAPES["1 billion"], 1, 8, microbatch_size=size) for size in (1, 2, 4, 8)]
    yield f"microbatches of 8 over 1, one device: {rates[-1] / rates[0]:.2f}x"
    large = Transformer(layers=72, hidden=10240, heads=80)
    kept = {"pipeline": 8, "tensor": 8, "stages_per_rank": 1}
    for batch in (128, 512):
        rates = [teraflops(large, 64, batch, microbatch_size=size, **kept) for size in (1, 2, 4, 8)]
        yield f"microbatches of 1, 2, 4, 8, batch {batch}: {', '.join(f'{rate:.0f}' for rate in rates)} TFLOP/s"
    yield f"checkpoint of 1008 billion parameters: {14 * SHAPES['1008 billion'].parameters / 1e12:.1f} TB"
    gpt = SHAPES["175 billion"]
    fixed = {"pipeline": 12, "tensor": 8, "microbatch_size": 1}
    for batch in (12, 36, 60):
        one, two = (teraflops(gpt, 96, batch, stages_per_rank=v, **fixed) for v in (1, 2))
        yield f"interleaving, batch {batch}: {two / one - 1:+.0%}"
    deep, ways = Transformer(layers=32, hidden=20480, heads=128), (2, 4, 8, 16, 32, 64)
    for batch in (32, 128, 512):
        single = {"microbatch_size": 1, "stages_per_rank": 1}
        rates = [teraflops(deep, 64, batch, tensor=t, pipeline=64 // t, **single) for t in ways]
        best = f"t = {ways[rates.index(max(rates))]} is best, {max(rates) / min(rates):.2f}x the worst"
        yield f"t of 2 to 64, batch {batch}: {', '.join(f'{rate:.0f}' for rate in rates)} TFLOP/s; {best}"
    wide = Transformer(layers=80, hidden=12288, heads=96)
    kept = {"pipeline": 16, "tensor": 8, "microbatch_size": 1, "stages_per_rank": 1}
    both = [arranged(wide, 128, 16, **{**kept, "recompute": chosen}) for chosen in (True, False)]
    lost = both[0].samples_per_second / both[1].samples_per_second - 1
    yield f"recomputation, batch 16: {lost:+.0%} sequences per second, {1 + lost:.2f} of those without"
    for v in (2, 4, 8):
        off, on = (
            teraflops(gpt, 96, 60, stages_per_rank=v, scatter_gather=chosen, **fixed) for chosen in (False, True)
        )
        yield f"scatter and gather, v = {v}: {on / off - 1:+.0%}"


NVLINK = 150e9
"""Bytes per second each way, from the V100's data sheet."""
GPT_2B = Transformer(layers=54, hidden=1920, heads=24, sequence=512)
GPT_4B = Transformer(layers=48, hidden=2560, heads=32, sequence=512)
"""2.5 and 3.9 billion parameters. The shapes of the thesis's 2.2 and 3.8 billion are not printed."""


def figure_3_6(data: Path | None, vocabulary: int = 51200) -> Iterator[str]:
    """Sequences per second on eight V100 of one server, recomputation, 8 in a microbatch. The thesis's GPipe has memory
    for 32 sequences."""
    cluster = Cluster.uniform(8, NVLINK)
    profile = profile_of(replace(GPT_2B, vocabulary=vocabulary), V100, cluster, microbatch_size=8)
    stages = partition(profile, cluster, straight=True, stages=8).stages

    def rate(schedule: str, microbatches: int) -> float:
        plan = Request(schedule=schedule, microbatches=microbatches, recompute=True).arrange(stages, profile)
        return evaluate(plan, profile, cluster).samples_per_second

    alone, small = rate("gpipe", 1), rate("gpipe", 4)
    for batch in (64, 256):
        flush, two, gpipe = (rate(name, batch // 8) for name in ("1f1b-flush", "2bw", "gpipe"))
        yield (
            f"batch {batch}: over model parallelism 1f1b-flush {flush / alone:.2f}x, 2bw {two / alone:.2f}x; "
            f"2bw over 1f1b-flush {two / flush:.2f}x, over gpipe {two / gpipe:.2f}x, of 32 {two / small:.2f}x"
        )


def figure_3_10(data: Path | None) -> Iterator[str]:
    """The same with BERT's vocabulary."""
    yield from figure_3_6(data, vocabulary=30522)


def figure_3_8(data: Path | None) -> Iterator[str]:
    """2BW, recomputation, a GPT of 1.3 billion parameters on 64 V100 of eight servers."""
    shape = Transformer(layers=24, hidden=2048, heads=16, sequence=512)
    cluster = Cluster.hierarchical([(8, NVLINK), (8, 3.125e9 / 8)])
    for depth, size in ((4, 8), (4, 32), (8, 8), (8, 32)):
        profile = profile_of(shape, V100, cluster, microbatch_size=size)
        cut = partition(profile, Cluster.uniform(depth, NVLINK), straight=True, stages=depth).stages
        stages = tuple(Stage(one.start, one.stop, tuple(range(k, 64, depth))) for k, one in enumerate(cut))
        rates, most = [], 0.0
        for batch in (2048, 4096, 8192):
            plan = Request(schedule="2bw", microbatches=batch // size, recompute=True).arrange(stages, profile)
            found = evaluate(plan, profile, cluster, optimizer_copies=4, master_copies=2)
            rates.append(f"{found.samples_per_second:.0f}")
            most = max(most, *found.peak_bytes)
        yield f"p = {depth}, b = {size}: {', '.join(rates)} sequences per second, {most / 1e9:.1f} GB"


def over_tensor_parallel(data: Path | None) -> Iterator[str]:
    """2BW on t stages over t devices that share every layer, 8 in a microbatch, recomputation. Eight cards of a server
    share its 25 Gbit/s."""
    for name, shape, ways in (("8 devices of one server", GPT_2B, 8), ("16 of two servers", GPT_4B, 16)):
        cluster = (
            Cluster.hierarchical([(8, NVLINK), (ways // 8, 3.125e9 / 8)]) if ways > 8 else Cluster.uniform(8, NVLINK)
        )
        cut = profile_of(shape, V100, cluster, microbatch_size=8, tensor_parallel=ways)
        alone = cut.microbatch_size / (cut.seconds + sum(layer.forward_seconds for layer in cut.layers))
        profile = profile_of(shape, V100, cluster, microbatch_size=8)
        stages = partition(profile, cluster, straight=True, stages=ways).stages
        plan = Request(schedule="2bw", microbatches=ways, recompute=True).arrange(stages, profile)
        yield f"{name}: {evaluate(plan, profile, cluster).samples_per_second / alone:.1f}x"


def figure_3_7(data: Path | None) -> Iterator[str]:
    """GB of the fullest of eight devices; bytes per parameter as in the thesis's mixed precision."""
    cluster = Cluster.uniform(8, NVLINK)
    profile = profile_of(GPT_2B, V100, cluster, microbatch_size=8)
    stages = partition(profile, cluster, straight=True, stages=8).stages
    for batch in (64, 256):
        peaks = []
        for schedule in ("1f1b-flush", "2bw", "gpipe"):
            plan = Request(schedule=schedule, microbatches=batch // 8, recompute=True).arrange(stages, profile)
            peak = max(evaluate(plan, profile, cluster, optimizer_copies=4, master_copies=2).peak_bytes)
            peaks.append(f"{schedule} {peak / 1e9:.1f} GB")
        yield f"batch {batch}: {', '.join(peaks)}"


def figure_3_9(data: Path | None) -> Iterator[str]:
    """The largest GPT of hidden size 3072 under 2bw with recomputation on stages of 16 GB, microbatches of one."""
    for depth in (4, 8, 16, 32, 64):
        cluster, most = Cluster.uniform(depth, NVLINK), 0
        for layers in range(depth, 64 * depth, depth):
            shape = Transformer(layers=layers, hidden=3072, heads=32, sequence=512)
            profile = profile_of(shape, V100, cluster)
            stages = Plan.uniform(len(profile), depth).stages
            plan = Request(schedule="2bw", microbatches=depth, recompute=True).arrange(stages, profile)
            peak = max(evaluate(plan, profile, cluster, optimizer_copies=4, master_copies=2).peak_bytes)
            if peak > 16 * 2**30:
                break
            most = shape.parameters
        yield f"{depth} stages: {most / 1e9:.1f} billion parameters"


LOAD = 0.96


def figure_5_15(data: Path | None) -> Iterator[str]:
    """Mean completion time under LAS, single workers, 500 jobs, seed 0."""
    workload = poisson_workload(thesis_types(), 500, LOAD * fleets.capacity(False), seed=0)
    watched = range(333, 416)
    exact = simulate_fleet(workload, fleets.KINDS, max_min_fairness, watched=watched, ideal=True).mean_seconds
    for minutes in (6, 12, 24, 48):
        run = simulate_fleet(workload, fleets.KINDS, max_min_fairness, watched=watched, round_seconds=60 * minutes)
        yield f"rounds of {minutes} minutes: {run.mean_seconds / 3600:.2f} h, {run.mean_seconds / exact:.3f} of ideal"


def measured(data: Path) -> dict[str, dict[tuple[str, int], float]]:
    """Steps per second by kind, type of job and workers, alone."""
    found = json.loads((data / "gavel" / "simulation_throughputs.json").read_text())
    return {
        kind: {ast.literal_eval(job): row["null"] for job, row in found[kind.lower()].items()}
        for kind in ("V100", "P100", "K80")
    }


def trace(data: Path, name: str) -> list[Arrival]:
    """The jobs of a trace of the authors' physical cluster."""
    rates, found = measured(data), []
    with (data / "gavel" / name).open() as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t")):
            job = Job(f"job {number}", float(row[-5]), workers=int(row[-4]))
            speeds = tuple(kind.get((row[0], job.workers), 0.0) for kind in rates.values())
            found.append(Arrival(float(row[-1]), job, speeds))
    return found


def trace_types(data: Path, name: str) -> dict[str, str]:
    """The published types of the jobs of a trace."""
    with (data / "gavel" / name).open() as file:
        rows = list(csv.reader(file, delimiter="\t"))
    return {f"job {number}": f"('{row[0]}', {row[-4]})" for number, row in enumerate(rows)}


def table_5_3(data: Path | None) -> Iterator[str]:
    """The simulated column: 8 V100, 16 P100, 24 K80, rounds of 6 minutes."""
    assert data is not None, "table-5.3 needs --data"
    kinds = [Kind("V100", 8), Kind("P100", 16), Kind("K80", 24)]
    jobs = trace(data, "max_min_fairness.trace")
    for label, policy in (("aware", max_min_fairness), ("blind", blind(max_min_fairness))):
        run = simulate_fleet(jobs, kinds, policy)
        hours = [job.seconds / 3600 for job in run.jobs]
        some = [job.seconds / 3600 for job in run.jobs if 50 <= int(job.job.name[4:]) < 75]
        yield f"LAS, {label}: mean completion time {fmean(hours):.2f} h, of jobs 50 to 74 {fmean(some):.2f} h"
    if not (data / "gavel" / "minimize_makespan.trace").exists():
        yield "makespan: left out, the folder gavel has no minimize_makespan.trace"
        return
    static = trace(data, "minimize_makespan.trace")
    for label, policy in (("aware", min_makespan), ("blind", blind(min_makespan)), ("FIFO, blind", blind(fifo))):
        yield f"makespan, {label}: {simulate_fleet(static, kinds, policy).makespan / 3600:.2f} h"
    pairs = figures.shared_speeds(data, trace_types(data, "minimize_makespan.trace"), kinds)
    yield f"makespan, Gandiva: {simulate_fleet(static, kinds, gandiva, pairs=pairs).makespan / 3600:.2f} h"


def space_sharing(data: Path | None) -> Iterator[str]:
    """The jobs of one worker of the trace, all at once, on a quarter of its fleet; published throughputs of pairs."""
    assert data is not None, "space-sharing needs --data"
    name = "max_min_fairness.trace"
    static = [replace(each, seconds=0.0) for each in trace(data, name) if each.job.workers == 1]
    kinds = [Kind("V100", 2), Kind("P100", 4), Kind("K80", 6)]
    types = trace_types(data, name)
    pairs = figures.shared_speeds(data, {each.job.name: types[each.job.name] for each in static}, kinds)
    alone, shared = (
        simulate_fleet(static, kinds, min_makespan, pairs=given).makespan / 3600 for given in (None, pairs)
    )
    hours = f"alone {alone:.2f} h, with {len(pairs)} pairs {shared:.2f} h"
    yield f"makespan of {len(static)} jobs: {hours}, {shared / alone - 1:+.1%}"


CARDS = {"p2.xlarge": 1, "p2.8xlarge": 8, "p2.16xlarge": 16, "p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8}
"""GPUs of AWS's instances: K80 (p2) and V100 (p3)."""


@dataclass(frozen=True)
class Offer:
    """Spot instances of one kind and place, with the price of a GPU for an hour from each time on."""

    cloud: str
    kind: str
    cards: int
    times: tuple[float, ...]
    prices: tuple[float, ...]

    def at(self, seconds: float) -> float:
        return self.prices[max(bisect_right(self.times, seconds) - 1, 0)]


def offers(data: Path) -> list[Offer]:
    found = []
    for instance, cards in CARDS.items():
        history = json.loads((data / "prices" / "aws" / "us-east-1" / f"{instance}.json").read_text())
        zones: dict[str, list[tuple[float, float]]] = {}
        for row in history["SpotPriceHistory"]:
            seconds = datetime.fromisoformat(row["Timestamp"]).timestamp()
            zones.setdefault(row["AvailabilityZone"], []).append((seconds, float(row["SpotPrice"]) / cards))
        kind = "K80" if instance.startswith("p2") else "V100"
        found += [Offer("AWS", kind, cards, *zip(*sorted(zone), strict=True)) for zone in zones.values()]
    with (data / "prices" / "azure" / "instance_mapping.csv").open() as file:
        kinds = {row["Instance"]: (row["GPU type"], int(row["# GPUs"])) for row in csv.DictReader(file)}
    for path in sorted((data / "prices" / "azure").glob("us_*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        times = tuple(datetime.strptime(f"{row['Date']} +0000", "%m/%d/%Y %z").timestamp() for row in rows)
        for instance in (name for name in kinds if rows[0][name]):
            kind, cards = kinds[instance]
            prices = tuple(float(row[instance].strip("$")) / cards for row in rows)
            found.append(Offer("Azure", kind, cards, times, prices))
    return found


def spent(choices: list[Offer], rates: dict[str, float], start: float, days: float, *, moves: bool) -> float:
    """Dollars for `days` of work on a V100, with the cheapest offer of the start, or of each hour."""
    left, now, total = days * 24.0, start, 0.0
    best = None
    while left > 1e-9:
        if best is None or moves:
            best = min(choices, key=lambda one: one.at(now) / rates[one.kind])
        hours = min(1.0, left / rates[best.kind])
        total, left, now = total + hours * best.at(now), left - hours * rates[best.kind], now + 3600
    return total


def figure_6_5(data: Path | None) -> Iterator[str]:
    """Mean over twelve starts, from 24 February 2020, of the cost of one V100 of AWS over that of each strategy, and of
    the choice of the start over moves; long jobs have fewer starts. AWS's record ends on 20 February: its last prices
    are kept."""
    assert data is not None, "figure-6.5 needs --data"
    known, speeds = offers(data), json.loads((data / "prices" / "oracle_throughputs.json").read_text())
    aws = [one for one in known if one.cloud == "AWS"]
    single = [one for one in aws if one.cards == 1]
    base = [one for one in single if one.kind == "V100"]
    first = datetime(2020, 2, 24, tzinfo=UTC).timestamp()
    for name in ("A3C", "ResNet-50 (batch size 128)", "Transformer (batch size 256)"):
        steps = {kind: speeds[kind.lower()][name]["null"] for kind in ("V100", "P100", "K80")}
        rates = {kind: speed / steps["V100"] for kind, speed in steps.items()}

        def mean(one: list[Offer], other: list[Offer], days: int, moves: bool, rates: dict[str, float] = rates) -> str:
            starts = [first + 86400 * day for day in range(min(12, 29 - days))]
            ratios = [
                spent(one, rates, start, days, moves=False) / spent(other, rates, start, days, moves=moves)
                for start in starts
            ]
            return f"{fmean(ratios):.2f}x"

        cells = [
            f"{label} {mean(base, choices, 4, False)}"
            for label, choices in zip(("GPU type", "multi-GPU", "multi-cloud"), (single, aws, known), strict=True)
        ]
        yield f"{name}: {', '.join(cells)}, dynamic {mean(base, known, 4, True)}"
        gains = (f"{days} days {mean(known, known, days, True)}" for days in (4, 8, 16, 24))
        yield f"{name}: moves over none, {', '.join(gains)}"


ON_DEMAND = {"K80": 0.90, "P100": 2.07, "V100": 3.06}
"""Dollars an hour of AWS and Azure in 2020."""


def table_6_3(data: Path | None) -> Iterator[str]:
    """On-demand price over the least spot price of the records."""
    assert data is not None, "table-6.3 needs --data"
    for kind, instance in (("K80", "p2.xlarge"), ("V100", "p3.2xlarge")):
        history = json.loads((data / "prices" / "aws" / "us-east-1" / f"{instance}.json").read_text())
        least = min(float(row["SpotPrice"]) for row in history["SpotPriceHistory"])
        yield f"AWS, {kind}: {ON_DEMAND[kind] / least:.1f}x"
    with (data / "prices" / "azure" / "us_east.csv").open() as file:
        rows = list(csv.DictReader(file))
    for kind, instance in (("K80", "NC6"), ("P100", "NC6s v2"), ("V100", "NC6s v3")):
        least = min(float(row[instance].strip("$")) for row in rows)
        yield f"Azure, {kind}: {ON_DEMAND[kind] / least:.1f}x"


def equal_layers(layers: int) -> Profile:
    """A backward takes twice a forward, half of it for weights; a layer keeps a byte of a microbatch."""
    return Profile(
        tuple(LayerProfile(str(layer), 1.0, 2.0, 0.0, 1.0, 0.0, weight_seconds=1.0) for layer in range(layers)),
        1,
        split_share=0.0,
    )


def llama_3(_: Path | None) -> Iterator[str]:
    """The 405B of MLPerf Training: 126 layers, embedding and loss on 8 x 8 stages; the 70B's 80 layers on 8 x 5."""
    for microbatches in (72, 24, 16):
        plan = Plan.uniform(128, 64, "interleaved", microbatches, 8)
        found = evaluate(plan, equal_layers(128), EIGHT, optimizer_copies=0.0)
        yield f"405B, {microbatches} microbatches: bubble {100 * found.bubble:.1f} %, peak {max(found.peak_bytes):.0f}"
    plans = [Plan.uniform(80, 40, "interleaved", microbatches, 5) for microbatches in (64, 128)]
    few, many = (evaluate(plan, equal_layers(80), EIGHT).samples_per_second for plan in plans)
    yield f"70B, 64 to 128 microbatches: {100 * (many / few - 1):.1f} % more samples/s"


def llama_3_found(_: Path | None) -> Iterator[str]:
    """Orders for the 405B's stages and 16 microbatches, in the bytes of interleaved."""
    plan, profile = Plan.uniform(128, 64, "interleaved", 16, 8), equal_layers(128)
    most = max(evaluate(plan, profile, EIGHT, optimizer_copies=0.0).peak_bytes)
    for whole, name in ((True, "whole"), (False, "split")):
        found = find_order(plan, profile, EIGHT, memory_bytes=most, whole_backwards=whole, optimizer_copies=0.0)
        predicted = prediction_of(found.plan)
        yield (
            f"{name} backwards: {found.plan.schedule}, bubble {100 * predicted.bubble:.1f} %, "
            f"peak {max(predicted.peak_bytes):.0f}, at most {100 * found.gap:.1f} % from optimal"
        )


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--data", type=Path, help="folder with gavel/ and prices/")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    report = Report(options.save)
    report.add(conditions("studies/papers_study.py"))
    for name in options.only:
        if name in NEED_DATA and options.data is None:
            report.add("", f"{name}: left out, needs --data")
            continue
        start = time.process_time()
        report.add("", f"{name}", *SECTIONS[name](options.data))
        print(f"  {time.process_time() - start:.0f} s of processor time", flush=True)


SECTIONS: dict[str, Callable[[Path | None], Iterator[str]]] = {
    "pipedream-16": pipedream_16,
    "pipedream-17": pipedream_17,
    "pipedream-18": pipedream_18,
    "figure-2.13": figure_2_13,
    "figure-3.6": figure_3_6,
    "figure-3.10": figure_3_10,
    "tensor-parallel": over_tensor_parallel,
    "figure-3.7": figure_3_7,
    "figure-3.8": figure_3_8,
    "figure-3.9": figure_3_9,
    "spp-6": spp_6,
    "spp-7": spp_7,
    "spp-8": spp_8,
    "spp-9": spp_9,
    "spp-10": spp_10,
    "spp-11": spp_11,
    "table-4.2": table_4_2,
    "figure-4.11": figure_4_11,
    "chapter-4": ratios_of_chapter_4,
    "table-5.3": table_5_3,
    "table-6.3": table_6_3,
    "figure-6.5": figure_6_5,
    "space-sharing": space_sharing,
    "figure-5.15": figure_5_15,
    "llama-3": llama_3,
    "llama-3-found": llama_3_found,
}
NEED_DATA = ("table-5.3", "table-6.3", "figure-6.5", "space-sharing")


if __name__ == "__main__":
    main()
