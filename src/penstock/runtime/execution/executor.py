"""Runs the forwards and backwards of one stage, and keeps what a backward needs in between.

A backward runs as a whole, or is split: `backward_input`, and later `backward_weight`.

Laws of this file:
  1. It depends on no schedule, version or peer: the caller says what to compute, on what, for which microbatch.
  2. Tensors that it returns carry no autograd history: a cut between stages is a cut in the graph.
  3. For a microbatch that is to be recomputed it keeps what the stage received and nothing that autograd saved, until
     it is recomputed, once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from penstock.errors import PenstockError
from penstock.runtime.execution.offloading import Offloads, SavedTensors
from penstock.runtime.execution.split_backward import WeightBackward, run_input_backward
from penstock.torch_internals.autograd import run_backward

Compute: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
_Edges: TypeAlias = Sequence[GradientEdge | None]
_LeafKind: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""A place among what was received, a shape and strides."""


class _SavedForward(NamedTuple):
    received: tuple[Tensor, ...]
    """The tensors that a forward received: leaves of autograd."""
    edges: _Edges | None
    """Where the backward of each of its outputs starts; None until it is computed again."""
    tensors: SavedTensors | None = None
    """What autograd saved, where that is to be offloaded."""
    repeat: Callable[[], _Edges] | None = None
    """Computes the forward again, and returns the edges."""


