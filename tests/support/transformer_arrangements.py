"""Transformers, machines and searches that the tests of PTD-P share."""

import math
from itertools import accumulate, permutations
from operator import mul
from typing import Any

from penstock.planning.ptd_p.accelerator_models import AcceleratorModel
from penstock.planning.ptd_p.parallel_configs import ConfigEstimate, ParallelLinks
from penstock.planning.ptd_p.ring_links import Ring
from penstock.planning.ptd_p.three_d import ThreeDRequest, rank_three_d
from penstock.planning.ptd_p.transformer_costs import ModuleCosts
from penstock.values.clusters import Cluster
from penstock.values.transformers import Transformer

GIB = 2**30
GPT_175B, GPT_530B, GPT_1T = Transformer(96, 12288, 96), Transformer(105, 20480, 128), Transformer(128, 25600, 160)
GPT_162B, GPT_145B = Transformer(32, 20480, 128), Transformer(80, 12288, 96)
GPT_91B, GPT_6B, GPT_1B = Transformer(72, 10240, 80), Transformer(32, 3840, 32), Transformer(4, 4096, 128)
NOTHING = ModuleCosts(0.0, 0.0, 0.0, 0.0, 0.0)
FREE = ParallelLinks(Ring(1), Ring(1), Ring(1))
TOY = AcceleratorModel("toy", 1e12, 1e11, 0.8, 1000.0)


def selene(devices: int, server: int = 8) -> Cluster:
    """Servers of A100s as in section 4.5: NVLink inside, one InfiniBand card of 200 Gbit/s per device outside."""
    return Cluster.hierarchical([(server, 300e9), (-(-devices // server), 25e9)], 80 * GIB)


def slowest_pair(cluster: Cluster, groups: list[list[int]], *, striped: bool) -> float:
    """The least over all pairs of the link between them, times the links of those beside the first if `striped`."""
    sizes = [1, *accumulate((count for count, _ in cluster.levels), mul)]

    def rails(group: list[int], a: int, b: int) -> int:
        apart = max(size for size in sizes if a // size != b // size)
        return sum(other // apart == a // apart for other in group) if striped else 1

    pairs = [(group, a, b) for group in groups for a, b in permutations(group, 2)]
    return min((cluster.bandwidth(a, b) * rails(group, a, b) for group, a, b in pairs), default=math.inf)


def best(transformer: Transformer, devices: int, batch: int, server: int = 8, **fixed: Any) -> ConfigEstimate:
    return rank_three_d(ThreeDRequest(transformer, selene(devices, server), batch, **fixed), 0)[0]
