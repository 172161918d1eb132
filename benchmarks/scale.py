"""Runs many small stages, and says whether their numbers are those of one process and how long they take to start.

    python benchmarks/scale.py

For 8 and 16 processes of this machine: every schedule, plain and replicated, beside `penstock.reference_train` bit for
bit; and the seconds until the first step is done, part by part, also of a Llama of a hundred blocks (which needs
transformers). Then the simulator for 64 to 3,072 devices. Many processes share few cores here: what takes seconds is
mostly the import of torch in each; the parts that grow with the number of processes are what to look at.

    nice -n -10 python benchmarks/scale.py --processes --devices

captures the Llama only, on four processes.
"""

import time

STARTED = time.perf_counter()
"""Before torch is imported."""

import json  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

IMPORTED_TORCH = time.perf_counter()

import penstock  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.runtime.assembly.started_engines import edges_of  # noqa: E402
from penstock.scheduling import METHODS, Schedule  # noqa: E402
from penstock.values.plans import schedule  # noqa: E402

IMPORTED = time.perf_counter()

from contenders.contenders import stages_per_rank  # noqa: E402
from contenders.jobs import sgd  # noqa: E402
from measurement.launches import everywhere, launch_and_read  # noqa: E402
from measurement.reports import Report, conditions, option_parser  # noqa: E402
from measurement.startup import PARTS, timed_start  # noqa: E402

WIDTH, STEPS = 4, 3
DEVICES = (64, 256, 1024, 3072)
BLOCKS, TOKENS = 100, 16


@dataclass(frozen=True, slots=True)
class Start:
    """One pipeline in a number of processes; seconds are those of the slowest process."""

    processes: int
    name: str
    edges: int
    """Directed connections between two ranks, over all processes."""
    equal: bool | None
    """Whether losses and weights are the oracle's to the bit; None where it was not asked."""
    seconds: dict[str, float]
    """By part, from the start of Python to the end of the first step; of the first pipeline of a launch only those that
    every pipeline has are comparable."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One call of the simulator."""

    devices: int
    name: str
    actions: int
    seconds: float


class Layer(nn.Linear):
    """A layer of a perceptron."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def deep_stack(depth: int) -> nn.Sequential:
    """A perceptron of `depth` small layers, in the precision that is compared to the bit."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(depth))).double()


def plans_of(processes: int) -> Iterator[tuple[str, penstock.Plan]]:
    """Every schedule with one stage for each process (two for those that hold several); then stages with replicas, and
    a single stage on all processes.
    """
    for method in METHODS:
        per_rank = stages_per_rank(method.name)
        stages = processes * per_rank
        yield method.name, penstock.Plan.uniform(2 * processes, stages, method.name, processes, per_rank)
    layers, half = 2 * processes, processes // 2
    pairs = tuple(penstock.Stage(4 * s, 4 * s + 4, (2 * s, 2 * s + 1)) for s in range(half))
    yield "1f1b-flush, two replicas", penstock.Plan(pairs, "1f1b-flush", processes)
    yield "data parallel", penstock.Plan((penstock.Stage(0, layers, tuple(range(processes))),), "1f1b-flush", processes)


