"""A GPU without memory or values: every read by the host raises an error, and every mix of devices does.

Its tensors are those of PyTorch's `FakeTensorMode`, on a device of the kind that PyTorch leaves to others. They have
shapes and dtypes only, so that ``.item()``, ``.tolist()``, ``bool()`` and ``float()`` cannot answer. No event has
passed before it is waited for: the device is far behind its host. A model is captured on the CPU, where its numbers are
compared, and its parameters move to the device then.

Where a host may wait, its waits can be counted: every number that it reads is 1 then. The processes of a mesh are those
of PyTorch's process group ``fake``, which communicates nothing.

Law of this file: what raises here, or is counted, would make the host of a real GPU wait for it, or fail.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import penstock.pipeline
from penstock.capturing.chain import StageModule
from penstock.runtime.assembly import parallelize_hooks
from penstock.runtime.assembly.captured_models import CapturedModel, capture_for_training
from penstock.runtime.assembly.parallelize_hooks import ParallelStages, make_own_stages
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.assembly.scheduled_plans import ScheduledPlan
from penstock.runtime.checkpoints import own_states
from penstock.runtime.devices.accelerators import ACCELERATORS, Layout
from penstock.runtime.devices.communicators import Communicator, Members
from penstock.runtime.parameters import residence
from penstock.runtime.transport.tensor_parallel_transport import stage_mesh
from penstock.runtime.transport.worlds import SingleProcess, World
from penstock.torch_internals import subclasses, unimported

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
_MODE = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all: what is made once in a process and kept belongs to it."""


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_READS = frozenset({Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__})


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """Makes a tensor on the device for a thread that is not in the mode."""
    with _MODE:
        return torch.empty_strided(size, stride, dtype=dtype, device=DEVICE)


class HostWaits(AssertionError):
    """The host would wait for the device."""


class _Event:
    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu, self._passed = gpu, False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        if not self._passed:
            self._gpu.refuse("an event is waited for")
        self._passed = True


