"""A layer whose frozen weight is packed, with scales beside it, as in bitsandbytes, which not every job installs."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class PackedWeight(nn.Parameter):
    """Frozen numbers, which become int8 codes when they are moved to a device, and a scale for each row."""

    most: int
    state: Any

    def __new__(  # type: ignore[misc]
        cls, data: Tensor, requires_grad: bool = False, most: int = 127, state: Any = None
    ) -> "PackedWeight":
        made: PackedWeight = Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[attr-defined]
        made.most, made.state = most, state
        return made

    def to(self, device: Any = None, *rest: Any, **others: Any) -> "PackedWeight":  # type: ignore[override]
        assert not rest
        if self.state is None and torch.device(device).type != "meta":
            scales = self.data.abs().amax(1, keepdim=True) / self.most
            self.state, self.data = SimpleNamespace(scales=scales), (self.data / scales).round().to(torch.int8)
        return self

    @classmethod
    def from_prequantized(
        cls, data: Tensor, quantized_stats: Mapping[str, Tensor], requires_grad: bool = False, device: Any = "cpu"
    ) -> "PackedWeight":
        most, state = int(quantized_stats["most"]), SimpleNamespace(scales=quantized_stats["scales"].to(device))
        return cls(data.to(device), requires_grad, most, state)

    def __deepcopy__(self, memo: Any) -> "PackedWeight":
        state = None if self.state is None else SimpleNamespace(scales=self.state.scales.clone())
        return PackedWeight(self.data.clone(), self.requires_grad, self.most, state)


class PackedLinear(nn.Linear):
    """Runs when its weight was moved. Nothing loads the scales that it puts into the state dict."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, bias=False, **options)
        self.weight = PackedWeight(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, PackedWeight), "the parameter has lost its class"
        return x @ (self.weight.to("cpu").data.to(x.dtype) * self.weight.state.scales).T

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if isinstance(self.weight, PackedWeight) and self.weight.state is not None:
            destination[prefix + "weight.scales"] = self.weight.state.scales
            destination[prefix + "weight.most"] = torch.tensor(self.weight.most)


class Adapted(nn.Module):
    """A packed layer with a low-rank adapter, as PEFT writes it."""

    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__()
        self.base_layer = PackedLinear(width, width, **options)
        self.down, self.up = (nn.Linear(*sizes, bias=False, **options) for sizes in ((width, 2), (2, width)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base_layer(x)) + self.up(self.down(x))


def packed(model: nn.Module) -> nn.Module:
    """`model`, whose packed weights are on the CPU."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.weight.to("cpu")
    return model
