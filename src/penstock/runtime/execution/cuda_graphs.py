"""The forwards and backwards of one stage as CUDA graphs: captured once and replayed, for each microbatch in flight.

A microbatch in flight has a *slot*: the lowest one that is free at its forward, until its backward is done. Each slot
has a captured graph of the forward and one of the backward. They have memory of their own for the tensors that the
stage receives, returns and saves in between, so there are as many slots as the schedule has microbatches in flight.

Laws of this file:
  1. The outputs of a forward lie in the memory of its slot. They have been read when the slot is taken again: the
     backward of the microbatch starts from gradients that come back from the last stage, whose forward came after all
     forwards of the microbatch.
  2. Gradients lie in memory that all backwards of the stage share. Autograd adds them to ``.grad``; it would use such a
     tensor as ``.grad`` itself if nothing else held it, so `_SharedCapture.gradients` holds them.
  3. A graph reads its weights by their memory, which never moves, and not through the leaves that the gradients are
     for: autograd would make the streams of capture and of training wait for each other at these.
  4. A capture has no side effects: buffers, generators and gradients are as they were before.
  5. One signature is captured, that of the first microbatch. Others run as compiled. Whatever is compiled or chosen
     when work first runs is therefore there before the first capture of the stage, and holds for all its slots.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from penstock.capturing.chain import LayerRunner, StageModule
from penstock.capturing.preservation import kept_generators, kept_tensors
from penstock.errors import PenstockError
from penstock.runtime.devices.graph_capture import GraphCapturer, GraphPool
from penstock.runtime.execution.python_state import PythonState
from penstock.torch_internals.tensors import times_written

__all__ = ["CudaGraphStage"]

WARM_UPS = 3
"""The number of times that a stage's work runs before it is first captured, as in PyTorch's own captures."""
_Signature: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, bool], ...]
_Gradients: TypeAlias = Sequence[Tensor | None]


class CudaGraphStage:
    """Runs `module`, stage number `stage`, through graphs that `capturer` captures."""

    def __init__(self, module: StageModule, capturer: GraphCapturer, stage: int, device: torch.device) -> None:
        self._module, self._shared = module, _SharedCapture(module, capturer, stage, device)
        self._signature: _Signature | None = None
        self._slots: list[_CapturedGraphs] = []
        self._free: list[int] = []
        """Indices of free slots, as a heap."""
        self._slot_of: dict[int, int] = {}
        """By microbatch, the index of its slot."""

    def run(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        layer_runner: LayerRunner | None = None,
    ) -> tuple[Tensor, ...]:
        """Runs the forward of `module` for `microbatch`, which takes a slot. The arguments are those of the module."""
        assert seed is None and layer_runner is None, "random or recomputed layers are not captured"
        given = (*received, *(inputs[name] for name in self._module.fetched))
        signature = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in given)
        outputs: tuple[Tensor, ...]
        if self._signature is None:
            self._signature = signature
        if signature != self._signature:
            outputs = self._module(received, inputs)
            return outputs
        slot = heappop(self._free) if self._free else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(_CapturedGraphs(self._shared, len(received), given))
        self._slot_of[microbatch] = slot
        outputs = _GraphReplay.apply(self._slots[slot], *given, *self._shared.leaves)  # type: ignore[no-untyped-call]
        return outputs

    def release(self, microbatch: int) -> None:
        """Frees the slot of `microbatch`, whose backward is done."""
        slot = self._slot_of.pop(microbatch, None)
        if slot is not None:
            heappush(self._free, slot)


@dataclass(slots=True, eq=False)
class _SharedCapture:
    """Holds what the captured graphs of one stage share."""

    module: StageModule
    capturer: GraphCapturer
    number: int
    device: torch.device
    leaves: tuple[nn.Parameter, ...] = field(init=False)
    """The trained parameters."""
    aliases: tuple[nn.Parameter, ...] = field(init=False)
    """Other leaves over the memory of `leaves`."""
    names: dict[str, nn.Parameter] = field(init=False)
    """The aliases, by each name under which a module has the parameter."""
    backwards: GraphPool = field(init=False)
    """The memory pool of all backwards: nothing in it is needed when the next one begins."""
    outputs: tuple[tuple[Tensor, bool], ...] = ()
    """The outputs of a forward on the meta device, and whether each has a gradient; set with the first slot."""
    gradients: list[Tensor | None] | None = None
    """The gradients of the arguments of a graph, and then of `leaves`; None for those without. Set with the
    first slot.
    """

    def __post_init__(self) -> None:
        self.leaves = tuple([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        self.aliases = tuple([nn.Parameter(leaf.detach()) for leaf in self.leaves])
        alias_of = dict(zip(self.leaves, self.aliases, strict=True))
        for leaf, alias in alias_of.items():
            cast(Any, alias).grad_dtype = cast(Any, leaf).grad_dtype
        self.names = {
            f"{path}.{name}": alias_of[parameter]
            for path, owner in self.module.named_modules()
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in alias_of
        }
        self.backwards = self.capturer.pool()

    def autocast(self, forward: bool) -> AbstractContextManager[None]:
        """The present autocast for forwards, without its cache: no graph may read weights that another forward cast.
        For backwards, none.
        """
        kind = self.device.type
        enabled = forward and torch.is_autocast_enabled(kind)
        return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=enabled, cache_enabled=False)


class _CapturedGraphs:
    """Holds the captured forward and backward of one slot, and replays them for one microbatch at a time.

    `given`: the arguments of the first microbatch; the first `received` of them came from other stages.
    """

    _live: tuple[Tensor, ...]
    """The outputs with their history, from a forward to its backward."""
    _starts: Sequence[Tensor]
    """The gradients that the backward starts from."""

    def __init__(self, stage: _SharedCapture, received: int, given: Sequence[Tensor]) -> None:
        for tensor in given:
            if tensor.device.type != stage.device.type:
                raise PenstockError(
                    f"stage {stage.number} reads a tensor of shape {tuple(tensor.shape)} on {tensor.device}, and its "
                    f"work is captured as a CUDA graph: expected all it reads on {stage.device}. Pass batches there"
                )
        self._shared, self._received, self.count = stage, received, len(given)
        with torch.no_grad():
            self._given = [tensor.clone().requires_grad_(tensor.requires_grad) for tensor in given]
        self._needed = [tensor for tensor in (*self._given, *stage.aliases) if tensor.requires_grad]
        with kept_generators([stage.module]), kept_tensors(stage.module):
            if stage.gradients is None:
                stage.gradients = self._make_gradients(self._warm_up())
            self.differentiable = tuple([kept for _, kept in stage.outputs])
            self._starts = [torch.zeros_like(output, device=stage.device) for output, kept in stage.outputs if kept]
            self._capture()

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the stage, in the memory of this slot."""
        for held, tensor in zip(self._given, given, strict=True):
            held.copy_(tensor)
        self._go_forward()
        self._written = [times_written(output) for output in self._outputs]
        return tuple([output.detach() for output in self._outputs])

    def backward(self, gradients: Sequence[Tensor | None]) -> _Gradients:
        """Maps the gradients of the outputs of `forward` to those of its arguments and of the stage's leaves."""
        for output, written in zip(self._outputs, self._written, strict=True):
            if times_written(output) != written:
                raise PenstockError(
                    f"a tensor of shape {tuple(output.shape)} that stage {self._shared.number} made was written in "
                    "place before its backward, which may read it again: expected it as it was. Let the loss or the "
                    "metrics write in a copy"
                )
        wanted = (gradient for gradient, kept in zip(gradients, self.differentiable, strict=True) if kept)
        for start, gradient in zip(self._starts, wanted, strict=True):
            if gradient is None:
                start.zero_()
            else:
                start.copy_(gradient)
        self._go_backward()
        assert self._shared.gradients is not None
        return self._shared.gradients

    def _warm_up(self) -> _Gradients:
        """Runs forwards and backwards. Returns gradients, and sets the outputs of the stage."""
        stage = self._shared
        buffers = list(stage.module.buffers())
        found: _Gradients = ()
        with stage.capturer.warm_up():
            for _ in range(WARM_UPS):
                # What is changed by the first runs only is a cache.
                state = PythonState(stage.module)
                self._compute()
                found = self._differentiate([torch.zeros_like(o) for o in self._live if o.requires_grad])
        if any(one is not other for one, other in zip(buffers, stage.module.buffers(), strict=True)):
            raise PenstockError(
                f"a layer of stage {stage.number} ({', '.join(stage.module.names)}) puts a new tensor in the place of "
                "a buffer in its forward, which a CUDA graph does not repeat: expected that it writes the one "
                "that it has, as in self.buffer.copy_(...). Or leave the mode out of compile="
            )
        if changed := state.changes(in_place=False):
            raise PenstockError(
                f"a layer of stage {stage.number} ({', '.join(stage.module.names)}) changes {changed[0]} in its "
                "forward or backward, which a CUDA graph does not repeat: expected state in buffers that it writes in "
                'place. Keep it in one, or use a mode without graphs: compile={"mode": "max-autotune-no-cudagraphs"}'
            )
        stage.outputs = tuple([(torch.empty_like(o, device="meta"), o.requires_grad) for o in self._live])
        # With the history goes autograd's memory of the stream that it was made on.
        self._live = ()
        return found

    def _make_gradients(self, found: _Gradients) -> list[Tensor | None]:
        """Memory for the gradients `found` of those tensors that need one, and None for the others."""
        if any(gradient is not None and gradient.layout != torch.strided for gradient in found):
            raise PenstockError(
                f"a weight of stage {self._shared.number} has sparse gradients, and a CUDA graph needs fixed sizes: "
                "expected dense ones. Make the embedding with sparse=False, or leave the mode out of compile="
            )
        made = iter([None if gradient is None else torch.empty_like(gradient) for gradient in found])
        leaves = self._shared.leaves
        return [next(made) if tensor.requires_grad else None for tensor in (*self._given, *leaves)]

    def _capture(self) -> None:
        stage, capturer = self._shared, self._shared.capturer
        try:
            outputs, self._go_forward = capturer.capture(self._compute, capturer.pool())
            self._outputs = tuple([output.detach() for output in outputs])
            if self._starts:
                _, self._go_backward = capturer.capture(self._compute_gradients, stage.backwards)
        except RuntimeError as error:
            raise PenstockError(
                f"stage {stage.number} ({', '.join(stage.module.names)}) cannot be captured as a CUDA graph: expected "
                "layers that neither read numbers on the host (.item(), a branch on the data) nor make shapes of them. "
                f'Use compile={{"mode": "max-autotune-no-cudagraphs"}}, or change the layer. PyTorch says: {error}'
            ) from error
        self._live = ()

    def _compute(self) -> tuple[Tensor, ...]:
        stage = self._shared
        received, rest = self._given[: self._received], self._given[self._received :]
        inputs = dict(zip(stage.module.fetched, rest, strict=True))
        with torch.enable_grad(), stage.autocast(forward=True):
            self._live = functional_call(stage.module, cast(Any, stage.names), (received, inputs), tie_weights=False)
        return self._live

    def _differentiate(self, starts: Sequence[Tensor]) -> _Gradients:
        roots = [output for output in self._live if output.requires_grad]
        if not roots:
            return [None] * len(self._needed)
        with self._shared.autocast(forward=False):
            return torch.autograd.grad(roots, self._needed, starts, allow_unused=True)

    def _compute_gradients(self) -> tuple[Tensor, ...]:
        """Runs the backward, and copies its results to the memory that all backwards of the stage share."""
        found = iter(self._differentiate(self._starts))
        tensors = (*self._given, *self._shared.leaves)
        assert self._shared.gradients is not None
        with torch.no_grad():
            for tensor, kept in zip(tensors, self._shared.gradients, strict=True):
                gradient = next(found) if tensor.requires_grad else None
                assert (gradient is None) == (kept is None), "every microbatch has gradients for the same tensors"
                if gradient is not None and kept is not None:
                    kept.copy_(gradient)
        return ()


class _GraphReplay(torch.autograd.Function):
    """Replays captured graphs as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, graphs: _CapturedGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        outputs = graphs.forward(tensors[: graphs.count])
        fixed = [output for output, kept in zip(outputs, graphs.differentiable, strict=True) if not kept]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graphs.backward(gradients))
