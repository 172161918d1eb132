"""Random numbers that depend on the seed, the microbatch and the layer, and on nothing else.

Dropout must draw the same mask whether the model runs whole or in stages, in one process or in eight, forward by
forward or again in a recomputation. So a random layer does not continue the generator's stream; it starts a stream of
its own, and gives the generator back as it found it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def microbatch_seed(seed: int, microbatch: int) -> int:
    """A seed for one microbatch, counted from the start of the training."""
    return _mix(seed, microbatch)


def part_seed(seed: int, part: int) -> int:
    """The seed of one part of the microbatch of `seed`, where replicas split microbatches."""
    return _mix(seed, -part) if part else seed


def seed_all(seed: int) -> None:
    """Seeds PyTorch's generators on all devices, as `torch.manual_seed` does.

    Where no accelerator was used yet, `torch.manual_seed` keeps the seed for later, with the text of the whole stack,
    which takes longer than a small model.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or (torch.accelerator.is_available() and not torch.cuda.is_available()):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int, layer: int, arguments: Sequence[object]) -> Iterator[None]:
    """Runs its body on the stream of (`seed`, `layer`), on the CPU and on the devices of `arguments`."""
    mixed = _mix(seed, layer)
    generators = [torch.default_generator]
    devices = {argument.device for argument in arguments if isinstance(argument, Tensor) and argument.is_cuda}
    generators += [torch.cuda.default_generators[device.index] for device in sorted(devices, key=lambda d: d.index)]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(mixed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _mix(*numbers: int) -> int:
    """A 63-bit hash of `numbers`: neighbouring numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
