"""Versions of weights in slots."""

import pytest
import torch
from torch import nn

from penstock.capturing.chain import Layer, StageModule
from penstock.errors import CaptureError, PenstockError
from penstock.runtime.parameters.weight_versions import VersionedWeights


class Scale(nn.Module):
    """Multiplies by a weight and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1  # type: ignore[assignment]
        return (self.weight * x,)


def make(versions: int, module: Scale | None = None) -> tuple[Scale, VersionedWeights]:
    """One stage of one `Scale`."""
    module = module or Scale()
    stage = StageModule([Layer("scale", module, ("x",), ("y",))], 0, ("x",), ("y",))
    return module, VersionedWeights(stage, {"weight": module.weight}, versions)


def weight_of(weights: VersionedWeights) -> nn.Parameter:
    """What the optimizer steps."""
    return weights.parameters["weight"]


def update(weights: VersionedWeights, version: int, gradient_version: int, step: float) -> None:
    """A plain gradient step, in place, as an optimizer does it."""
    weights.begin_update(version, weights.take_gradients(gradient_version))
    with torch.no_grad():
        parameter = weight_of(weights)
        assert parameter.grad is not None
        parameter -= step * parameter.grad  # type: ignore[misc]
    weights.end_update()


def run(weights: VersionedWeights, version: int, x: float) -> torch.Tensor:
    """The output of a version."""
    return weights.module(version)([torch.tensor(x)], {})[0]


def test_a_backward_reads_the_version_of_its_forward() -> None:
    _, weights = make(2)
    first = run(weights, 0, 3.0)
    second = run(weights, 0, 5.0)
    second.backward()
    update(weights, 1, 0, step=0.1)

    assert weight_of(weights).item() == torch.tensor(1.0 - 0.5).item()
    assert run(weights, 1, 1.0).item() == weight_of(weights).item()
    assert run(weights, 0, 1.0).item() == 1.0
    (gradient,) = torch.autograd.grad(first, weights.leaves(0)["weight"])
    assert gradient.item() == 3.0


def test_the_user_finds_the_newest_version_between_steps() -> None:
    module, weights = make(2)
    parameter = module.weight
    run(weights, 0, 5.0).backward()
    update(weights, 1, 0, step=0.1)
    run(weights, 0, 1.0)

    assert module.weight is weights.leaves(0)["weight"] and module.weight.item() == 1.0
    weights.rest()
    assert module.weight is parameter and module.weight.item() == 0.5


def test_a_parameter_that_was_replaced_or_frozen_is_refused() -> None:
    module, weights = make(2)
    weights.rest()
    module.weight.requires_grad_(False)
    with pytest.raises(PenstockError, match="parameter weight: requires_grad is False and was True when the pipeline"):
        weights.module(0)

    module, weights = make(1)
    module.weight = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(PenstockError, match="parameter weight: another tensor was assigned to it after"):
        weights.module(0)


class Listing(Scale):
    """Holds its parameter a second time, in a list, as recurrent modules of PyTorch do."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = [self.weight]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.flat[0] * x,)


def test_a_list_of_parameters_is_pointed_too() -> None:
    module, weights = make(2, Listing())
    run(weights, 0, 5.0).backward()
    update(weights, 1, 0, step=0.1)

    assert (run(weights, 0, 1.0).item(), run(weights, 1, 1.0).item()) == (1.0, 0.5)
    weights.rest()
    assert module.flat[0] is weight_of(weights)


def test_a_parameter_in_another_place_is_refused() -> None:
    module = Scale()
    module.table = {"weight": module.weight}  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"layers.0.table \(Scale\) holds the parameter weight in a dict"):
        make(1, module)


def test_hooks_of_a_parameter_are_run_at_every_version() -> None:
    module = Scale()
    module.weight.register_hook(lambda gradient: 2 * gradient)
    seen: list[float] = []
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    _, weights = make(2, module)
    for version in (0, 1):
        run(weights, version, 3.0).backward()

    assert [weights.gradients(version)["weight"].item() for version in (0, 1)] == [6.0, 6.0]
    assert seen == [6.0, 6.0]


def test_the_optimizer_sees_the_newest_version_in_the_next_slot() -> None:
    _, weights = make(2)
    slots = set()
    for version in range(1, 5):
        run(weights, version - 1, 1.0).backward()
        update(weights, version, version - 1, step=0.25)
        parameter = weight_of(weights)
        slots.add(parameter.data_ptr())

        assert parameter.item() == 1.0 - 0.25 * version
        assert parameter.grad is None
        assert weights.gradients(version - 1) == {}
    assert len(slots) == 2


def test_one_version_is_stepped_in_place() -> None:
    module, weights = make(1)
    before = weight_of(weights).data_ptr()
    run(weights, 0, 1.0).backward()
    update(weights, 1, 0, step=0.25)

    assert weight_of(weights).data_ptr() == before == module.weight.data_ptr()
    assert run(weights, 1, 1.0).item() == 0.75


def test_buffers_are_shared_by_all_versions() -> None:
    module, weights = make(3)
    for version in range(3):
        run(weights, version, 1.0)

    assert module.calls.item() == 3


def test_a_new_run_starts_from_the_newest_version() -> None:
    _, weights = make(3)
    for version in (1, 2):
        run(weights, version - 1, 1.0).backward()
        update(weights, version, version - 1, step=0.25)
    weights.restart()

    assert run(weights, 0, 1.0).item() == 0.5 == weight_of(weights).item()


def test_gradients_of_microbatches_add_up() -> None:
    _, weights = make(2)
    for x in (1.0, 2.0, 4.0):
        run(weights, 0, x).backward()

    assert weights.gradients(0)["weight"].item() == 7.0
    assert weights.gradients(1) == {}


def test_replicas_share_the_weights_and_have_gradients_and_buffers_of_their_own() -> None:
    module, first = make(2)
    second = first.replica()
    run(first, 0, 3.0).backward()
    run(second, 0, 5.0).backward()

    assert (first.gradients(0)["weight"].item(), second.gradients(0)["weight"].item()) == (3.0, 5.0)
    assert (module.calls.item(), second.buffers[0].item()) == (1, 1)
    total = {"weight": first.take_gradients(0)["weight"] + second.take_gradients(0)["weight"]}
    assert second.begin_update(1, total)
    with torch.no_grad():
        parameter = weight_of(first)
        parameter -= 0.125 * parameter.grad  # type: ignore[misc]
    second.end_update()
    # The first replica finds the update made.
    assert not first.begin_update(1, total)

    assert weight_of(first).item() == 0.0 == run(first, 1, 1.0).item() == run(second, 1, 1.0).item()
    assert run(first, 0, 1.0).item() == run(second, 0, 1.0).item() == 1.0
    assert first.gradients(0) == second.gradients(0) == {}
