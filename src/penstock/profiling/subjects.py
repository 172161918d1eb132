"""A model and a sample, as a file gives them to the command ``penstock profile``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.errors import ProfileError


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model to profile, the sample to profile it on, and what to call it."""

    model: nn.Module | Sequence[nn.Module | Callable[..., Any]] | LayerChain
    sample: tuple[Any, ...] | Mapping[str, Any] | Tensor
    """Example inputs of one microbatch: the positional arguments, the keyword arguments, or the only argument."""
    name: str = ""
    """If empty, the function's name in the file."""
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    """As in `Pipeline`; with it the last layer's numbers include the loss for `target`."""
    target: Any = None

    def __post_init__(self) -> None:
        for name in ("model", "sample"):
            if getattr(self, name) is None:
                raise ProfileError(f"Subject({name}=): expected one, found nothing: give a {name}")
