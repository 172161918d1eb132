"""The floating-point operations of a model for one sample, counted on the meta device.

Counted are products of matrices, convolutions and attention, as `torch.utils.flop_counter` does; these are nearly all
operations of usual models. A multiplication with an addition is two operations. Nothing is computed and no memory is
used: the layers run on tensors without numbers, in place of their weights, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penstock.capturing.chain import LayerChain
from penstock.capturing.preservation import preserved
from penstock.capturing.samples import read_sample

__all__ = ["count_training_flops"]

_FORWARDS_OF_A_STEP = 3
"""A backward takes twice the operations of its forward: one product for the gradient of each factor."""


def count_training_flops(chain: LayerChain, sample: Any) -> float | None:
    """The operations of forward and backward for one sample of `sample`, without recomputation and without the loss:
    three times those of the forward. None if the layers do not run on the meta device (a branch on the data, say).

    The modules are left as they were.
    """
    call, _ = read_sample(sample, chain.inputs.microbatch_size)
    modules = [layer.module for layer in chain.layers]
    values = {name: _without_numbers(tensor) for name, tensor in chain.inputs.bind(call.args, call.kwargs).items()}
    counter = FlopCounterMode(display=False)
    try:
        # The fused kernels of attention have other names on every device; its plain formula consists of products.
        with preserved(modules), torch.no_grad(), torch.device("meta"), sdpa_kernel(SDPBackend.MATH), counter:
            for layer in chain.layers:
                results = _run(layer.module, [values[name] for name in layer.inputs])
                values.update(zip(layer.outputs, results, strict=True))
    except Exception:
        # Whatever a model's own code raises on tensors without numbers.
        return None
    return float(_FORWARDS_OF_A_STEP * counter.get_total_flops()) / chain.inputs.microbatch_size


def _run(module: nn.Module, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    tensors: Mapping[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    stand_ins = {name: _without_numbers(tensor) for name, tensor in tensors.items()}
    results: tuple[Tensor, ...] = functional_call(module, stand_ins, tuple(arguments))
    return results


def _without_numbers(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
