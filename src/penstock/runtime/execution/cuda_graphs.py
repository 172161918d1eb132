"""The forwards and backwards of one stage, recorded once and done again: a recording for each microbatch in flight.

A microbatch in flight has a *place*: the lowest one that is free when it is forwarded, until its backward is done. Each
place has a recording of the forward and one of the backward, with memory of their own for what the stage receives,
returns and saves in between, so that there are as many as the schedule has microbatches in flight.

Laws of this file:
  1. What a forward returns lies in the memory of its place. Whoever it is sent to has read it when the place is taken
     again: the backward of the microbatch starts from gradients that come back from the last stage, whose forward came
     after all forwards of the microbatch.
  2. Gradients lie in memory that all backwards of the stage share. They leave it by autograd, which adds them to
     ``.grad`` and takes no tensor for it that somebody else holds: `_Stage.gradients` holds them.
  3. A recording knows its weights by their memory, which never moves, and not by the leaves that the gradients are for:
     autograd would have the streams of recording and of training wait for each other at these.
  4. Recording leaves no trace: buffers, generators and gradients are as they were before.
  5. One signature is recorded, that of the first microbatch. Others run as compiled. What is compiled or chosen when
     work first runs is therefore there before the first recording of the stage, and holds for all its places.
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

from penstock.capturing.chain import Around, StageModule
from penstock.capturing.preservation import preserved
from penstock.errors import PenstockError
from penstock.runtime.devices.graph_capture import GraphCapturer, GraphPool

__all__ = ["CudaGraphStage"]

WARM_UPS = 3
"""So often the work of a stage runs before it is first recorded, as in PyTorch's own recordings."""
_Signature: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, bool], ...]
_Found: TypeAlias = Sequence[Tensor | None]


class CudaGraphStage:
    """Of `module`, which `recorder` records. `stage` is its number."""

    def __init__(self, module: StageModule, recorder: GraphCapturer, stage: int, device: torch.device) -> None:
        self._module, self._stage = module, _Stage(module, recorder, stage, device)
        self._signature: _Signature | None = None
        self._recordings: list[_Recording] = []
        """By place."""
        self._free: list[int] = []
        """Places, as a heap."""
        self._taken: dict[int, int] = {}
        """Places by microbatch."""

    def run(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        around: Around | None = None,
    ) -> tuple[Tensor, ...]:
        """The forward of `module`, as it is called, for `microbatch`, which takes a place."""
        assert seed is None and around is None, "what draws random numbers or is computed again is not recorded"
        given = (*received, *(inputs[name] for name in self._module.fetched))
        signature = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in given)
        outputs: tuple[Tensor, ...]
        if self._signature is None:
            self._signature = signature
        if signature != self._signature:
            outputs = self._module(received, inputs)
            return outputs
        place = heappop(self._free) if self._free else len(self._recordings)
        if place == len(self._recordings):
            self._recordings.append(_Recording(self._stage, len(received), given))
        self._taken[microbatch] = place
        outputs = _Replay.apply(self._recordings[place], *given, *self._stage.leaves)  # type: ignore[no-untyped-call]
        return outputs

    def release(self, microbatch: int) -> None:
        """The backward of `microbatch` is done."""
        place = self._taken.pop(microbatch, None)
        if place is not None:
            heappush(self._free, place)