@dataclass(slots=True)
class StageExecutor:
    """Runs one stage, and holds its microbatches in flight: those whose backward, or weight backward, is
    still to come.
    """

    in_flight: dict[int, _SavedForward | WeightBackward] = field(default_factory=dict)
    _laid_out_alike: set[_LeafKind] = field(default_factory=set)
    """What was received and had a gradient with the strides of its own: those of its kind are not looked at again."""

    def forward(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        compute: Compute,
        recompute_context: Callable[[], AbstractContextManager[None]] | None = None,
        *,
        offloads: Offloads | None = None,
    ) -> tuple[Tensor, ...]:
        """``compute(received)``, detached; each result requires a gradient if the computed one does.

        `received` are leaves: those that require a gradient get it in `backward`. With `recompute_context` nothing that
        autograd saves is kept, and `recompute` computes a second time, within ``recompute_context()``. `offloads`: of
        a microbatch that will be offloaded.
        """
        leaves, repeat, saved = tuple(received), None, None
        if offloads is None and recompute_context is None:
            outputs = compute(leaves)
        elif recompute_context is None:
            saved = SavedTensors(cast("Offloads", offloads))
            with saved.recording():
                outputs = compute(leaves)
        else:
            # With gradients, although they are not kept: PyTorch computes some operators differently without.
            with saved_tensors_hooks(_forget, _refuse):
                outputs = compute(leaves)
            repeat = partial(_repeat, compute, leaves, recompute_context)
        edges, detached = [], []
        for output in outputs:
            # Edges do not keep the outputs in memory.
            edges.append(get_gradient_edge(output) if output.requires_grad and repeat is None else None)
            detached.append(output.detach().requires_grad_(output.requires_grad))
        self.in_flight[microbatch] = _SavedForward(leaves, None if repeat else edges, saved, repeat)
        return tuple(detached)

    def recompute(self, microbatch: int) -> None:
        """Computes the forward of `microbatch`, which had a `recompute_context`, again. Without one it does nothing:
        the backward computes layers again one by one.
        """
        saved = self.in_flight[microbatch]
        assert isinstance(saved, _SavedForward), "a recomputation comes before the backward"
        if saved.repeat is not None:
            self.in_flight[microbatch] = _SavedForward(saved.received, saved.repeat())

    def saved_tensors(self, microbatch: int) -> SavedTensors:
        """What autograd saved of `microbatch`, whose forward had `offloads` and whose backward has not begun."""
        saved = self.in_flight[microbatch]
        assert isinstance(saved, _SavedForward), "an offload and a reload come before the backward"
        assert saved.tensors is not None, "the forward of such a microbatch has `offloads`"
        return saved.tensors

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds the weights' gradients to their ``.grad`` and returns those of what was received.

        `gradients` are those of the results of `forward`, in order. None, or a tensor on the meta device, means that
        the loss does not depend on a tensor. A result is such a tensor where what was received requires a gradient:
        data may decide that there is none, and a message of this kind needs its size.
        """
        saved, edges, given = self._begin_backward(microbatch, gradients)
        strided: dict[int, Tensor] = {}
        hooks: dict[_LeafKind, RemovableHandle] = {}
        if edges:
            for index, leaf in enumerate(saved.received):
                if leaf.requires_grad and (kind := (index, leaf.shape, leaf.stride())) not in self._laid_out_alike:
                    keep = partial(_keep_strides, strided, index, leaf.stride())
                    hooks[kind] = leaf.register_hook(keep)  # type: ignore[no-untyped-call]
            try:
                run_backward(edges, given)
            except RuntimeError as error:
                _explain(error, microbatch)
                raise
        for kind, hook in hooks.items():
            hook.remove()
            if saved.received[kind[0]].grad is not None and kind[0] not in strided:
                self._laid_out_alike.add(kind)
        found = []
        for index, leaf in enumerate(saved.received):
            own = strided.get(index, leaf.grad)
            found.append(leaf.detach().to("meta") if own is None and leaf.requires_grad else own)
            leaf.grad = None
        return tuple(found)

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Like `backward`, but leaves the gradients of the weights to `backward_weight`."""
        saved, edges, given = self._begin_backward(microbatch, gradients)
        try:
            found, self.in_flight[microbatch] = run_input_backward(edges, given, saved.received)
        except RuntimeError as error:
            _explain(error, microbatch)
            raise
        pairs = zip(saved.received, found, strict=True)
        return tuple([leaf.detach().to("meta") if own is None and leaf.requires_grad else own for leaf, own in pairs])

    def backward_weight(self, microbatch: int) -> None:
        """Adds the gradients that `backward_input` left to the weights' ``.grad``."""
        pending = self.in_flight.pop(microbatch)
        assert isinstance(pending, WeightBackward), "a weight backward comes after its input backward"
        pending.run()

    def _begin_backward(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[_SavedForward, list[GradientEdge], list[Tensor]]:
        """What is kept of `microbatch`, the edges that its backward starts from, and the gradients there."""
        saved = self.in_flight.pop(microbatch)
        assert isinstance(saved, _SavedForward), "an input backward comes once, and instead of a whole backward"
        if saved.tensors is not None:
            saved.tensors.finish()
        edges = saved.edges
        roots: list[GradientEdge] = []
        given: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is not None and not gradient.is_meta:
                if edges is None:
                    # Not before: without a gradient nothing is computed again.
                    edges = cast("Callable[[], _Edges]", saved.repeat)()
                edge = edges[index]
                if edge is not None:
                    roots.append(edge)
                    given.append(gradient)
        return saved, roots, given


def _keep_strides(strided: dict[int, Tensor], index: int, strides: tuple[int, ...], gradient: Tensor) -> None:
    """Keeps a `gradient` that lies in memory otherwise than its leaf. Autograd would lay it out as the leaf, and what
    the stage before computes of it would have other roundings than without a cut.
    """
    if gradient.stride() != strides:
        strided[index] = gradient


def _explain(error: RuntimeError, microbatch: int) -> None:
    """Raises `PenstockError` with the cause of an `error` in the backward of `microbatch`, if it is known."""
    if "use_reentrant=True" in str(error):
        raise PenstockError(
            f"the backward of microbatch {microbatch} cannot be split into an input backward and a weight backward, as "
            "the schedule= of this pipeline asks: a block calls torch.utils.checkpoint with use_reentrant=True. "
            "Expected use_reentrant=False, which computes the same numbers. Pass it to checkpoint, or use a schedule "
            "that splits no backward"
        ) from error
    if "second time" in str(error):
        raise PenstockError(
            f"the backward of microbatch {microbatch} goes where another backward has been: the loss, or a block, has "
            "read a tensor that another stage left in an attribute, a dict or a global variable. Expected that loss_fn "
            "reads what the model returns, and a block its arguments. Return the tensor from its block and from the "
            "model, such as an auxiliary loss, and read it there"
        ) from error
    if "modified by an inplace operation" not in str(error):
        return
    said = " ".join(str(error).partition("Hint:")[0].split())
    raise PenstockError(
        f"the backward of microbatch {microbatch} needs a tensor that was written in place after its forward: {said} "
        "Expected that no forward writes what the backward of an earlier one reads, since several microbatches are in "
        "flight: a plain loop ends each backward before the next forward. If a block writes its own weights or "
        "buffers, have it read a copy, as in torch.nn.functional.linear(x, self.weight.clone())"
    ) from error


def _repeat(
    compute: Compute, received: Sequence[Tensor], recompute_context: Callable[[], AbstractContextManager[None]]
) -> _Edges:
    with recompute_context():
        return [get_gradient_edge(output) if output.requires_grad else None for output in compute(received)]


def _forget(tensor: Tensor) -> None:
    """Has autograd keep nothing in place of `tensor`."""


def _refuse(_: None) -> NoReturn:
    raise PenstockError(
        "a stage that is to be recomputed asked for gradients in its forward (torch.autograd.grad): expected them in "
        "the backward only, since what autograd saves is not kept. Pass recompute='layers', or leave this stage out"
    )
