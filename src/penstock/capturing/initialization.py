"""First weights that depend on a seed and on their name, and on nothing else.

A model on the meta device has shapes and no numbers. Each process makes the numbers of the layers that it holds,
and they must be the same for every number of stages, on every replica, and in one process that makes them all. So every
tensor starts a random stream of its own.
"""

import copy
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from penstock.arguments import Rule, check_arguments, function, integer, text_of
from penstock.capturing.model_kinds import check_model
from penstock.capturing.randomness import seeded
from penstock.errors import PenstockError
from penstock.torch_internals.dispatch import OperatorMode
from penstock.torch_internals.modules import own_reset
from penstock.torch_internals.subclasses import packed, packs
from penstock.torch_internals.tensors import share_hooks, times_written

InitFn: TypeAlias = Callable[[str, Tensor], object]
"""Writes a parameter or buffer in place, given the first name that it has in the model."""

M = TypeVar("M", bound=nn.Module | Sequence[Any])


class WeightSource(ABC):
    """An `init_fn` that takes weights from elsewhere, and so may not have all that the model needs."""

    @abstractmethod
    def examine(self, model: nn.Module, given: Collection[str]) -> None:
        """Compares what it has with the whole of `model`. Raises `PenstockError` if the two do not fit.

        `given`: the first names of the tensors that have values already.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether it has values for the tensor of this first name, which replace those that the model has."""

    @abstractmethod
    def __call__(self, name: str, tensor: Tensor) -> None:
        """Writes `tensor`, as every `InitFn`."""

    @abstractmethod
    def packed(self, name: str, like: Tensor, device: torch.device) -> Tensor | None:
        """The parameter on `device` to stand where `like` stands, if the numbers of `name` are packed already."""

    @abstractmethod
    def converted(self, name: str, tensor: Tensor) -> Tensor:
        """What the model gets in place of `tensor`, after it was written."""


_MODEL_RESET = "_init_weights"


_RULES: Mapping[str, Rule[Any]] = {
    "init_fn": function(
        ("name", "tensor"), "pass one such as penstock.reset_parameters(model), which asks the modules themselves"
    ),
    "seed": integer(),
}


def initialize(model: M, init_fn: InitFn, *, seed: int = 0, device: torch.device | str = "cpu") -> M:
    """Gives the whole of `model`, which is on the meta device, weights on `device`, and returns it.

    They are those that a `Pipeline` with this `init_fn` and `seed` makes, each process for its stages. `init_fn` is
    called as ``init_fn(name, tensor)`` for every parameter and buffer that is on the meta device, once each, in the
    order of the model; others keep their values. Raises `PenstockError` naming what `init_fn` left unwritten.
    """
    check_model(model, "initialize")
    seed = check_arguments("initialize", _RULES, init_fn=init_fn, seed=seed)["seed"]
    place_on = read_device("initialize(device=)", device)
    root = rooted(model)
    tensors = named_tensors(root)
    replaced = examined(init_fn, root, [name for name, tensor in tensors.items() if not tensor.is_meta])
    if not replaced and not any(tensor.is_meta for tensor in tensors.values()):
        raise PenstockError(
            "initialize(model=): expected a model on the meta device, found one whose tensors all have values. Build "
            "it under torch.device('meta'), or use it as it is"
        )
    written = {name for name, tensor in tensors.items() if tensor.is_meta or name in replaced}
    install(root.modules(), make(tensors, tensors, written, init_fn=init_fn, seed=seed, device=place_on))
    return model


def examined(init_fn: InitFn, model: nn.Module, given: Collection[str]) -> frozenset[str]:
    """Returns the names in `given` whose tensors `init_fn` is to replace.

    `given`: the first names of the tensors of `model` that have values. Only a `WeightSource` replaces any;
    it is compared with the whole of `model` before, and may raise.
    """
    if not isinstance(init_fn, WeightSource):
        return frozenset()
    init_fn.examine(model, given)
    return frozenset(filter(init_fn.has, given))


