"""A model to measure with its sample, the device that it is on, and the device that it is measured on."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_kinds import modules_in
from penstock.errors import ProfileError
from penstock.torch_internals import pytrees as pytree
from penstock.training.optimizers import MakeOptimizer

Model: TypeAlias = nn.Module | Sequence[nn.Module | Callable[..., Any]] | LayerChain
Sample: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model to profile, the sample to profile it on, and what to call it, as a file gives them to the command."""

    model: Model
    sample: Sample
    """Example inputs of one microbatch: the positional arguments, the keyword arguments, or the only argument."""
    name: str = ""
    """If empty, the function's name in the file."""
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    """As in `Pipeline`; with it the last layer's numbers include the loss for `target`."""
    target: Any = None
    optimizer: MakeOptimizer = torch.optim.Adam
    """As in `Pipeline`; what it takes for each layer is measured."""

    def __post_init__(self) -> None:
        for name in ("model", "sample"):
            if getattr(self, name) is None:
                raise ProfileError(f"Subject({name}=): expected one, found nothing: give a {name}")


def modules_of(model: Model) -> list[nn.Module]:
    """The modules of `model`, which may be a list with functions in it, or captured already."""
    return [layer.module for layer in model.layers] if isinstance(model, LayerChain) else modules_in(model)


def device_of(model: Model) -> torch.device | None:
    """The device of the model's parameters and buffers; None if it has neither. `ProfileError` for several, or meta."""
    tensors = [tensor for module in modules_of(model) for tensor in (*module.parameters(), *module.buffers())]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if "meta" in devices:
        raise ProfileError(
            "the model is on the meta device, which computes nothing: expected one that holds its weights; "
            "materialize it first, for example by model.to_empty(device='cpu')"
        )
    if len(devices) > 1:
        raise ProfileError(f"the model is on {', '.join(devices)}: expected one device; move it with model.to(device)")
    return tensors[0].device if tensors else None


def first_device(sample: Sample) -> torch.device:
    """The device of the first tensor of `sample`; the CPU if there is none."""
    leaves = pytree.tree_leaves(sample)
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def moved(model: Model, found: torch.device, target: torch.device) -> Model:
    """A copy of `model`, which is on `found`, on `target`; `ProfileError` for a chain that is captured."""
    if isinstance(model, LayerChain):
        raise ProfileError(
            f"device={target}: the chain was captured on {found}; move the model there and capture it again"
        )
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).to(target)
    return [layer.to(target) if isinstance(layer, nn.Module) else layer for layer in copy.deepcopy(list(model))]


def placed(sample: Found, device: torch.device) -> Found:
    """The sample, or target, on `device`, each tensor in a storage of its own that is no larger than it."""

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).clone()

    return pytree.tree_map_only(Tensor, to_device, sample)  # type: ignore[no-any-return]


def device_name(device: torch.device) -> str:
    """The name of `device` in a profile."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
