"""Computing a forward a second time, with the same bits and no traces: per stage, or layer by layer.

A stage that recomputes keeps its input and repeats its forward in the backward. With ``"layers"`` every layer (and the
loss) keeps its own input and is repeated alone, when the backward comes to it, so that only one layer's saved tensors
are there at a time.

Laws of this file:
  1. The second forward finds what the first one found: random generators, autocast, and the buffers as they were
     before it. The weights' version is that of the module that it is given.
  2. It leaves no trace: it works on copies of the buffers, and gives the generators back. BatchNorm counts once.
  3. What it reads must be what the first one read: a batch that was overwritten in between is an error.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.capturing.chain import Around
from penstock.capturing.writes import Place, find_writable
from penstock.errors import PenstockError, PlanError
from penstock.values.plans import Plan

__all__ = ["ForwardContext", "Granularity", "Recomputation", "Recompute", "choose_grains"]

Granularity: TypeAlias = Literal["stage", "layers"]
Recompute: TypeAlias = bool | str | Collection[int] | None
"""What a user says of it: which stages, or "layers" for each layer alone."""
_Results: TypeAlias = tuple[Tensor, ...]


def choose_grains(plan: Plan, recompute: Recompute) -> tuple[Plan, dict[int, Granularity]]:
    """The plan that runs, and of its stages those that recompute, as a whole or layer by layer.

    None follows the plan. Anything else goes before it, and what it predicts is dropped where it does not hold any
    more. `PlanError` for a wish that is not of these, or numbers a stage that there is not.
    """
    grains = _grains(recompute, plan.recompute, len(plan.stages))
    as_planned = grains == _grains(None, plan.recompute, len(plan.stages))
    return (plan if as_planned else replace(plan, recompute=bool(grains), predicted=None)), grains


def _grains(recompute: Recompute, planned: bool, stages: int) -> dict[int, Granularity]:
    if isinstance(recompute, str):
        if recompute != "layers":
            raise PlanError(
                f'recompute={recompute!r}: expected True, False, "layers" or the numbers of the stages to recompute'
            )
        return dict.fromkeys(range(stages), "layers")
    if recompute is None or isinstance(recompute, bool):
        return dict.fromkeys(range(stages if (planned if recompute is None else recompute) else 0), "stage")
    wrong = sorted(str(stage) for stage in recompute if stage not in range(stages))
    if wrong:
        raise PlanError(
            f"recompute={sorted(recompute)!r} names stage(s) {', '.join(wrong)}: expected numbers from 0 to "
            f"{stages - 1}, since the plan has {stages} stage(s)"
        )
    return dict.fromkeys(sorted(recompute), "stage")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What a forward finds and is not given: generators, autocast and buffers; and what it was given, to be checked."""

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """For a type of device: whether it is on, and to which type."""
    caches: bool
    """Whether autocast keeps the weights that it has cast."""
    buffers: tuple[tuple[Place, Tensor | None], ...]
    """Copies; one buffer in two places has one copy."""
    given: tuple[tuple[Tensor, int], ...]
    """The tensors that the forward reads, and how often they had been written."""

    @classmethod
    def observe(
        cls, places: Sequence[Place], devices: Collection[torch.device], given: Sequence[Tensor] = ()
    ) -> "ForwardContext":
        """Those of now, for a forward that writes the buffers in `places` and computes on `devices`."""
        cuda = sorted({device.index for device in devices if device.type == "cuda"})
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda)]
        kinds = sorted({"cpu", *(device.type for device in devices)} - {"meta"})
        buffers = [(place, place[0]._buffers[place[1]]) for place in places]
        with torch.no_grad():
            copies = {id(buffer): buffer.clone() for _, buffer in buffers if buffer is not None}
        return cls(
            tuple((generator, generator.get_state()) for generator in generators),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            tuple((place, None if buffer is None else copies[id(buffer)]) for place, buffer in buffers),
            tuple((tensor, tensor._version) for tensor in given if not tensor.is_inference()),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Brings them back for its body, once; then everything is as the body found it."""
        for tensor, version in self.given:
            if tensor._version != version:
                raise PenstockError(
                    f"a tensor of shape {tuple(tensor.shape)} that a stage read in its forward was written in place "
                    "before its backward, which has to read it again: pass every batch in tensors of its own, or "
                    "leave the stage out of recompute="
                )
        states = [generator.get_state() for generator, _ in self.generators]
        found = [(owner, name, owner._buffers[name]) for (owner, name), _ in self.buffers]
        with ExitStack() as stack:
            # A drain may come from within an evaluation, where gradients are off; this turns them on.
            stack.enter_context(torch.inference_mode(False))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches))
            try:
                for generator, state in self.generators:
                    generator.set_state(state)
                for (owner, name), copy in self.buffers:
                    owner._buffers[name] = copy
                yield
            finally:
                for owner, name, buffer in found:
                    owner._buffers[name] = buffer
                for (generator, _), state in zip(self.generators, states, strict=True):
                    generator.set_state(state)


@dataclass(slots=True, eq=False)
class Recomputation:
    """How one stage recomputes. `loss_fn`: of the last stage; it may be a module that has buffers, too."""

    grain: Granularity
    loss_fn: object = None
    _known: dict[nn.Module, tuple[tuple[Place, ...], frozenset[torch.device]]] = field(default_factory=dict)

    def remember(
        self, point: Callable[[], object], module: nn.Module, given: Sequence[Tensor]
    ) -> Callable[[], AbstractContextManager[None]] | None:
        """Called before a forward of the stage's `module` on the tensors `given`: inside of what is returned it can be
        repeated. `point` points the module at the weights of that forward. None if its layers do so one by one.
        """
        if self.grain == "layers":
            return None
        modules = [module, self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [module]
        return partial(_repeated, point, self._observe(modules, given, checked=True))

    def around(self, point: Callable[[], object]) -> Around | None:
        """What runs the layers of the stage, and the loss, one by one; None if they run as always. `point` as above."""
        return partial(self._run_layer, point) if self.grain == "layers" else None

    def _run_layer(
        self,
        point: Callable[[], object],
        module: nn.Module | None,
        compute: Callable[..., _Results],
        arguments: Sequence[Tensor],
    ) -> _Results:
        """``compute(*arguments)``, of which autograd keeps the arguments alone. `module`: None for the loss."""
        modules = [part for part in (module or self.loss_fn,) if isinstance(part, nn.Module)]
        around = self._observe(modules, arguments, checked=False)
        results: _Results = checkpoint(
            compute,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, point, around),
        )
        return results

    def _observe(self, modules: Sequence[nn.Module], given: Sequence[Tensor], checked: bool) -> ForwardContext:
        places: list[Place] = []
        devices = {tensor.device for tensor in given}
        for module in modules:
            if module not in self._known:
                tensors = (*module.parameters(), *module.buffers())
                self._known[module] = find_writable(module), frozenset(tensor.device for tensor in tensors)
            places += self._known[module][0]
            devices |= self._known[module][1]
        return ForwardContext.observe(places, devices, given if checked else ())


def _contexts(
    point: Callable[[], object], around: ForwardContext
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first forward and of the second."""
    return nullcontext(), _repeated(point, around)


@contextmanager
def _repeated(point: Callable[[], object], around: ForwardContext) -> Iterator[None]:
    point()
    with around.restored():
        yield
