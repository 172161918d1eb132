"""The values of a chain that cross cuts, with the layers that make and read them."""

from penstock.capturing.chain import LayerChain
from penstock.values.crossings import Crossing


def crossings_of(chain: LayerChain) -> tuple[Crossing, ...]:
    """The values of `chain` that layers make and later ones read; the model's output is read by the last layer."""
    last = len(chain.layers) - 1
    reads: dict[str, dict[int, None]] = {}
    for index, layer in enumerate(chain.layers):
        for name in layer.inputs:
            reads.setdefault(name, {})[index] = None
    for name in chain.output.values:
        reads.setdefault(name, {})[last] = None
    found = []
    for index, layer in enumerate(chain.layers):
        for position, name in enumerate(layer.outputs):
            read = tuple(reader for reader in reads.get(name, {}) if reader > index)
            size = {"size_bytes": layer.output_bytes[position]} if layer.output_bytes else {}
            found += [Crossing(name, index, read, **size)] if read else []
    return tuple(found)
