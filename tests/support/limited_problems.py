"""Random stages that an order is sought for under one limit and another: uneven, with bytes that bind."""

from random import Random

from penstock import Cluster, LayerProfile, Plan, Profile
from penstock.simulating import evaluate

SHARES = (0.45, 0.6, 0.8, 1.0, 1.4)
"""Limits, in units of what the plan takes as it is."""


def limited_problem(seed: int) -> tuple[Plan, Profile, Cluster, float]:
    """A plan, its profile and cluster, and the bytes of its fullest rank with `1f1b-flush`."""
    draw = Random(seed)
    ranks = draw.choice([2, 2, 3, 4])
    per_rank = draw.choice([1, 1, 2])
    layers = draw.randint(per_rank * ranks, per_rank * ranks + 4)
    profile = Profile(
        tuple(
            LayerProfile(
                str(layer),
                forward_seconds=draw.choice([1.0, draw.uniform(0.5, 3)]),
                backward_seconds=2 * draw.choice([1.0, draw.uniform(0.5, 3)]),
                cut_bytes=draw.choice([0.0, draw.uniform(0, 0.3)]),
                saved_bytes=draw.choice([4.0, draw.uniform(1, 9)]),
                parameter_bytes=draw.choice([0.0, draw.uniform(0, 4)]),
                workspace_bytes=draw.choice([0.0, 0.0, draw.uniform(0, 2)]),
                weight_seconds=draw.choice([None, 1.0]),
            )
            for layer in range(layers)
        ),
        1,
        split_share=draw.choice([None, 0.08]),
    )
    cuts = (0, *sorted(draw.sample(range(1, layers), per_rank * ranks - 1)), layers)
    again = tuple(stage for stage in range(per_rank * ranks) if draw.random() < 0.2)
    count = draw.randint(4, 10)
    name = "zb-v" if per_rank == 2 else "1f1b-flush"
    plan = Plan.of_cuts(cuts, ranks, name, count, recompute=again)
    cluster = Cluster.uniform(ranks, draw.choice([1e9, 0.3]))
    usual = Plan.of_cuts(tuple(round(layers * rank / ranks) for rank in range(ranks + 1)), ranks, microbatches=count)
    return plan, profile, cluster, max(evaluate(usual, profile, cluster).peak_bytes)
