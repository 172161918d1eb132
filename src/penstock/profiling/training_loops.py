"""Scales a profile to a training: layers that run together take other times than layers that are measured one by one.

The profiler runs the backward of a layer right after its forward, so that weights and activations are in the cache, and
calls every layer from Python by itself. A stage runs the forwards of its layers, and then their backwards: caches are
colder, and calls between layers cheaper. On a CPU the two differ by a tenth or more, either way.

Besides, the times of a process vary, and stages wait for each other: a pipeline is as fast as the slowest process in
each microbatch, and not as the mean of them. So the mean of each round's slowest process counts, where every process is
compared with its own mean.

And devices are compared: how fast those of all ranks are at what they will do, the layers of the model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain, StageModule
from penstock.capturing.module_copies import Copies
from penstock.capturing.preservation import kept_generators
from penstock.capturing.sampled_models import chain_of_copies
from penstock.capturing.samples import read_sample
from penstock.profiling.clocks import windows
from penstock.profiling.devices import Sample
from penstock.profiling.profiler import profile, without_gradients
from penstock.runtime.collectives.agreements import gather_results
from penstock.runtime.transport.worlds import World
from penstock.training.recipes import autocasting
from penstock.values.device_kinds import DeviceKind
from penstock.values.profiles import Profile

_MOST_BYTES = 2**28
"""Of the activations and gradients of the layers that run together: many times a cache, and little of a host."""
_ROUNDS, _LEAST_SECONDS = 7, 1.0
"""How many rounds are measured, and for how long at least: the speed of a shared machine changes within a second."""
_HELD_UP = 1.5
"""The longest time that a round counts with, in medians. What is above is other work of the machine."""


def measure_rounds(profile: Profile, chain: LayerChain, sample: Sample, autocast: torch.dtype | None) -> list[float]:
    """The seconds of a forward and backward of the first layers of `chain` together, in each round. None where the
    device is no CPU: kernels take the same time in any order.
    """
    count = _together(profile)
    call, _ = read_sample(sample, chain.inputs.microbatch_size)
    inputs = chain.inputs.bind(call.args, call.kwargs)
    if not count or any(value.device.type != "cpu" for value in inputs.values()):
        return []
    modules = [layer.module for layer in chain.layers]
    with kept_generators(), without_gradients(modules), torch.inference_mode(False), torch.enable_grad():
        return _rounds(chain_of_copies(chain, Copies(modules)).stage(0, count), inputs, autocast)


def as_in_training(profile: Profile, rounds: Sequence[Sequence[float]]) -> Profile:
    """`profile` with the seconds of all layers scaled to those of a training. `rounds`: by rank, what each has measured
    at the same time as the others; the first rank has measured `profile`, too.
    """
    apart = sum(layer.seconds for layer in profile.layers[: _together(profile)])
    if not apart or not all(rounds):
        return profile
    longest = [_HELD_UP * median(own) for own in rounds]
    cut = [[min(each, most) for each in own] for own, most in zip(rounds, longest, strict=True)]
    means = [mean(own) for own in cut]
    relative = [[each / whole for each in own] for own, whole in zip(cut, means, strict=True)]
    together = means[0] * mean(map(max, zip(*relative, strict=False)))
    return profile.on(DeviceKind(profile.device, speed=apart / together))


def _together(profile: Profile) -> int:
    """How many layers run together: as many of the first ones as need little memory."""
    held = count = 0
    for layer in profile.layers:
        held += int(layer.saved_bytes + layer.workspace_bytes + 2 * layer.parameter_bytes + layer.frozen_bytes)
        count += held <= _MOST_BYTES
    return count


def _rounds(stage: StageModule, inputs: Mapping[str, Tensor], autocast: torch.dtype | None) -> list[float]:
    """The seconds of a forward and backward of `stage`, the first of its chain, in each round."""
    needed = {name: inputs[name] for name in stage.model_inputs}

    def run() -> None:
        with autocasting(autocast, torch.device("cpu")):
            outputs = stage((), dict(needed))
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    # The first run makes the gradients that the others add to.
    run()
    return windows(run, _LEAST_SECONDS, _ROUNDS)


_DIFFERENT = 1.3
"""How many times as long the slowest device takes as the fastest before they count as different."""

_ALIKE = 1.15
"""Up to this ratio two devices are of one class, where some are different."""

_ROUND_SECONDS = (0.2, 0.6, 1.2)
"""How long all ranks measure. Where they seem to differ they measure again, at most so often."""

_WINDOWS = 8
"""The least number of windows in a round."""


def measure_speeds(
    world: World, chain: LayerChain, sample: tuple[Any, ...] | dict[str, Any], autocast: torch.dtype | None
) -> tuple[float, ...]:
    """How many times as fast as that of rank 0 the device of every rank is; empty if all are about equal. Collective.

    All ranks run the layers at once, as they will in training, so that processes of one host slow each other down
    alike. Equal devices differ a little from one measurement to the next, so only larger differences count.

    An error on one rank is raised on all.
    """
    if world.processes == 1:
        return ()
    run = partial(profile, chain, sample, optimizer=None, autocast=autocast, iterations=1, warmup=1, progress=False)
    least = [inf] * world.processes
    speeds: tuple[float, ...] = ()
    for seconds in _ROUND_SECONDS:
        found = gather_results(world, "while it measured its speed", partial(windows, run, seconds, _WINDOWS))
        # The whole time of a window counts, so that a device that stands still between two layers is slow, too. Other
        # work on a machine only ever adds to a time.
        least = [min(known, *times) for known, times in zip(least, found, strict=True)]
        speeds = compare_seconds(least)
        if not speeds:
            break
    return speeds


def compare_seconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """The speeds of devices that take `seconds` for the same work, relative to the first; empty if all are equal.

    Devices that are nearly equal get one speed, the middle one of theirs.
    """
    least, most = min(seconds), max(seconds)
    if not least > 0 or most <= _DIFFERENT * least:
        return ()
    classes: list[list[float]] = []
    for each in sorted(seconds):
        if classes and each <= _ALIKE * classes[-1][-1]:
            classes[-1].append(each)
        else:
            classes.append([each])
    middle = {each: members[len(members) // 2] for members in classes for each in members}
    return tuple(middle[seconds[0]] / middle[each] for each in seconds)
