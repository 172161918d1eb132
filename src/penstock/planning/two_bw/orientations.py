"""Orientations: how d parallel pipelines of p stages are placed on the devices, and how slow their links are.

With the replicas of a stage on consecutive ranks, their all-reduce stays inside a server wherever d divides the devices
of a server, d equal to them included [Narayanan 2021, section 3.3]. With a pipeline on
consecutive ranks, the activations do. Seconds per byte are computed for all pairs of an orientation at once, because a
planner tries thousands of them.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, get_args

import numpy as np
import numpy.typing as npt

from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels, LinkMatrix

ConsecutiveRanks: TypeAlias = Literal["replicas", "pipelines"]
"""Whether the replicas of a stage or the stages of a pipeline are on consecutive ranks."""

CONSECUTIVE_RANKS: tuple[ConsecutiveRanks, ...] = get_args(ConsecutiveRanks)

_Numbers: TypeAlias = npt.NDArray[np.float64]
_Ranks: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Orientation:
    """Holds the links of d pipelines of p stages on the first d p ranks, one column per replica."""

    consecutive: ConsecutiveRanks
    ranks: _Ranks
    """(p, d): the ranks of each stage in replica order."""
    hop_seconds_per_byte: _Numbers
    """(p-1, d): the seconds of a cut per byte, half activations and half gradients."""
    hop_latency_seconds: _Numbers
    """(p-1, d): the latency of one activation and one gradient."""
    ring_seconds_per_byte: _Numbers
    """(p, d): from each replica of a stage to the next one in the ring; 0 without replicas."""
    ring_latency_seconds: _Numbers
    """(p, d): the latency of the same links."""


class LinkTable:
    """Holds the links of a cluster, to be looked up for many pairs of ranks at once."""

    def __init__(self, cluster: Cluster) -> None:
        match cluster.links:
            case LinkLevels(levels, latencies):
                self._sizes = [int(size) for size in np.cumprod([count for count, _ in levels])]
                self._slowness = np.array([1 / bandwidth for _, bandwidth in levels])
                self._latency = np.array(latencies, dtype=np.float64)
            case LinkMatrix(rows, latency_rows):
                self._sizes = []
                bandwidths = np.array(rows, dtype=np.float64)
                np.fill_diagonal(bandwidths, np.inf)
                self._slowness = 1 / bandwidths
                self._latency = np.array(latency_rows, dtype=np.float64)
            case _:
                assert_never(cluster.links)

    def orient(self, replicas: int, stages: int, consecutive: ConsecutiveRanks) -> Orientation:
        """The orientation of `replicas` pipelines of `stages` stages on the first ranks. O(replicas x stages)."""
        numbers = np.arange(replicas * stages)
        match consecutive:
            case "replicas":
                ranks = numbers.reshape(stages, replicas)
            case "pipelines":
                ranks = numbers.reshape(replicas, stages).T
            case _:
                assert_never(consecutive)
        there, there_latency = self.links(ranks[:-1], ranks[1:])
        back, back_latency = self.links(ranks[1:], ranks[:-1])
        ring, ring_latency = np.zeros((stages, 1)), np.zeros((stages, 1))
        if replicas > 1:
            ring, ring_latency = self.links(ranks, np.roll(ranks, -1, axis=1))
        return Orientation(consecutive, ranks, (there + back) / 2, there_latency + back_latency, ring, ring_latency)

    def links(self, a: _Ranks, b: _Ranks) -> tuple[_Numbers, _Numbers]:
        """(Seconds per byte, latency in seconds) from the ranks `a` to the ranks `b`, pair by pair."""
        if not self._sizes:
            return self._slowness[a, b], self._latency[a, b]
        joining = np.zeros(a.shape, dtype=np.intp)
        for size in self._sizes[:-1]:
            joining += a // size != b // size
        return self._slowness[joining], self._latency[joining]