@dataclass(slots=True, eq=False)
class _Stage:
    """What the recordings of a stage share."""

    module: StageModule
    recorder: GraphCapturer
    number: int
    device: torch.device
    leaves: tuple[nn.Parameter, ...] = field(init=False)
    """The trained parameters."""
    aliases: tuple[nn.Parameter, ...] = field(init=False)
    """Their memory in other leaves."""
    names: dict[str, nn.Parameter] = field(init=False)
    """The aliases by each place where a layer has them; one that the module has under several names is one place."""
    backwards: GraphPool = field(init=False)
    """Memory of all backwards: nothing of one is wanted when the next one begins."""
    outputs: tuple[tuple[Tensor, bool], ...] = ()
    """What a forward returns, on the meta device, and whether it has a gradient: known from the first place on."""
    gradients: list[Tensor | None] | None = None
    """Of what a recording is given, and then of `leaves`; None in it for what has none. None before the first one."""

    def __post_init__(self) -> None:
        self.leaves = tuple([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        self.aliases = tuple([nn.Parameter(leaf.detach()) for leaf in self.leaves])
        alias_of = dict(zip(self.leaves, self.aliases, strict=True))
        for leaf, alias in alias_of.items():
            cast(Any, alias).grad_dtype = cast(Any, leaf).grad_dtype
        self.names = {
            f"{path}.{name}": alias_of[parameter]
            for path, owner in self.module.named_modules()
            for name, parameter in owner._parameters.items()
            if parameter in alias_of
        }
        self.backwards = self.recorder.pool()

    def autocast(self, forward: bool) -> AbstractContextManager[None]:
        """For forwards as it is now, but for weights that it has cast: no recording may read those of another forward.
        For backwards none.
        """
        kind = self.device.type
        enabled = forward and torch.is_autocast_enabled(kind)
        return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=enabled, cache_enabled=False)


class _Recording:
    """A forward and a backward, of one microbatch at a time. `given`: of the first one, what it received before all."""

    _live: tuple[Tensor, ...]
    """The outputs with their history, from a forward to its backward."""
    _starts: Sequence[Tensor]
    """The gradients that the backward starts from."""

    def __init__(self, stage: _Stage, received: int, given: Sequence[Tensor]) -> None:
        for tensor in given:
            if tensor.device.type != stage.device.type:
                raise PenstockError(
                    f"stage {stage.number} reads a tensor of shape {tuple(tensor.shape)} on {tensor.device}, and its "
                    f"work is recorded as a CUDA graph: expected all it reads on {stage.device}. Pass batches there"
                )
        self._stage, self._received, self.count = stage, received, len(given)
        with torch.no_grad():
            self._given = [tensor.clone().requires_grad_(tensor.requires_grad) for tensor in given]
        self._needed = [tensor for tensor in (*self._given, *stage.aliases) if tensor.requires_grad]
        with preserved([stage.module]):
            if stage.gradients is None:
                stage.gradients = self._make_gradients(self._warm_up())
            self.differentiable = tuple([kept for _, kept in stage.outputs])
            self._starts = [torch.zeros_like(form, device=stage.device) for form, kept in stage.outputs if kept]
            self._record()

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the stage returns, in the memory of this recording."""
        for held, tensor in zip(self._given, given, strict=True):
            held.copy_(tensor)
        self._go_forward()
        self._written = [output._version for output in self._outputs]
        return tuple([output.detach() for output in self._outputs])

    def backward(self, gradients: Sequence[Tensor | None]) -> _Found:
        """From the gradients of what `forward` returned, those of what it was given and of the stage's leaves."""
        for output, written in zip(self._outputs, self._written, strict=True):
            if output._version != written:
                raise PenstockError(
                    f"a tensor of shape {tuple(output.shape)} that stage {self._stage.number} made was written in "
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
        assert self._stage.gradients is not None
        return self._stage.gradients

    def _warm_up(self) -> _Found:
        """Gradients as they will be. The stage knows its outputs afterwards."""
        stage = self._stage
        buffers = list(stage.module.buffers())
        found: _Found = ()
        with stage.recorder.warm_up():
            for _ in range(WARM_UPS):
                self._compute()
                found = self._differentiate([torch.zeros_like(o) for o in self._live if o.requires_grad])
        if any(one is not other for one, other in zip(buffers, stage.module.buffers(), strict=True)):
            raise PenstockError(
                f"a layer of stage {stage.number} ({', '.join(stage.module.names)}) puts a new tensor in the place of "
                "a buffer in its forward, which a CUDA graph does not do again: expected that it writes the one "
                "that it has, as in self.buffer.copy_(...). Or leave the mode out of compile="
            )
        stage.outputs = tuple([(torch.empty_like(o, device="meta"), o.requires_grad) for o in self._live])
        # With its history goes what autograd knows of the stream that it was made on.
        self._live = ()
        return found

    def _make_gradients(self, found: _Found) -> list[Tensor | None]:
        """Memory for `found`, the gradients of those that need one, and None for the others."""
        if any(gradient is not None and gradient.layout != torch.strided for gradient in found):
            raise PenstockError(
                f"a weight of stage {self._stage.number} has sparse gradients, whose size a CUDA graph cannot know: "
                "expected dense ones. Make the embedding with sparse=False, or leave the mode out of compile="
            )
        made = iter([None if gradient is None else torch.empty_like(gradient) for gradient in found])
        leaves = self._stage.leaves
        return [next(made) if tensor.requires_grad else None for tensor in (*self._given, *leaves)]

    def _record(self) -> None:
        stage, recorder = self._stage, self._stage.recorder
        try:
            outputs, self._go_forward = recorder.capture(self._compute, recorder.pool())
            self._outputs = tuple([output.detach() for output in outputs])
            if self._starts:
                _, self._go_backward = recorder.capture(self._keep_gradients, stage.backwards)
        except RuntimeError as error:
            raise PenstockError(
                f"stage {stage.number} ({', '.join(stage.module.names)}) cannot be recorded as a CUDA graph: expected "
                "layers that neither read numbers on the host (.item(), a branch on the data) nor make shapes of them. "
                f'Use compile={{"mode": "max-autotune-no-cudagraphs"}}, or mend the layer. PyTorch says: {error}'
            ) from error
        self._live = ()

    def _compute(self) -> tuple[Tensor, ...]:
        stage = self._stage
        received, rest = self._given[: self._received], self._given[self._received :]
        inputs = dict(zip(stage.module.fetched, rest, strict=True))
        with torch.enable_grad(), stage.autocast(forward=True):
            self._live = functional_call(stage.module, cast(Any, stage.names), (received, inputs), tie_weights=False)
        return self._live

    def _differentiate(self, starts: Sequence[Tensor]) -> _Found:
        roots = [output for output in self._live if output.requires_grad]
        if not roots:
            return [None] * len(self._needed)
        with self._stage.autocast(forward=False):
            return torch.autograd.grad(roots, self._needed, starts, allow_unused=True)

    def _keep_gradients(self) -> tuple[Tensor, ...]:
        """The backward, whose results go where those of all backwards of the stage do."""
        found = iter(self._differentiate(self._starts))
        tensors = (*self._given, *self._stage.leaves)
        assert self._stage.gradients is not None
        with torch.no_grad():
            for tensor, kept in zip(tensors, self._stage.gradients, strict=True):
                gradient = next(found) if tensor.requires_grad else None
                assert (gradient is None) == (kept is None), "every microbatch has gradients for the same tensors"
                if gradient is not None and kept is not None:
                    kept.copy_(gradient)
        return ()


class _Replay(torch.autograd.Function):
    """A recording as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        outputs = recording.forward(tensors[: recording.count])
        fixed = [output for output, kept in zip(outputs, recording.differentiable, strict=True) if not kept]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.recording.backward(gradients))
