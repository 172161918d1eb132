"""Repeated blocks: which layers of a profile are repetitions of the same block.

Large models repeat one block [Narayanan 2021, section 3.2.2], and a profile may show each block as several layers. A
layer is like the one a period before it if all its sizes are equal, byte for byte, and its times are as far apart as
noise makes them. The longest run of such layers is cut into blocks; what lies before them (an embedding) and behind
them (a head) stays apart.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.values.profiles import Profile

TIME_TOLERANCE = 0.3
"""How far apart two measured times of the same layer may be, as a share of the larger one or of the mean layer's time;
the mean, because a layer that takes microseconds is measured with more noise than one that takes milliseconds."""

_LEAST_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The structure ``[prefix | block | block | ... | suffix]`` of a chain; without blocks if `count` is 0."""

    prefix: int
    """Layers before the first block; all layers if there are no blocks."""
    length: int
    """Layers in a block."""
    count: int
    """Blocks; 0, or 2 and more."""
    suffix: int
    """Layers behind the last block."""

    @property
    def layers(self) -> int:
        """The number of layers of the whole chain."""
        return self.prefix + self.length * self.count + self.suffix

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where stages may begin and end: between any two layers, except inside a block; including 0 and all layers."""
        start, stop = self.prefix, self.prefix + self.length * self.count
        return (*range(start), *range(start, stop, max(self.length, 1)), *range(stop, self.layers + 1))

    def equal_cuts(self, stages: int) -> tuple[int, ...] | None:
        """The ``stages + 1`` cuts of equally many blocks per stage; the first has the prefix too, the last the suffix.

        None if the blocks cannot be divided evenly.
        """
        if stages == 1:
            return 0, self.layers
        if not self.count or self.count % stages:
            return None
        layers = self.count // stages * self.length
        return 0, *(self.prefix + stage * layers for stage in range(1, stages)), self.layers


def find_blocks(profile: Profile) -> RepeatedBlocks:
    """The blocks that cover the most layers of `profile`; of equals those of fewer layers each. O(N^2) for N layers.

    If the run is longer than its blocks, they begin where the fewest bytes cross the cuts between them, and of equals
    as early as possible. A repetition that takes less than `_LEAST_SHARE` of the chain's seconds (a few equal
    convolutions in a row) does not count as blocks.
    """
    layers = profile.layers
    sizes = np.array([(layer.parameter_bytes, layer.cut_bytes, layer.saved_bytes) for layer in layers])
    seconds = np.array([(layer.forward_seconds, layer.backward_seconds) for layer in layers])

    covered, best = 0, RepeatedBlocks(len(layers), 0, 0, 0)
    for length in range(1, len(layers) // 2 + 1):
        start, stop = _longest_run(_alike(sizes, seconds, length))
        count = (stop - start) // length + 1
        if start < stop and count >= 2 and count * length > covered:
            covered = count * length
            # The run, and the period before it that it is like, may be up to a block longer than whole blocks.
            spare = stop - start + length - covered
            begins = range(start, start + spare + 1)
            begin = min(begins, key=lambda first: _crossing(sizes[:, 1], first, length, count))
            best = RepeatedBlocks(begin, length, count, len(layers) - begin - covered)
    repeated = seconds[best.prefix : best.layers - best.suffix].sum()
    return best if covered and repeated >= _LEAST_SHARE * seconds.sum() else RepeatedBlocks(len(layers), 0, 0, 0)


def cut_positions(profile: Profile, blocks: RepeatedBlocks, most: int) -> tuple[int, ...]:
    """`blocks.cuts`, or, of a chain without blocks, about `most` of them: one in every equal share of its seconds.

    In each share it is the position that the fewest bytes cross. 0 and all layers are included.
    """
    cuts = blocks.cuts
    if blocks.count or len(cuts) <= most:
        return cuts
    totals = np.cumsum([layer.seconds for layer in profile.layers])
    shares = np.minimum((totals / (totals[-1] or 1.0) * most).astype(np.int64), most - 1)
    cheapest: dict[int, int] = {}
    for cut in cuts[1:-1]:
        share, crossing = int(shares[cut - 1]), profile.layers[cut - 1].cut_bytes
        if share not in cheapest or crossing < profile.layers[cheapest[share] - 1].cut_bytes:
            cheapest[share] = cut
    return 0, *cheapest.values(), cuts[-1]


def _alike(sizes: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.bool_]:
    """Whether layer i + `length` is like layer i, for every i."""
    one, other = seconds[:-length], seconds[length:]
    scale = np.maximum(np.maximum(one, other), seconds.mean(axis=0))
    near = np.abs(one - other) <= TIME_TOLERANCE * scale
    equal = sizes[:-length] == sizes[length:]
    alike: npt.NDArray[np.bool_] = near.all(axis=1) & equal.all(axis=1)
    return alike


def _longest_run(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The first of the longest runs of true flags, as start and stop."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int((stops - starts).argmax())
    return int(starts[longest]), int(stops[longest])


def _crossing(cut_bytes: npt.NDArray[np.float64], first: int, length: int, count: int) -> float:
    """The bytes over the cuts between blocks, if the first block begins with layer `first`."""
    last_layers = first + length * np.arange(1, count) - 1
    return float(cut_bytes[last_layers].sum())
