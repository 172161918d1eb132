"""What two runs of a model on its sample show: which modules compute, draw and change something, what they are called
with, and what the model returns.

A dispatch mode notes in which modules something is computed that depends on parameters: these are the modules that
blocks are chosen from.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.export.block_choice import choose_blocks
from penstock.capturing.export.watched_runs import ModuleCalls, Watch, is_inside
from penstock.capturing.module_state import ModuleState, is_plain
from penstock.capturing.observation import observed
from penstock.capturing.operators import ParameterWrites, TensorNotes, tensors_in
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import flatten
from penstock.errors import CaptureError
from penstock.torch_internals.dispatch import OperatorMode, schema_of
from penstock.torch_internals.modules import compiled_from, is_compiled
from penstock.torch_internals.pytrees import TreeSpec

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of the operators of `torch.distributed`."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelRun:
    """What two consecutive runs of a model on the sample showed."""

    blocks: frozenset[str]
    """Paths of the modules that are blocks, after what the first run showed."""
    drawing: frozenset[str]
    """Paths of the modules that draw PyTorch's random numbers themselves; not of those around them."""
    drawing_elsewhere: frozenset[str]
    """The same of Python's and NumPy's random numbers."""
    changed: frozenset[str]
    """Attributes that the second run changed, such as ``encoder.count``."""
    written: frozenset[str]
    """Tensors in attributes that the second run wrote in place."""
    writes: frozenset[tuple[str, str]]
    """The modules that wrote a parameter in the first run, each with its name."""
    written_buffers: frozenset[int]
    """The ids of the buffers that the first run wrote."""
    order: tuple[str, ...]
    """The blocks in the order of their first calls."""
    calls: tuple[ModuleCalls, ModuleCalls]
    """All calls of blocks in the two runs."""
    escapes: frozenset[tuple[str, str]]
    """Modules that a tensor escaped from, each with one that used it."""
    borrowing: frozenset[str]
    """The blocks that read parameters of other modules, which they were given or hold without registering them, or that
    were called with other tensors in the place of their own."""
    communicates: bool
    """Whether the first run waited for other processes."""
    structure: TreeSpec
    """Of what the model returns."""
    leaves: tuple[Any, ...]
    """Of what it returns, with the class `Tensor` in place of every tensor, and None for an object that cannot be
    opened."""

    @property
    def called_by_forward(self) -> frozenset[str]:
        """The blocks that are called as ``block.forward(x)``."""
        return frozenset(path for path, calls in self.calls[0].items() if any(call.by_forward for call in calls))


def run_on_sample(sampled: SampledModel) -> ModelRun:
    """Runs the model on the sample. Raises `CaptureError` if it fails on it."""
    found = _run_twice(sampled)
    uncalled = frozenset(path for path in found.blocks if not found.calls[0][path])
    if uncalled or found.drawing_elsewhere:
        # Hooks do not see a call of a forward, and to look at generators in every call takes long. So these are noted
        # in runs of their own, for the few models that do this.
        found = _run_twice(sampled, uncalled, closely=True)
    return found


def _run_twice(sampled: SampledModel, by_forward: frozenset[str] = frozenset(), *, closely: bool = False) -> ModelRun:
    """`by_forward` and `closely`: as for `Watch`."""
    model, call = sampled.model, sampled.call
    with sampled.copied() as copies, torch.no_grad():
        watch = Watch(model, copies, by_forward=by_forward, closely=closely)
        with _failures_explained(model):
            names = {id(parameter): name for name, parameter in watch.model.named_parameters()}
            dependence = _Dependence(list(watch.model.parameters()), watch, sampled.save_parameter)
            # As `OperatorCounter.counting`, for torch.cond. Compiled modules run eagerly in a mode in any case.
            eager = not any(is_compiled(each) or compiled_from(each) for each in model.modules())
            stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
            with stance, observed(watch.model, ()) as observation, dependence:
                result = watch.run(call.copied())
            blocks = choose_blocks(model, watch.working)
            # What is changed by the first run only is a cache.
            state = ModuleState([watch.model])
            again = Watch(model, copies, blocks, by_forward=by_forward)
            again.run(call.copied())
        changes = list(state.changes())
    leaves, structure = flatten(result)
    return ModelRun(
        blocks=blocks,
        drawing=frozenset(watch.drawing),
        drawing_elsewhere=frozenset(watch.drawing_elsewhere),
        changed=frozenset(path for path, written in changes if not written),
        written=frozenset(path for path, written in changes if written),
        writes=frozenset((path, names[parameter]) for path, parameter in watch.writes),
        written_buffers=frozenset(id(copies.own(buffer)) for buffer in observation.mutated_buffers),
        order=tuple(path for path in watch.calls if path in blocks),
        calls=({path: watch.calls[path] for path in blocks}, again.calls),
        escapes=frozenset(watch.owners.escapes),
        borrowing=frozenset(path for path in blocks if _borrows(watch, path)),
        communicates=dependence.communicates,
        structure=structure,
        # Objects that pytree cannot open, such as a cache of keys and values, hold tensors that cannot be sent.
        leaves=tuple(Tensor if isinstance(leaf, Tensor) else leaf if is_plain(leaf) else None for leaf in leaves),
    )


def _borrows(watch: Watch, path: str) -> bool:
    own = {id(each) for each in watch.model.get_submodule(path).parameters()}
    return not watch.parameters_read[path] <= own or any(is_inside(each, path) for each in watch.replaced)


class _Dependence(OperatorMode):
    """Follows what depends on parameters through the operators of a run."""

    def __init__(self, parameters: Sequence[nn.Parameter], watch: Watch, save: Callable[[nn.Parameter], None]) -> None:
        """`save` is called with a parameter before it is written."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False
        self._dependent: TensorNotes[bool] = TensorNotes()
        self._dependent.write(parameters, True)
        self._writes = ParameterWrites(parameters, save)
        self._watch = watch
        self._kinds: dict[Any, tuple[bool, bool]] = {}
        """Of every operator: whether it writes its arguments, and whether it draws random numbers."""

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((*args, *kwargs.values()) if kwargs else args)
        kind = self._kinds.get(func)
        if kind is None:
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self.communicates = self.communicates or func.namespace in _COLLECTIVES
            kind = self._kinds[func] = schema_of(func).is_mutable, draws
        mutable, draws = kind
        for parameter in self._writes.seen(args) if mutable else ():
            self._watch.note_write(parameter)
        result = func(*args, **kwargs)
        depends = any(map(self._dependent.read, given))
        made = [result] if isinstance(result, Tensor) else tensors_in((result,))
        self._watch.note_computation(depends, draws, given, made)
        if depends or draws:
            self._dependent.write([*made, *given[:1]] if mutable else made, True)
        return result


@contextmanager
def _failures_explained(model: nn.Module) -> Iterator[None]:
    """Raises `CaptureError` if `model` fails on the sample in this block."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if "NestedTensor" in str(error):
            raise CaptureError(
                f"{type(model).__name__} computes with nested tensors on the sample, which have no sizes: expected "
                "tensors. nn.TransformerEncoder makes them in evaluation, of what src_key_padding_mask leaves: build "
                "it with enable_nested_tensor=False"
            ) from error
        raise CaptureError(
            f"{type(model).__name__} fails on the sample: {type(error).__name__}: {error}. sample= must hold arguments "
            "that the model accepts. Capture runs without gradients: a forward takes some in torch.enable_grad()"
        ) from error
