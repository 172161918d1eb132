"""A GPU without memory or values: every read by the host raises an error, and every mix of devices does.

Its tensors are those of PyTorch's `FakeTensorMode`, on a device of the kind that PyTorch leaves to others. They have
shapes and dtypes only, so that ``.item()``, ``.tolist()``, ``bool()`` and ``float()`` cannot answer. Events have never
passed: the device is far behind its host. A model is captured on the CPU, where its numbers are compared, and its
parameters move to the device then.

Law of this file: what raises here would make the host of a real GPU wait for it, or fail.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import penstock.pipeline
from penstock.runtime.assembly.captured_models import CapturedModel, capture_for_training
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.devices.accelerators import ACCELERATORS, Layout
from penstock.runtime.devices.communicators import Communicator, Members
from penstock.runtime.transport.worlds import World

_setup_privateuseone_for_python_backend("fakegpu")
# Autocast has no rules for such a device: everything stays in its own type.
_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
torch.fakegpu.get_rng_state = lambda device=None: torch.zeros(8, dtype=torch.uint8)  # type: ignore[attr-defined]
torch.fakegpu.set_rng_state = lambda state, device=None: None  # type: ignore[attr-defined]
# Nothing else in this process may take it for the accelerator of the machine.
torch.fakegpu.is_available = lambda: False  # type: ignore[attr-defined]
torch.fakegpu.device_count = lambda: 0  # type: ignore[attr-defined]
DEVICE = torch.device("fakegpu:0")
_MODE = FakeTensorMode()
"""One for all: what is made once in a process and kept belongs to it."""


class HostWaits(AssertionError):
    """The host would wait for the device."""


class _Event:
    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu = gpu

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._gpu.refuse("an event is waited for")


class FakeGpu(TorchFunctionMode):
    """The device, and its `Accelerator`. While it is on, ``torch.tensor`` makes its tensors, too."""

    name, visible, backend = "fake", 1, ""

    def __init__(self) -> None:
        super().__init__()
        self._refuses = False

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """A context in which a wait of the host for the device raises `HostWaits`. A read always raises."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    def refuse(self, reason: str) -> None:
        """Raises if the host must not wait now."""
        if self._refuses:
            raise HostWaits(reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            self.refuse("torch.tensor copies to the device")
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        result = func(*args, **kwargs)
        copied = isinstance(result, Tensor) and args and isinstance(args[0], Tensor) and func is not Tensor.copy_
        if copied and args[0].device != result.device and not kwargs.get("non_blocking"):
            self.refuse(f"{func.__name__} copies between the host and the device")
        return result

    def failure(self, communicator: Communicator) -> str:
        return ""

    def communicator(self, members: Members, ctas: int) -> Communicator:
        raise AssertionError("a fake device is alone")

    def enter_thread(self) -> None:
        """Does nothing: every thread can use the device."""

    def stream(self) -> object:
        return object()

    def current(self) -> object:
        return None

    def on(self, stream: object) -> AbstractContextManager[object]:
        return nullcontext()

    def record_event(self, stream: object) -> _Event:
        return _Event(self)

    def record_timed_event(self) -> _Event:
        return _Event(self)

    def seconds(self, start: _Event, stop: _Event) -> float:
        raise AssertionError("no event has passed")

    def wait(self, stream: object, event: _Event) -> None:
        """Does nothing: there are no values that could come too late."""

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype)

    def device_memory(self, layout: Layout, stream: object) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype, device=DEVICE)

    def copy(self, target: Tensor, source: Tensor, stream: object) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: object) -> None:
        """Does nothing: memory is not reused."""


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A context in which pipelines capture their models on the CPU and train on a fake GPU."""
    gpu = FakeGpu()

    def capture(world: World, options: PipelineOptions) -> CapturedModel:
        with unset_fake_temporarily():
            found = capture_for_training(world, options)
        moved: dict[int, Tensor] = {}
        for layer in found.chain.layers:
            for module in layer.module.modules():
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None:
                            held[name] = moved.setdefault(id(tensor), _on_device(tensor))  # type: ignore[assignment]
        parameters: Any = {name: moved[id(parameter)] for name, parameter in found.chain.parameters.items()}
        return replace(found, chain=replace(found.chain, parameters=parameters), device=DEVICE)

    monkeypatch.setattr(penstock.pipeline, "capture_for_training", capture)
    monkeypatch.setitem(ACCELERATORS, DEVICE.type, lambda device: gpu)  # type: ignore[misc, arg-type, return-value]
    with gpu, _MODE:
        yield gpu


def _on_device(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
