"""Prints what updates without a wait for norms (`post_validation=True`) save: in bubbles of found orders, and in a run.

    nice -n -20 python benchmarks/post_validation.py --save benchmarks/results/post-validation.txt

Predicted: the cases of benchmarks/orders.py with one stage per rank, under limits in units of what `1f1b-flush` takes.
The bubble is that of a step in the steady state; each column has the order that is best for it.

Measured: two processes whose layers sleep, as in benchmarks/found_orders.py, with the order that is found where memory
is free. The pipelines of one launch take turns round by round: one waits for norms, one validates updates later, and
one does so where every update clips and is taken back. `same bits`: whether the losses of the first two are equal.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import penstock
from found_orders import Case, alternate, batch_of, model_of, sgd
from measurement.launches import alone, launch_and_read
from measurement.reports import Report, conditions, option_parser, table
from orders import MEASURED, order_costs, search
from penstock.planning import find_order
from penstock.planning.orders.rows import text_of_rows
from penstock.scheduling import define_by_programs
from penstock.scheduling.schedules import Schedule
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import play
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan

LIMITS = (1.0, 1.5, 2.0)
CASE = Case(2, 8, 2.0)
STEPS, ROUNDS = 3, 12
WAYS: dict[str, dict[str, Any]] = {
    "waits": {"clip_grad_norm": 1e9},
    "validated later": {"clip_grad_norm": 1e9, "post_validation": True},
    "all taken back": {"clip_grad_norm": 1e-9, "post_validation": True},
}


def predicted(case: tuple[Any, ...]) -> list[list[str]]:
    p, m, f, b, w, c, h, a, *_ = case
    size, freed = 34 * h + 5 * a * 1024, (2 * h + 5 * a * 1024,) * p
    seconds = {"forward_seconds": (float(f),) * p, "backward_seconds": (float(b + w),) * p}
    costs = Costs(
        **seconds, weight_seconds=(float(w),) * p, cut_bytes=(float(c),) * (p - 1), cluster=Cluster.uniform(p, 1)
    )
    rows = []
    for share in LIMITS:
        bubbles = []
        for later in (False, True):
            judged = order_costs(tuple(range(p)), m, f, b, w, c, size=size, freed=freed, barrier=not later)
            judged = replace(judged, limits=(share * p * size,) * p)
            best = search(judged, [Schedule(name, p, m) for name in ("gpipe", "1f1b-flush", "zb-h1")])
            assert best is not None
            definition = define_by_programs("found", text_of_rows(judged, best.rows, repeats=False))
            made = Schedule(definition, p, m, norms=True, post_validation=later)
            runs = [play(dict(enumerate(made.program(steps))), made.placement, costs).seconds for steps in (3, 5)]
            bubbles.append(1 - 2 * m * (f + b + w) / (runs[1] - runs[0]))
        rows.append([str(p), str(m), str(f), f"{share:g}", *(f"{bubble:.4f}" for bubble in bubbles)])
    return rows


def work(path: Path) -> None:
    """One process; rank 0 writes what was found."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    sample, (x, y) = batch_of(CASE, 1)[:1], batch_of(CASE, CASE.microbatches)
    profile = alone(lambda: penstock.profile(model_of(CASE), sample, loss_fn=F.mse_loss, target=batch_of(CASE, 1)[1]))
    cluster = penstock.probe()
    weights = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    plain = Plan.balanced(weights, CASE.processes, microbatches=CASE.microbatches)
    plan = alone(lambda: find_order(plain, profile, cluster, memory_bytes=1e12).plan)
    pipes = {
        name: penstock.Pipeline(model_of(CASE), sample, F.mse_loss, sgd, plan=plan, **options)
        for name, options in WAYS.items()
    }
    losses = {name: [float(pipe.step(x, y).loss) for _ in range(3)] for name, pipe in pipes.items()}
    seconds = alternate(pipes, x, y, rounds=ROUNDS, steps=STEPS)
    if torch.distributed.get_rank() == 0:
        same = losses["waits"] == losses["validated later"]
        path.write_text(json.dumps({"seconds": seconds, "same": same, "order": str(plan.schedule)}))
    for pipe in pipes.values():
        pipe.close()


def measured(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, own in found["seconds"].items():
        ratios = [a / b - 1 for a, b in zip(found["seconds"]["waits"], own, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        gain = [f"{statistics.median(ratios):+.1%}", f"{error:.1%}"] if name != "waits" else ["", ""]
        rows.append([name, f"{1e3 * statistics.median(own):.0f} ms", *gain])
    return [*rows, ["same bits: " + ("yes" if found["same"] else "NO"), "", "", ""]]


def main() -> None:
    options = option_parser(__doc__, worker=True).parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    shown = Report(options.save)
    shown.add(conditions("benchmarks/post_validation.py"))
    shown.add("", f"Measured: {CASE.processes} processes, {CASE.microbatches} microbatches")
    found = launch_and_read(__file__, CASE.processes, options)
    shown.add(table(["updates", "a step takes", "faster", "error"], measured(found)))
    head = ["p", "m", "f", "limit", "waits", "validated later"]
    shown.add("", "Predicted: bubbles", table(head, [row for case in MEASURED[:6] for row in predicted(case)]))


if __name__ == "__main__":
    main()
