"""Clusters in which every link differs by direction, as `penstock probe` measures them, and problems on them."""

from random import Random

from penstock.values import Cluster, LayerProfile, Plan, Profile
from penstock.values.link_tables import LinkMatrix


def directed_cluster(draw: Random, devices: int, *, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    """No two links are alike. `bandwidth`, `latency`: the largest of each."""
    rates = [[bandwidth * draw.uniform(0.1, 1) for _ in range(devices)] for _ in range(devices)]
    delays = [[latency * draw.random() for _ in range(devices)] for _ in range(devices)]
    return Cluster.from_matrix(rates, latency_seconds=delays)


def transposed(cluster: Cluster) -> Cluster:
    """`cluster` with the two directions of every link exchanged."""
    assert isinstance(cluster.links, LinkMatrix)
    rates, delays = (list(zip(*rows, strict=True)) for rows in (cluster.links.rows, cluster.links.latency_rows))
    return Cluster.from_matrix(rates, cluster.memory_bytes, delays)


def drawn_profile(draw: Random, layers: int) -> Profile:
    """Layers of 1 to 9 s, whose backwards are split without loss; a message takes up to some seconds at 1 byte/s."""
    return Profile(
        tuple(
            LayerProfile(
                str(layer),
                float(draw.randint(1, 4)),
                float(draw.randint(2, 9)),
                draw.choice([0.0, draw.random()]),
                float(draw.randint(1, 9)),
                draw.random(),
                weight_seconds=float(draw.randint(0, 2)),
            )
            for layer in range(layers)
        ),
        1,
        split_share=0.0,
    )


def drawn_plan(draw: Random, layers: int, ranks: int, microbatches: int) -> Plan:
    """One stage on a rank, or two, in a V or interleaved; some recompute."""
    fitting = [("1f1b-flush", 1), *([("zb-v", 2)] if 2 * ranks <= layers else [])]
    if 2 * ranks <= layers and microbatches % ranks == 0:
        fitting.append(("interleaved", 2))
    name, per_rank = draw.choice(fitting)
    stages = per_rank * ranks
    cuts = (0, *sorted(draw.sample(range(1, layers), stages - 1)), layers)
    again = tuple(stage for stage in range(stages) if draw.random() < 0.2)
    return Plan.of_cuts(cuts, ranks, name, microbatches, recompute=again)