class FakeGpu(TorchFunctionMode):
    """The device, and its `Accelerator`. While it is on, ``torch.tensor`` makes its tensors, too."""

    name, visible, backend = "fake", 1, ""

    def __init__(self) -> None:
        super().__init__()
        self._refuses = False
        self._waits: list[str] | None = None

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """A context in which a wait of the host for the device raises `HostWaits`. A read raises, unless it counts."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """A context in which waits are collected, and every number that is read is 1."""
        before, self._waits = self._waits, list[str]()
        try:
            yield self._waits
        finally:
            self._waits = before

    def refuse(self, reason: str) -> None:
        """Counts a wait of the host, or raises if it must not wait now. Threads beside the computing one may."""
        if threading.current_thread().name.startswith("penstock"):
            return
        if self._waits is not None:
            self._waits.append(reason)
        elif self._refuses:
            raise HostWaits(reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _SET_DATA and args[0].device != args[1].device:
            # PyTorch exchanges the memory of a CPU with that of the devices that it has itself.
            args[0].fake_device = args[1].device
            return None
        if func is torch.equal and self._waits is not None and isinstance(args[0], FakeTensor):
            self.refuse("equal reads")
            return True
        if func in _READS and self.counts(args[0]):
            return self.read(args[0], func)
        if func is Tensor.numpy and hasattr(args[0], "written"):
            with unset_fake_temporarily():
                return args[0].written.numpy()
        if func is Tensor.cpu and self.counts(args[0]) and not hasattr(args[0], "written"):
            return self.read(args[0], Tensor.clone)
        if func is Tensor.__deepcopy__:
            return args[1].setdefault(id(args[0]), args[0].clone())
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            self.refuse("torch.tensor copies to the device")
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        result = func(*args, **kwargs)
        if not (isinstance(result, Tensor) and args and isinstance(args[0], Tensor)) or func is Tensor.copy_:
            return result
        if result.device.type not in (args[0].device.type, "meta") and not kwargs.get("non_blocking"):
            self.refuse(f"{func.__name__} copies between the host and the device")
        # The bytes of a text that the host sends, such as the specs of a message, come back to it.
        is_text = args[0].dtype is torch.uint8 and not isinstance(args[0], FakeTensor)
        written = getattr(args[0], "written", args[0] if is_text else None)
        if written is not None and isinstance(result, FakeTensor):
            result.written = written  # type: ignore[attr-defined]
        return result

    def counts(self, tensor: Tensor) -> bool:
        """Whether a read of `tensor` is counted now. It raises otherwise, since there is no value."""
        return self._waits is not None and tensor.device.type == DEVICE.type

    def read(self, tensor: Tensor, func: Any) -> Any:
        """Counts a read, by `func`, of numbers that are all 1."""
        self.refuse(f"{func.__name__} reads")
        with unset_fake_temporarily():
            return func(torch.ones(tensor.shape, dtype=tensor.dtype))

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
        with unset_fake_temporarily():
            return torch.empty_strided(shape, strides, dtype=dtype).fill_(1)

    def device_memory(self, layout: Layout, stream: object) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype, device=DEVICE)

    def copy(self, target: Tensor, source: Tensor, stream: object) -> None:
        """Does nothing: the copies of a device without values hold the value 1."""

    def record_stream(self, tensor: Tensor, stream: object) -> None:
        """Does nothing: memory is not reused."""


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A context in which pipelines capture their models on the CPU and train on a fake GPU."""
    gpu = FakeGpu()

    def capture(world: World, options: PipelineOptions) -> CapturedModel:
        with unset_fake_temporarily():
            found = capture_for_training(world, options)
            evaluated = found.chain.evaluation()
        moved: dict[int, Tensor] = {}
        for layer in (*found.chain.layers, *evaluated.layers):
            for module in layer.module.modules():
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None:
                            moved.setdefault(id(tensor), tensor if tensor.device == DEVICE else _on_device(tensor))
                            held[name] = moved[id(tensor)]  # type: ignore[assignment]
        parameters: Any = {name: moved[id(parameter)] for name, parameter in found.chain.parameters.items()}
        evaluation = replace(evaluated, parameters=parameters)
        chain = replace(found.chain, parameters=parameters, evaluation=lambda: evaluation)
        return replace(found, chain=chain, device=DEVICE)

    read, made_of, kept = FakeTensor.tolist, torch.from_numpy, own_states.keep_copy

    def from_numpy(array: Any) -> Tensor:
        with unset_fake_temporarily():
            return made_of(array)

    def keep_copy(tensors: dict[str, Tensor], tensor: Tensor, where: str) -> str:
        """States of the host's generators are real."""
        tensor = getattr(tensor, "written", tensor)
        with nullcontext() if isinstance(tensor, FakeTensor) else unset_fake_temporarily():
            return kept(tensors, tensor, where)

    def tolist(tensor: FakeTensor) -> Any:
        return gpu.read(tensor, Tensor.tolist) if gpu.counts(tensor) else read(tensor)

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    monkeypatch.setattr(own_states, "keep_copy", keep_copy)
    monkeypatch.setattr(residence, "PLAIN", (*unimported.PLAIN, FakeTensor))
    monkeypatch.setattr(subclasses, "PLAIN", (*unimported.PLAIN, FakeTensor))
    monkeypatch.setattr(penstock.pipeline, "capture_for_training", capture)
    monkeypatch.setitem(ACCELERATORS, DEVICE.type, lambda device: gpu)  # type: ignore[misc, arg-type, return-value]
    with gpu, _MODE:
        yield gpu


def _on_device(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Members(SingleProcess):
    """All ranks of a pipeline, each as the first of its tensor-parallel processes sees it."""

    def local(self, ranks: int, tensor_parallel_size: int = 1) -> tuple[int, ...]:
        return tuple(range(ranks))


@contextmanager
def fake_mesh(monkeypatch: pytest.MonkeyPatch, processes: int) -> Iterator[None]:
    """A context in which pipelines have a `parallelize=` hook, on a mesh of `processes`, which do not exist."""

    def make(options: PipelineOptions, world: World, captured: CapturedModel, planned: ScheduledPlan) -> ParallelStages:
        alone, modules = SingleProcess(), dict[int, StageModule]()
        alone.processes = processes
        for rank in planned.ranks:
            own = make_own_stages(options, alone, captured, replace(planned, ranks=(rank,)))
            captured = replace(captured, chain=own.chain)
            modules.update(own.modules)
        return replace(own, modules=modules)

    def mesh(*arguments: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return stage_mesh(*arguments)

    monkeypatch.setattr(dist.ProcessGroup, "set_timeout", lambda group, timeout: None)
    monkeypatch.setattr(parallelize_hooks, "stage_mesh", mesh)
    monkeypatch.setattr(penstock.pipeline, "join_world", lambda seconds: _Members())
    monkeypatch.setattr(penstock.pipeline, "make_own_stages", make)
    dist.init_process_group("cpu:fake,fakegpu:fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()
