"""Recomputes forwards with the same bits and without side effects: per stage, or layer by layer.

A stage that recomputes keeps its input and repeats its forward in the backward. With ``"layers"`` every layer (and the
loss) keeps its own input and is repeated alone, when the backward comes to it, so that the saved tensors of only one
layer are alive at a time.

Laws of this file:
  1. The second forward runs in the state of the first one: random generators, autocast, and the buffers as they were
     before it. The weights are those of its version.
  2. It has no side effects: it works on copies of the buffers, and restores the generators. BatchNorm counts once.
  3. It must read the same numbers as the first one: a batch that was overwritten in between is an error.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from penstock.capturing.chain import LayerRunner
from penstock.capturing.module_state import ModuleState, Place, find_writable
from penstock.capturing.preservation import python_generators
from penstock.capturing.sequential import EagerLayer
from penstock.errors import PenstockError
from penstock.torch_internals.autograd import is_profiling
from penstock.torch_internals.tensors import times_written
from penstock.torch_internals.unimported import is_fully_sharded

Granularity: TypeAlias = Literal["stage", "layers"]
_Results: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _ForwardContext:
    """The state that a forward runs in: generators, autocast and buffers; and its arguments, to be checked."""

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """For each type of device: whether autocast is on, and to which type."""
    caches: bool
    """Whether autocast caches the weights that it casts."""
    buffers: tuple[tuple[Place, Tensor | None], ...]
    """Copies; a buffer that is registered twice has one copy."""
    given: tuple[tuple[Tensor, int], ...]
    """The tensors that the forward reads, and how often each had been written."""

    @classmethod
    def observe(
        cls, writable: Sequence[Place], devices: Collection[torch.device], given: Sequence[Tensor] = ()
    ) -> "_ForwardContext":
        """The present state, for a forward that writes the buffers `writable` and computes on `devices`."""
        cuda = sorted({device.index for device in devices if device.type == "cuda"})
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda)]
        kinds = sorted({"cpu", *(device.type for device in devices)} - {"meta"})
        buffers = [(place, getattr(*place)) for place in writable]
        with torch.no_grad():
            copies = {id(buffer): buffer.clone() for _, buffer in buffers if buffer is not None}
        return cls(
            tuple((generator, generator.get_state()) for generator in generators),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            tuple((place, None if buffer is None else copies[id(buffer)]) for place, buffer in buffers),
            tuple((tensor, times_written(tensor)) for tensor in given if not tensor.is_inference()),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores this state, and afterwards the state before it."""
        for tensor, version in self.given:
            if times_written(tensor) != version:
                raise PenstockError(
                    f"a tensor of shape {tuple(tensor.shape)} that a stage read in its forward was written in place "
                    "before its backward, which has to read it again: pass every batch in tensors of its own, or "
                    "leave the stage out of recompute="
                )
        states = [generator.get_state() for generator, _ in self.generators]
        found = [(owner, name, getattr(owner, name)) for (owner, name), _ in self.buffers]
        with ExitStack() as stack:
            # A drain may be called in inference mode, which has no gradients; this turns them on.
            stack.enter_context(torch.inference_mode(False))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches))
            try:
                for generator, state in self.generators:
                    generator.set_state(state)
                own = {id(copy): copy.clone() for _, copy in self.buffers if copy is not None}
                for (owner, name), copy in self.buffers:
                    setattr(owner, name, own.get(id(copy)))
                yield
            finally:
                for owner, name, buffer in found:
                    setattr(owner, name, buffer)
                for (generator, _), state in zip(self.generators, states, strict=True):
                    generator.set_state(state)


