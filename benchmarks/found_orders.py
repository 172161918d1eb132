"""Trains under found orders beside the best named schedule that fits, and compares the gain with the predicted one.

    nice -n -20 python benchmarks/found_orders.py --save benchmarks/results/found-orders.txt

The last stage of the model has a head with a wide result, as that of a language model: it takes longer than another
layer, and holds more. The limit is a share of what `1f1b-flush` holds on its fullest rank. The model is profiled on
rank 0 and the links are measured; plans are made from both. Two pipelines of one launch, one with the found order and
one with the best named schedule that fits, take turns round by round. `same bits`: whether their losses, and those of
one process that trains the model without a pipeline, are equal.

Layers sleep in the forward, in the input backward and in the weight backward for the same time each, and compute
little, as if each process had a device: several processes would share the cores of a small machine. In the last case
two processes compute, on a core each.
"""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.launches import alone, launch_and_read, outside_the_launch
from measurement.reports import Report, conditions, option_parser, table
from penstock.errors import PlanError
from penstock.planning import find_order
from penstock.planning.orders.search import named_plans
from penstock.simulating import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

WIDTH, SAMPLES = 256, 256
STEPS, ROUNDS = 2, 10


@dataclass(frozen=True, slots=True)
class Case:
    """A pipeline of `processes` with blocks per process, and the limit as a share of what `1f1b-flush` holds."""

    processes: int
    microbatches: int
    limit: float
    sleeps: bool = True
    folded: bool = False
    """Whether orders with two stages on a process are tried, too."""


CASES = (
    Case(2, 8, 1.1),
    Case(3, 9, 1.1),
    Case(3, 9, 1.25, folded=True),
    Case(4, 8, 1.1),
    Case(4, 8, 1.1, folded=True),
    Case(4, 8, 1.25, folded=True),
    Case(2, 8, 1.25, sleeps=False),
)


class Sleep(torch.autograd.Function):
    """Stands for the time of a device: sleeps in the forward and in the input backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Computes, or sleeps for `seconds` and computes little."""

    def __init__(self, width: int, result: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, result, dtype=torch.float64), seconds
        if seconds:
            self.linear.weight.register_hook(self._sleep)  # type: ignore[no-untyped-call]

    def _sleep(self, gradient: Tensor) -> Tensor:
        """In the weight backward."""
        time.sleep(self.seconds)
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(x))
        return cast("Tensor", Sleep.apply(y, self.seconds)) if self.seconds else y  # type: ignore[no-untyped-call]


def model_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    width, seconds = (32, 0.004) if case.sleeps else (WIDTH, 0.0)
    blocks = [Block(width, width, seconds) for _ in range(4 * case.processes)]
    return [*blocks, Block(width, 6 * width, 1.5 * seconds)]


def batch_of(case: Case, microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(SAMPLES * microbatches, 32 if case.sleeps else WIDTH, dtype=torch.float64)
    return x, torch.zeros(len(x), 6 * x.shape[1], dtype=torch.float64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def build(case: Case, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(model_of(case), batch_of(case, 1)[:1], F.mse_loss, sgd, **options)


def plans_of(case: Case, profile: Profile, cluster: Cluster) -> tuple[Plan, Plan]:
    """The plan with the found order, and the best named one that fits."""
    weights = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    plain = Plan.balanced(weights, case.processes, microbatches=case.microbatches)
    plans = [plain]
    if case.folded:
        plans.append(
            Plan.balanced(weights, 2 * case.processes, "interleaved", microbatches=case.microbatches, stages_per_rank=2)
        )
    limit = case.limit * max(evaluate(plain, profile, cluster).peak_bytes)
    named, found = [], []
    for plan in plans:
        for each in named_plans(plan):
            predicted = evaluate(each, profile, cluster)
            if max(predicted.peak_bytes) <= limit:
                named.append((predicted.minibatch_seconds, each.schedule, each))
        try:
            best = find_order(plan, profile, cluster, memory_bytes=limit).plan
        except PlanError:
            continue
        found.append((evaluate(best, profile, cluster).minibatch_seconds, best))
    return min(found, key=lambda each: each[0])[1], min(named)[2]


def alternate(
    pipes: Mapping[str, penstock.Pipeline], x: Tensor, y: Tensor, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """By name: the seconds of a step in each round, in which each pipeline makes `steps` after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            begun = time.perf_counter()
            for _ in range(steps):
                result = pipe.step(x, y)
            float(result.loss)
            seconds[name].append((time.perf_counter() - begun) / steps)
    return seconds


def work(case: Case, path: Path) -> None:
    """One process; rank 0 writes what was found."""
    torch.set_num_threads(1)
    with outside_the_launch():
        once = build(case, stages=1, microbatches=case.microbatches)
        x, y = batch_of(case, case.microbatches)
        expected = [float(once.step(x, y).loss) for _ in range(2)]
        once.close()
    torch.distributed.init_process_group("gloo")
    profile = alone(
        lambda: penstock.profile(model_of(case), batch_of(case, 1)[:1], loss_fn=F.mse_loss, target=batch_of(case, 1)[1])
    )
    cluster = penstock.probe()
    found, named = alone(lambda: plans_of(case, profile, cluster))
    pipes = {"found": build(case, plan=found), "named": build(case, plan=named)}
    losses = {name: [float(pipe.step(x, y).loss) for _ in range(2)] for name, pipe in pipes.items()}
    seconds = alternate(pipes, x, y, rounds=ROUNDS, steps=STEPS)
    predicted = {name: evaluate(pipe.plan, profile, cluster).minibatch_seconds for name, pipe in pipes.items()}
    if torch.distributed.get_rank() == 0:
        same = all(each == expected for each in losses.values())
        names = {"found": f"{found.schedule}, {len(found.stages)}", "named": f"{named.schedule}, {len(named.stages)}"}
        path.write_text(json.dumps({"seconds": seconds, "predicted": predicted, "same": same, "names": names}))
    for pipe in pipes.values():
        pipe.close()


def row(case: Case, found: dict[str, Any]) -> list[str]:
    expected = found["predicted"]["named"] / found["predicted"]["found"] - 1
    ratios = sorted(a / b - 1 for a, b in zip(found["seconds"]["named"], found["seconds"]["found"], strict=True))
    gain, error = statistics.median(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    return [
        str(case.processes),
        "sleep" if case.sleeps else "compute",
        f"{case.limit:g}",
        found["names"]["named"],
        found["names"]["found"],
        f"{1e3 * statistics.median(found['seconds']['named']):.0f} ms",
        f"{expected:+.1%}",
        f"{gain:+.1%}",
        f"{error:.1%}",
        f"{gain / expected:.2f}" if expected else "",
        "yes" if found["same"] else "NO",
    ]


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--case", type=int, help="this one of the cases alone, from 0 on")
    options = parser.parse_args()
    if options.worker is not None:
        work(CASES[options.case], options.worker)
        return
    shown = Report(options.save)
    shown.add(conditions("benchmarks/found_orders.py"))
    head = ["processes", "layers", "limit", "named", "found", "named takes", "predicted", "measured", "error", "of it"]
    chosen = range(len(CASES)) if options.case is None else [options.case]
    rows = [
        row(CASES[index], launch_and_read(__file__, CASES[index].processes, options, case=index)) for index in chosen
    ]
    shown.add(table([*head, "same bits"], rows))


if __name__ == "__main__":
    main()
