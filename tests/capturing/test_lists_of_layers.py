"""Layers of a list that hold another one where no stage sees it: what would be lost is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from model_cases.cases import arguments, normal
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import assert_trains

SAMPLE = torch.randn(2, 4)


class InList(nn.Module):
    """Reads the weight of a layer that a list holds."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others, self.bias = [other], nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.others[0].weight
        return torch.tanh(x @ weight.t() + self.bias)


class Calling(InList):
    """Calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](x) + self.bias


class Registered(Calling):
    """Registers it, too."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(other)
        self.other = other


def in_closure(other: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: other(x).tanh()


@pytest.mark.parametrize("reading", [InList, Calling, in_closure])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_layer_that_reads_the_parameters_of_another_one_is_refused(reading: Any, wrapped: bool) -> None:
    first = nn.Linear(4, 4)
    reader = reading(first)
    layers: Any = [first, nn.Tanh(), reader]
    if wrapped and isinstance(reader, nn.Module):
        layers = nn.Sequential(nn.Sequential(*layers))

    with pytest.raises(
        CaptureError, match=r"layer \S*2 \(.*reads \S*0.weight, which is registered in another layer only"
    ):
        capture(layers, (SAMPLE,))


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_statistic_that_another_layer_writes_is_refused_and_a_constant_one_is_read(evaluates: bool) -> None:
    norm = nn.BatchNorm1d(4, affine=False).train(not evaluates)

    def center(x: Tensor) -> Tensor:
        return x - norm.running_mean  # type: ignore[operator]

    layers: list[Any] = [norm, nn.Linear(4, 4), center]
    if evaluates:
        assert len(capture(layers, (SAMPLE,)).layers) == 3
    else:
        with pytest.raises(CaptureError, match=r"layer 2 .*reads 0.running_mean"):
            capture(layers, (SAMPLE,))


def test_a_parameter_that_a_layer_hands_on_is_an_input_of_the_next_one() -> None:
    class Handing(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.weight

    layers: list[Any] = [Handing(4, 4), lambda x, weight: x @ weight]

    assert [layer.inputs for layer in capture(layers, (SAMPLE,)).layers][1] == ("0[0]", "0[1]")


def test_a_module_that_both_layers_register_is_trained_by_both() -> None:
    def build() -> nn.Sequential:
        first = nn.Linear(4, 4)
        return nn.Sequential(first, nn.Tanh(), Registered(first))

    # Gradients of the shared weight are added stage by stage.
    assert_trains(build, stages=2, inputs=arguments(normal(4)), within=1e-12)


def test_a_list_may_begin_with_a_function() -> None:
    layers: list[Any] = [torch.tanh, nn.Linear(4, 4)]
    batch = SAMPLE, SAMPLE.flip(0)
    options: dict[str, Any] = {"sample": (SAMPLE,), "loss_fn": nn.MSELoss(), "optimizer": torch.optim.SGD}
    expected = penstock.reference_train(layers, [batch], **options)

    with penstock.Pipeline(layers, **options) as pipe:
        assert (float(pipe.step(*batch).loss),) == expected.losses
