"""Scales a profile to a training: layers that run together take other times than layers that are measured one by one.

The profiler runs the backward of a layer right after its forward, so that weights and activations are in the cache, and
calls every layer from Python by itself. A stage runs the forwards of its layers, and then their backwards: caches are
colder, and calls between layers cheaper. On a CPU the two differ by a tenth or more, either way.
"""

import time
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain, StageModule
from penstock.capturing.preservation import preserved
from penstock.capturing.samples import read_sample
from penstock.profiling.devices import Sample
from penstock.profiling.profiler import without_gradients
from penstock.training.precisions import autocasting
from penstock.values.device_kinds import DeviceKind
from penstock.values.profiles import Profile

__all__ = ["as_in_training"]

_MOST_BYTES = 2**28
"""Of the activations and gradients of the layers that run together: many times a cache, and little of a host."""
_ROUNDS, _LEAST_SECONDS = 7, 0.2
"""How many rounds are measured, and for how long at least."""


def as_in_training(profile: Profile, chain: LayerChain, sample: Sample, autocast: torch.dtype | None) -> Profile:
    """`profile` with the seconds of all layers scaled by what the first layers of `chain` take together. Where the
    device is no CPU, it stays as it is: kernels take the same time in any order.
    """
    held = count = 0
    for layer in profile.layers:
        held += int(layer.saved_bytes + layer.workspace_bytes + 2 * layer.parameter_bytes)
        count += held <= _MOST_BYTES
    apart = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers[:count])
    call, _ = read_sample(sample, chain.inputs.microbatch_size)
    inputs = chain.inputs.bind(call.args, call.kwargs)
    if not apart or any(value.device.type != "cpu" for value in inputs.values()):
        return profile
    modules = [layer.module for layer in chain.layers]
    with preserved(modules), without_gradients(modules), torch.inference_mode(False), torch.enable_grad():
        together = _seconds(chain.stage(0, count), inputs, autocast)
    return profile.on(DeviceKind(profile.device, speed=apart / together))


def _seconds(stage: StageModule, inputs: Mapping[str, Tensor], autocast: torch.dtype | None) -> float:
    """The median seconds of a forward and backward of `stage`, the first of its chain."""
    needed = {name: inputs[name] for name in stage.model_inputs}
    computing = partial(autocasting, autocast, torch.device("cpu"))
    seconds, began = list[float](), 0.0
    while len(seconds) <= _ROUNDS or time.perf_counter() - began < _LEAST_SECONDS:
        start = time.perf_counter()
        began = began or start
        with computing():
            outputs = stage((), dict(needed))
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        seconds.append(time.perf_counter() - start)
    # The first one makes the gradients that the others add to.
    return median(seconds[1:])