@dataclass(slots=True, eq=False)
class Recomputation:
    """Recomputes the forwards of one stage. `loss_fn`: of the last stage; it may be a module with buffers, too."""

    granularity: Granularity
    loss_fn: object = None
    _known: dict[nn.Module, tuple[tuple[Place, ...], frozenset[torch.device]]] = field(default_factory=dict)
    _watched: set[nn.Module] = field(default_factory=set)

    def context_for(
        self, point: Callable[[], object], module: nn.Module, given: Sequence[Tensor]
    ) -> Callable[[], AbstractContextManager[None]] | None:
        """Makes the context in which the coming forward of `module` on the tensors `given` can be repeated.

        `point` points the module at the weights of that forward. None if its layers are repeated one by one.
        """
        if self.granularity == "layers":
            return None
        modules = [module, self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [module]
        return partial(_repeated, point, self._observe(modules, given, checked=True), partial(self._watch, module))

    def layer_runner(self, point: Callable[[], object]) -> LayerRunner | None:
        """Runs the layers of the stage, and the loss, one by one; None if the stage recomputes as a whole. `point`: as
        in `context_for`.
        """
        return partial(self._run_layer, point) if self.granularity == "layers" else None

    def _run_layer(
        self,
        point: Callable[[], object],
        module: nn.Module | None,
        compute: Callable[..., _Results],
        arguments: Sequence[Tensor],
    ) -> _Results:
        """Computes ``compute(*arguments)``, for which autograd keeps the arguments alone. `module`: None for
        the loss.
        """
        modules = [run for run in (module or self.loss_fn,) if isinstance(run, nn.Module)]
        context = self._observe(modules, arguments, checked=False)
        results: _Results = checkpoint(
            compute,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, point, context, partial(self._watch, module)),
        )
        return results

    @contextmanager
    def _watch(self, module: nn.Module | None) -> Iterator[None]:
        """Raises `PenstockError` if the repetition of `module` in this block changes more than buffers.

        It looks at the first repetition only, which takes a copy of the module's state. By then caches are made.
        """
        # Fully sharded modules put whole parameters in place of shards, and free them, in every forward.
        if module is None or module in self._watched or any(is_fully_sharded(m) for m in module.modules()):
            yield
            return
        self._watched.add(module)
        state = _PythonState(module)
        try:
            yield
        finally:
            # torch.utils.checkpoint ends a repetition by an exception, once it has what it needs.
            if changed := state.changes():
                raise PenstockError(
                    f"a forward that recompute= repeats changes {changed[0]}, which would then happen twice for every "
                    "microbatch: expected state in registered buffers, and random numbers of PyTorch. Keep it in a "
                    "buffer, draw with torch.rand, or leave this stage out of recompute="
                )

    def _observe(self, modules: Sequence[nn.Module], given: Sequence[Tensor], checked: bool) -> _ForwardContext:
        writable: list[Place] = []
        devices = {tensor.device for tensor in given}
        for module in modules:
            if module not in self._known:
                tensors = (*module.parameters(), *module.buffers())
                self._known[module] = find_writable(module), frozenset(tensor.device for tensor in tensors)
            writable += self._known[module][0]
            devices |= self._known[module][1]
        return _ForwardContext.observe(writable, devices, given if checked else ())


class _PythonState:
    """What a forward of `module` may change beside buffers: attributes, lists and plain tensors of the user's modules,
    and Python's random generators.
    """

    def __init__(self, module: nn.Module) -> None:
        bodies = {inner.name: inner.body for inner in module.modules() if isinstance(inner, EagerLayer)}
        self._states = {name: ModuleState([body]) for name, body in bodies.items()}
        self._generators = python_generators()

    def changes(self) -> list[str]:
        """What is another object or number now, or was written, such as ``blocks.1.count``."""
        names = [f"{name}.{path}" for name, state in self._states.items() for path, _ in state.changes()]
        drawn = [name for name, state in python_generators().items() if state != self._generators[name]]
        return names + [f"the random numbers of {name}" for name in drawn]


def _contexts(
    point: Callable[[], object], context: _ForwardContext, watch: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
    return nullcontext(), _Repetitions(partial(_repeated, point, context, watch))


class _Repetitions(ExitStack):
    """Enters what `make` returns, anew each time: gradients that a forward asks for repeat it before its backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._make = make

    def __enter__(self) -> "_Repetitions":
        self.enter_context(self._make())
        return self


@contextmanager
def _repeated(
    point: Callable[[], object], context: _ForwardContext, watch: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    point()
    with watch(), context.restored(), record_function("penstock recompute") if is_profiling() else nullcontext():
        yield