def compare(name: str, plan: penstock.Plan, base: dict[str, float]) -> Start:
    """Trains `plan` here and in the other processes, and in the oracle. `base`: seconds before. Collective."""
    depth, samples = 2 * plan.ranks, 2 * plan.microbatches
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(STEPS, 2, samples, WIDTH, generator=generator, dtype=torch.float64)
    batches = [(inputs, target) for inputs, target in drawn]
    options = {"sample": (batches[0][0][:2],), "loss_fn": F.mse_loss, "optimizer": sgd, "plan": plan}
    pipe, seconds = timed_start(lambda: penstock.Pipeline(deep_stack(depth), **options))
    losses = []
    for number, (x, y) in enumerate(batches):
        start = time.perf_counter()
        losses.append(float(pipe.step(x, y).loss))
        if number == 0:
            seconds["first step"] = time.perf_counter() - start
    state = {key: tensor.clone() for key, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    edges = len(edges_of(schedule(plan), ()))
    found = everywhere((tuple(losses), state, {**base, **seconds}))
    slowest = {part: max(one[2][part] for one in found) for part in found[0][2]}
    if dist.get_rank() > 0:
        return Start(plan.ranks, name, edges, None, slowest)
    reference = penstock.reference_train(deep_stack(depth), batches, **options)
    equal = all(reported == reference.losses for reported, _, _ in found) and all(
        torch.equal(reference.state[key], tensor) for _, held, _ in found for key, tensor in held.items()
    )
    whole = {key for _, held, _ in found for key in held} == set(reference.state)
    return Start(plan.ranks, name, edges, equal and whole, slowest)


def deep_start(base: dict[str, float]) -> Start:
    """A Llama of a hundred blocks. Collective."""
    import transformers  # takes seconds, which the other launches need not wait for

    processes = dist.get_world_size()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=BLOCKS, num_attention_heads=2,
        max_position_embeddings=TOKENS, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(256, (2 * processes, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    sample = {name: tensor[:2] for name, tensor in batch.items()}
    # As if the processes had just been started together.
    dist.barrier()
    pipe, seconds = timed_start(
        lambda: penstock.Pipeline(model, sample, penstock.model_loss, sgd, microbatches=processes)
    )
    start = time.perf_counter()
    float(pipe.step(batch).loss)
    seconds["first step"] = time.perf_counter() - start
    pipe.close()
    found = everywhere({**base, **seconds})
    slowest = {part: max(one[part] for one in found) for part in found[0]}
    return Start(processes, f"Llama of {BLOCKS} blocks", len(edges_of(pipe.schedule, ())), None, slowest)


def work(report: Path, deep: bool) -> None:
    """One process of a launch."""
    torch.set_num_threads(1)
    base = {"import torch": IMPORTED_TORCH - STARTED, "import penstock": IMPORTED - IMPORTED_TORCH}
    start = time.perf_counter()
    dist.init_process_group("gloo")
    base["join"] = time.perf_counter() - start
    if deep:
        rows = [deep_start(base)]
    else:
        rows = [compare(name, plan, base) for name, plan in fitting(plans_of(dist.get_world_size()))]
    if dist.get_rank() == 0:
        report.write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def fitting(plans: Iterator[tuple[str, penstock.Plan]]) -> list[tuple[str, penstock.Plan]]:
    """The plans that their schedules take."""
    found = []
    for name, plan in plans:
        try:
            schedule(plan)
        except PenstockError:
            continue
        found.append((name, plan))
    return found


def simulations(devices: Sequence[int]) -> Iterator[Simulation]:
    """A straight pipeline over all devices, and pipelines of 64 stages side by side."""
    layer = penstock.LayerProfile("block", 1e-3, 2e-3, cut_bytes=1e6, saved_bytes=1e7, parameter_bytes=1e7)
    for count in devices:
        profile = penstock.Profile((layer,) * count, microbatch_size=1)
        cluster = penstock.Cluster.uniform(count, bandwidth=1e10)
        yield _simulate(count, "1f1b-flush, m = 64", Schedule("1f1b-flush", count, 64), profile, cluster)
        if count > 64:
            width = count // 64
            stages = tuple(penstock.Stage(s, s + 1, tuple(range(s * width, (s + 1) * width))) for s in range(64))
            plan = penstock.Plan(stages, "1f1b-flush", 64 * width)
            short = penstock.Profile((layer,) * 64, microbatch_size=1)
            yield _simulate(count, f"1f1b-flush, 64 stages of {width} replicas", plan, short, cluster)


def _simulate(
    count: int, name: str, played: Schedule | penstock.Plan, profile: penstock.Profile, cluster: penstock.Cluster
) -> Simulation:
    start = time.perf_counter()
    timeline = penstock.simulate(played, profile, cluster, minibatches=1)
    return Simulation(count, name, len(timeline.spans), time.perf_counter() - start)


def start_table(rows: Sequence[Start]) -> str:
    """A line for each pipeline."""
    parts = [*("import torch", "import penstock", "join"), *PARTS.values(), "rest", "first step"]
    lines = [f"{'processes':>9}  {'pipeline':28}{'edges':>7}{'equal':>7}" + "".join(f"{part:>16}" for part in parts)]
    for row in rows:
        equal = "" if row.equal is None else "yes" if row.equal else "NO"
        seconds = "".join(f"{row.seconds[part]:16.2f}" for part in parts)
        lines.append(f"{row.processes:>9}  {row.name:28}{row.edges:>7}{equal:>7}{seconds}")
    return "\n".join(lines)


def simulation_table(rows: Sequence[Simulation]) -> str:
    """A line for each simulation."""
    lines = [f"{'devices':>9}  {'simulated':40}{'actions':>10}{'seconds':>10}{'actions/s':>12}"]
    lines += [
        f"{row.devices:>9}  {row.name:40}{row.actions:>10}{row.seconds:>10.2f}{row.actions / row.seconds:>12,.0f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--processes", type=int, nargs="*", default=[8, 16], help="even numbers")
    parser.add_argument("--deep", type=int, nargs="*", default=[4], help="processes for the Llama")
    parser.add_argument("--devices", type=int, nargs="*", default=list(DEVICES), help="to simulate; multiples of 64")
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, deep=bool(options.deep))
        return
    report = Report(options.save)
    report.add(conditions("benchmarks/scale.py"))
    starts: list[Start] = []
    for count, deep in [*((count, []) for count in options.processes), *((count, [count]) for count in options.deep)]:
        starts += [Start(**row) for row in launch_and_read(__file__, count, options, deep=deep)]
    if starts:
        report.add("", start_table(starts))
    if options.devices:
        report.add("", simulation_table(list(simulations(options.devices))))
    if any(row.equal is False for row in starts):
        raise SystemExit("some pipeline's numbers are not the oracle's")


if __name__ == "__main__":
    main()
