"""Prints the orders that are found beside published ones and beside the named schedules, with bounds and seconds.

    python benchmarks/orders.py --save benchmarks/results/orders.txt

Sources: times, bytes and bubbles measured by github.com/sail-sg/zero-bubble-pipeline-parallelism, f68d387
(efficiency.py); the frontier of the building blocks of [V 2024] as the code of its authors expects it. Nothing runs on
a device: all times are simulated. `to gain`: the most that the lower bound leaves.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import process_time

from measurement.reports import Report, conditions, option_parser, table
from penstock.errors import PlanError, ScheduleError
from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.local_moves import improve
from penstock.planning.orders.rows import OrderCosts, TimedRows
from penstock.planning.orders.search import find_order
from penstock.planning.orders.seeds import find_seeds, spread_weights
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

MEASURED = (
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1242, 0.0039),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.1323, 0.0029),
    (8, 32, 29802, 29428, 19530, 577, 4096, 32, 0.1045, 0.0022),
    (8, 64, 29935, 29621, 19388, 535, 4096, 32, 0.0554, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.1397, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.1088, 0.0054),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.1421, 0.0038),
)
"""p, m, f, b, w, c (microseconds), h, a, and the bubbles of ZB-1p and ZB-2p."""
BLOCKS = {(4, 8): (0.89, 0.85, 0.80, 0.73), (8, 16): (0.86, 0.82, 0.78, 0.70), (8, 24): (0.90, 0.87, 0.83, 0.77)}
"""By p and m: the step as a share of 1F1B's with 0.5, 0.625, 0.75 and 1 times its activations, F = B = W."""
SHARES = (0.5, 0.625, 0.75, 1.0)
LIMITS = (0.75, 1.0, 1.25, 1.5, 2.0)
SEEDS, TRIES = 4, 400


def search(costs: OrderCosts, named: list[Schedule]) -> tuple[TimedRows, float]:
    """The best rows for `costs`, and the processor seconds of the search."""
    begun = process_time()
    improved = [improve(costs, seed, TRIES) for seed in find_seeds(costs, named)[:SEEDS]]
    improved += [again for timed in improved for again in spread_weights(costs, timed)]
    return min(improved, key=lambda timed: timed.seconds), process_time() - begun


def measured_rows() -> Iterator[list[str]]:
    for p, m, f, b, w, c, h, a, *published in MEASURED:
        saved = 34 * h + 5 * a * 1024
        for times, bubble in zip((1, 2), published, strict=True):
            costs = OrderCosts(
                tuple(range(p)), m, (f,) * p, (b,) * p, (w,) * p, (c,) * (p - 1), (c,) * (p - 1), (saved,) * p,
                (times * p * saved,) * p, (2 * h + 5 * a * 1024,) * p, barrier=False,
            )  # fmt: skip
            best, seconds = search(costs, [])
            found = 1 - max(costs.work) / best.seconds
            gap = bound_of(costs).gap(best.seconds)
            row = [str(p), str(m), str(f), f"{times} p", f"{bubble:.4f}", f"{found:.4f}"]
            yield [*row, f"{gap:.1%}", f"{seconds:.1f}"]


def block_rows() -> Iterator[list[str]]:
    for (p, m), published in BLOCKS.items():
        placement = Placement.folded(p)
        each, free = (1.0,) * (2 * p), (0.0,) * (2 * p - 1)
        ranks = tuple(held[0] for held in placement.stages)
        for share, expected in zip(SHARES, published, strict=True):
            limits = (2 * p * share,) * p
            costs = OrderCosts(ranks, m, each, each, each, free, free, each, limits, barrier=False)
            best, seconds = search(costs, [Schedule("zb-v", p, m, 2)])
            found = best.seconds / (6 * (m + p - 1))
            gap = bound_of(costs).gap(best.seconds)
            yield [str(p), str(m), f"{share:.3f}", f"{expected:.2f}", f"{found:.3f}", f"{gap:.1%}", f"{seconds:.1f}"]


def transformer_rows() -> Iterator[list[str]]:
    """32 equal blocks and a head of as much time as one and with 2.5 times their activations."""
    blocks = [LayerProfile(f"block{index}", 1e-2, 2e-2, 16e6, 4e8, 1e8) for index in range(32)]
    profile = Profile((*blocks, LayerProfile("head", 1.2e-2, 2.4e-2, 0, 1e9, 4e8)), 1)
    weights = [layer.forward_seconds for layer in profile.layers]
    for p, m, bandwidth in ((4, 8, 100e9), (4, 8, 1.25e9), (8, 16, 100e9), (8, 16, 3e9), (8, 32, 12e9)):
        cluster = Cluster.uniform(p, bandwidth)
        plans = [Plan.balanced(weights, p, microbatches=m)]
        plans += [Plan.balanced(weights, 2 * p, "zb-v", microbatches=m, stages_per_rank=2)]
        reference = evaluate(plans[0], profile, cluster)
        for limit in LIMITS:
            memory = limit * max(reference.peak_bytes)
            named = min(named_seconds(plans, profile, cluster, memory), default=None)
            begun = process_time()
            found = []
            for plan in plans:
                try:
                    found.append(find_order(plan, profile, cluster, memory_bytes=memory))
                except PlanError:
                    continue
            best = min(found, key=lambda each: seconds_of(each.plan), default=None)
            row = [str(p), str(m), f"{bandwidth / 1e9:g}", f"{limit:.2f}"]
            if best is None:
                yield [*row, "", "", "nothing fits", "", ""]
                continue
            taken, step = process_time() - begun, seconds_of(best.plan)
            gain = "" if named is None else f"{named / step - 1:+.1%}"
            share, order = f"{step / reference.minibatch_seconds:.3f}", f"{best.plan.schedule}, {len(best.plan.stages)}"
            yield [*row, share, gain, order, f"{best.gap:.1%}", f"{taken:.1f}"]


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.minibatch_seconds


def named_seconds(plans: list[Plan], profile: Profile, cluster: Cluster, memory: float) -> Iterator[float]:
    """The step of every named schedule that fits."""
    for plan in plans:
        for name in ("gpipe", "1f1b-flush", "spp", "zb-h1", "zb-v"):
            try:
                outcome = evaluate(replace(plan, schedule=name), profile, cluster)
            except (PlanError, ScheduleError):
                continue
            if max(outcome.peak_bytes) <= memory:
                yield outcome.minibatch_seconds


def main() -> None:
    report = Report(option_parser(__doc__).parse_args().save)
    report.add(conditions("benchmarks/orders.py"))
    report.add("", "One stage per rank, measured times and bytes; bubbles of the longest span of a rank")
    head = ["p", "m", "f", "limit", "published", "found", "to gain", "s"]
    report.add(table(head, list(measured_rows())))
    report.add("", "Two stages per rank in a V, F = B = W; the step as a share of 1F1B's")
    head = ["p", "m", "memory", "published", "found", "to gain", "s"]
    report.add(table(head, list(block_rows())))
    report.add("", "A transformer; limits in units of what 1f1b-flush takes, steps in units of its step")
    head = ["p", "m", "GB/s", "limit", "step", "over named", "order, stages", "to gain", "s"]
    report.add(table(head, list(transformer_rows())))


if __name__ == "__main__":
    main()
