"""Estimates what every layer of a chain takes, from the operators that it runs on the sample.

Nothing is measured, so every process and every run estimates the same. An operator takes the time to start it, that of
its arithmetic and that of its memory traffic. A GPU does the latter two at once, so that the longer one counts (the
roofline of [Williams 2009]). On a CPU they are added: the core that computes also reorders weights and takes the page
faults of new tensors, and without that the late layers of a ResNet, which have many weights, are estimated too short.

    GPU:  seconds = start + max(flops / peak, bytes / bandwidth)
    CPU:  seconds = start + flops / peak + bytes / bandwidth

A backward takes as long as the forward times `OperatorCall.backwards`: twice as long where everything is trained.
Then gradients are summed over microbatches: of every trained parameter the new gradient and the sum so far are read,
and the sum is written. The loss is not run by a capture. It belongs to the last layer and counts as six times the bytes
of the model's output, of which a cross-entropy moves three in its forward (log-softmax) and three in its backward.

A cut depends on ratios only, above all on that of peak to bandwidth: on a GPU it takes a hundred operations per byte
until arithmetic takes longer than memory, on a CPU about ten. Rates:

======  ===================================================  ==============  =========
device  operations per second, by the bytes of an element    bytes / second  start
======  ===================================================  ==============  =========
CPU     100e9 (4 bytes or fewer), 50e9 (8)                   10e9            3e-6 s
others  312e12 (2 or fewer), 19.5e12 (4), 9.7e12 (8)         2.0e12          5e-6 s
======  ===================================================  ==============  =========

A CPU's are those of one core of a server with AVX2, which multiplies and adds two vectors of 8 float32 at 3 GHz, and
its share of the memory. Those of all other devices are the A100's [A100 2021].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain as concatenated

import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.operators import OperatorCall

_PASSES_OF_A_SUM = 3
_PASSES_OF_A_LOSS = 6


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a device does in a second."""

    flops: Mapping[int, float]
    """By the largest size of an element, in bytes, that is computed at this rate."""
    moved_bytes: float
    start_seconds: float
    """That it takes to start an operator."""
    overlaps: bool
    """Whether it computes and moves bytes at once."""

    def seconds(self, operator: OperatorCall) -> float:
        """Forward and backward."""
        size = min((size for size in self.flops if size >= operator.element_bytes), default=max(self.flops))
        parts = operator.flops / self.flops[size], operator.moved_bytes / self.moved_bytes
        return (1 + operator.backwards) * (self.start_seconds + (max(parts) if self.overlaps else sum(parts)))


_CPU = _Rates({4: 100e9, 8: 50e9}, 10e9, 3e-6, overlaps=False)
_OTHERS = _Rates({2: 312e12, 4: 19.5e12, 8: 9.7e12}, 2.0e12, 5e-6, overlaps=True)


def estimate_seconds(chain: LayerChain, device: torch.device) -> tuple[float, ...] | None:
    """The forward and backward of one microbatch of the sample through every layer of `chain`, on `device`.

    None if nothing is known: no operator of PyTorch's has run in any layer.
    """
    if not any(layer.operators for layer in chain.layers):
        return None
    rates = _CPU if device.type == "cpu" else _OTHERS
    seconds = []
    for layer in chain.layers:
        summed = sum(
            parameter.numel() * parameter.element_size()
            for parameter in layer.module.parameters()
            if parameter.requires_grad
        )
        operators = sum(rates.seconds(operator) for operator in layer.operators)
        seconds.append(operators + _PASSES_OF_A_SUM * summed / rates.moved_bytes)
    sizes = concatenated.from_iterable(zip(layer.outputs, layer.output_bytes, strict=False) for layer in chain.layers)
    returned = [size for name, size in sizes if name in chain.output.values]
    seconds[-1] += _PASSES_OF_A_LOSS * sum(returned) / rates.moved_bytes
    return tuple(seconds)