def reset_parameters(model: nn.Module | Sequence[Any]) -> InitFn:
    """An `init_fn` that gives a tensor what the modules of `model` themselves give it.

    That is ``reset_parameters()`` of the module that holds it, as `nn.Linear` has it, and after it ``_init_weights``
    of the modules around, as transformers has it. What neither writes is left, which is an error where it is used:
    values that a constructor computed (a position table, a mask) are gone on the meta device. Cover them in a function
    of your own that calls this one for the rest.
    """
    check_model(model, "reset_parameters")
    modules = dict(rooted(model).named_modules(remove_duplicate=False))

    @lru_cache(maxsize=1)
    def stand_ins(*tensors: Tensor) -> dict[int, Tensor]:
        """A tensor on the meta device by the id of each: one set for all tensors of a module that has many."""
        return {id(other): bare(other) for other in tensors}

    def init_fn(name: str, tensor: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        if path not in modules or getattr(modules[path], attribute, None) is None:
            raise PenstockError(f"reset_parameters(model) was made for a model that has no {name!r}: pass this model")
        # A copy that has `tensor` as this attribute, and everything else on the meta device.
        owner = modules[path]
        memo: dict[int, Any] = {**stand_ins(*owner.parameters(), *owner.buffers())}
        memo[id(getattr(owner, attribute))] = tensor
        alone = copy.deepcopy(owner, memo)
        with _MetaDraws():  # type: ignore[no-untyped-call]
            for reset in _resets(modules, path, alone):
                reset()
        found = getattr(alone, attribute)
        if found is not tensor and not found.is_meta:
            # The module has made itself another tensor.
            tensor.copy_(found)

    return init_fn


def make(
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, Tensor],
    written: Collection[str],
    *,
    init_fn: InitFn,
    seed: int,
    device: torch.device,
    settle: Callable[[str, Tensor], object] = lambda name, made: None,
) -> dict[int, Tensor]:
    """Makes what is to stand where `tensors`, by name, stand, on `device`: by their ids. `sources` has the values, or
    for those that are to be `written` the shapes. `settle` is called with each before the next one is made.

    `init_fn` writes these, each in the random stream of its name; the generators are left as they were. They are packed
    one after the other. Raises `PenstockError` naming what was not written.
    """
    made: dict[int, Tensor] = {}
    left: dict[str, Tensor] = {}
    files = init_fn if isinstance(init_fn, WeightSource) else None
    for name, tensor in tensors.items():
        source = sources[name]
        found = files.packed(name, source, device) if files is not None and name in written else None
        if found is None:
            found = place(source, device)
            if name in written and not _fill(name, found, init_fn, seed):
                left[name] = found
            elif name in written:
                found = found if files is None else files.converted(name, found)
                found = packed(found.detach(), source) if packs(source) else found
        settle(name, found)
        made[id(tensor)] = found
    if left:
        described = ", ".join(f"{name} ({_described(tensor)})" for name, tensor in left.items())
        raise PenstockError(
            f"init_fn did not write {described}. It is called as init_fn(name, tensor) for every parameter and buffer "
            "on the meta device, those outside of the state dict included, and writes the tensor in place; "
            "reset_parameters(model) writes what the modules' own reset_parameters() and _init_weights() do. What a "
            "constructor computed (a position table, a mask) must be computed again, or be built off the meta device"
        )
    return made


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, those outside of the state dict included; each once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def rooted(model: nn.Module | Sequence[Any]) -> nn.Module:
    """`model`, or for a list of layers a module that names them as capture does."""
    if isinstance(model, nn.Module):
        return model
    root = nn.Module()
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Module):
            root.add_module(str(index), layer)
    return root


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device` to stand where `tensor` stands in a module: its values, or memory if it has none."""
    if packs(tensor) and not tensor.is_meta:
        return tensor.to(device)
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return values
    made = nn.Parameter(values, requires_grad=tensor.requires_grad)
    # Marks that users leave on parameters, for their optimizer to find.
    made.__dict__.update(tensor.__dict__)
    share_hooks(tensor, made)
    return made


def bare(tensor: Tensor) -> Tensor:
    """A tensor on the meta device to stand where `tensor` stands."""
    made = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def install(modules: Iterator[nn.Module], tensors: Mapping[int, Tensor]) -> None:
    """Puts `tensors`, by the id of what they replace, in its place wherever `modules` hold it."""
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in tensors:
                # Recurrent modules keep their parameters in a list, too, which this keeps up.
                setattr(module, name, tensors[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in tensors:
                setattr(module, name, tensors[id(buffer)])


def _fill(name: str, tensor: Tensor, init_fn: InitFn, seed: int) -> bool:
    """Whether `init_fn` wrote `tensor`."""
    if tensor.numel() == 0:
        return True
    digest = hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest()
    mark = _mark(tensor.dtype)
    with torch.no_grad():
        if mark is not None:
            tensor.fill_(mark)
        version = times_written(tensor)
        with seeded(int.from_bytes(digest, "little") >> 1, 0, (tensor,)):
            init_fn(name, tensor)
        if times_written(tensor) != version or mark is None:
            return times_written(tensor) != version
        # Who writes tensor.data is not counted.
        return not bool((tensor.isnan() if mark != mark else tensor == mark).all())


def _mark(dtype: torch.dtype) -> float | None:
    """A number that is no weight."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype is torch.bool else torch.iinfo(dtype).min


def _described(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} of shape {tuple(tensor.shape)}"


class _MetaDraws(OperatorMode):  # type: ignore[no-untyped-call]
    """Leaves out `normal_` on the meta device, where it does nothing and is slow: a reset for one tensor runs it on all
    others of the module.
    """

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        skipped = func is torch.ops.aten.normal_.default and args[0].is_meta
        return args[0] if skipped else func(*args, **kwargs)


def _resets(modules: Mapping[str, nn.Module], path: str, alone: nn.Module) -> Iterator[Callable[[], object]]:
    """What initializes `alone`, the copy of the module at `path`, in the order of its construction."""
    own = own_reset(alone)
    if own is not None:
        yield own
    around = path
    while around:
        around = around.rpartition(".")[0]
        reset = getattr(modules[around], _MODEL_RESET, None)
        if callable(reset) and _takes_a_module(reset, alone):
            yield lambda reset=reset: reset(alone)  # type: ignore[misc]
            return


def _takes_a_module(reset: Callable[..., object], module: nn.Module) -> bool:
    try:
        inspect.signature(reset).bind(module)
    except TypeError:
        return False
    return True


def read_device(where: str, device: object, error: type[PenstockError] = PenstockError) -> torch.device:
    """The device that `device` is or names, with its index, once a tensor was made there; `error` if there is none.

    `where`: the function and the argument.
    """
    try:
        made: torch.Tensor = torch.empty(0, device=device)  # type: ignore[call-overload]  # else it raises
    except (RuntimeError, AssertionError, TypeError) as failure:
        reason = str(failure).partition("\n")[0]
        raise error(
            f"{where}: expected cpu, cuda or cuda:N that is there, found {text_of(device)}: {reason}. Give another one"
        ) from failure
    return made.device
