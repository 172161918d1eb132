"""Versions of weights in slots."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.capturing.chain import Layer, StageModule
from penstock.errors import PenstockError
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


def update(weights: VersionedWeights, version: int, step: float) -> None:
    """A plain gradient step, in place, as an optimizer does it."""
    weights.begin_update(version, weights.take_gradients())
    with torch.no_grad():
        parameter = weight_of(weights)
        assert parameter.grad is not None
        parameter -= step * parameter.grad  # type: ignore[misc]
    weights.end_update()


def run(weights: VersionedWeights, version: int, x: float) -> torch.Tensor:
    """The output of a version."""
    weights.point(version)
    return weights.stage([torch.tensor(x)], {})[0]


def run_back(weights: VersionedWeights, version: int, x: float) -> None:
    """A forward and a backward."""
    output = run(weights, version, x)
    weights.accumulate(version)
    output.backward()  # type: ignore[no-untyped-call]


def test_a_backward_reads_the_version_of_its_forward() -> None:
    _, weights = make(2)
    x = torch.tensor(3.0, requires_grad=True)
    first = weights.stage([x], {})[0]
    run_back(weights, 0, 5.0)
    update(weights, 1, step=0.1)

    assert weight_of(weights).item() == torch.tensor(1.0 - 0.5).item()
    assert run(weights, 1, 1.0).item() == weight_of(weights).item()
    assert run(weights, 0, 1.0).item() == 1.0
    run(weights, 1, 1.0)
    weights.accumulate(0)
    first.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert (x.grad.item(), weights.take_gradients()["weight"].item()) == (1.0, 3.0)


def test_the_user_finds_the_newest_version_between_steps() -> None:
    module, weights = make(2)
    parameter = module.weight
    run_back(weights, 0, 5.0)
    update(weights, 1, step=0.1)
    run(weights, 0, 1.0)

    assert module.weight is parameter and parameter.item() == 1.0
    weights.rest()
    assert module.weight is parameter and parameter.item() == 0.5


def test_a_parameter_that_was_replaced_or_frozen_is_refused() -> None:
    module, weights = make(2)
    module.weight.requires_grad_(False)
    with pytest.raises(PenstockError, match="parameter weight: requires_grad is False and was True when the pipeline"):
        weights.begin()

    module, weights = make(1)
    module.weight = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(PenstockError, match="parameter weight: it was replaced"):
        weights.begin()


def test_other_memory_is_refused_where_versions_have_their_own() -> None:
    module, weights = make(2)
    module.weight.data = torch.tensor(2.0)
    with pytest.raises(PenstockError, match="parameter weight: its memory was replaced after"):
        weights.begin()

    module, weights = make(1)
    module.weight.data = torch.tensor(2.0)
    weights.begin()
    assert run(weights, 0, 3.0).item() == 6.0


class Listing(Scale):
    """Holds its parameter a second time, in a list, as recurrent modules of PyTorch do, and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = [self.weight]
        self.scale = partial(torch.mul, self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.flat[0] * self.scale(x),)


def test_a_parameter_is_one_object_wherever_it_is_held() -> None:
    _, weights = make(2, Listing())
    run_back(weights, 0, 1.0)
    update(weights, 1, step=0.25)

    assert (run(weights, 0, 1.0).item(), run(weights, 1, 1.0).item()) == (1.0, 0.25)
    assert run(weights.replica(), 1, 1.0).item() == 0.25


def test_hooks_of_a_parameter_are_run_at_every_version() -> None:
    module = Scale()
    _, weights = make(2, module)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    seen: list[float] = []
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    for version in (0, 1):
        run_back(weights, version, 3.0)
        assert weights.take_gradients()["weight"].item() == 6.0

    assert seen == [6.0, 6.0]


def test_a_segment_begins_without_gradients_of_the_user_and_with_those_in_flight() -> None:
    module, weights = make(2)
    run_back(weights, 0, 3.0)
    weights.rest()
    assert module.weight.grad is None
    module.weight.grad = torch.tensor(100.0)
    weights.begin()
    run_back(weights, 0, 5.0)

    assert weights.take_gradients()["weight"].item() == 8.0


def test_gradients_that_are_set_aside_twice_add_up() -> None:
    """A backward of another stage may reach a parameter through the loss."""
    module, weights = make(2)
    run_back(weights, 0, 3.0)
    weights.set_aside()
    module.weight.grad = torch.tensor(4.0)
    weights.set_aside()
    run_back(weights, 0, 1.0)

    assert weights.take_gradients()["weight"].item() == 8.0


def test_an_update_does_not_end_the_sums_of_the_next_one() -> None:
    module, weights = make(2)
    run_back(weights, 0, 1.0)
    first = weights.take_gradients()
    run_back(weights, 0, 2.0)
    weights.set_aside()
    weights.begin_update(1, first)
    assert module.weight.grad is first["weight"]
    weights.end_update()
    run_back(weights, 0, 4.0)

    assert weights.take_gradients()["weight"].item() == 6.0


def test_what_the_user_writes_between_steps_disturbs_no_backward_of_an_older_version() -> None:
    module, weights = make(2)
    x = torch.tensor(2.0, requires_grad=True)
    output = weights.stage([x], {})[0]
    before = module.weight._version
    run_back(weights, 0, 1.0)
    update(weights, 1, step=0.5)
    # Autograd refuses a backward if what it reads was written. The update has written another slot.
    assert module.weight._version == before
    weights.rest()
    with torch.no_grad():
        module.weight.mul_(2.0)
    weights.begin()
    weights.accumulate(0)
    output.backward()  # type: ignore[no-untyped-call]

    assert x.grad is not None and x.grad.item() == 1.0
    assert run(weights, 1, 1.0).item() == 1.0


@pytest.mark.parametrize("versions", [1, 2])
def test_the_optimizer_sees_the_newest_version_in_the_next_slot(versions: int) -> None:
    """One version is stepped in place."""
    _, weights = make(versions)
    slots = set()
    for version in range(1, 5):
        run_back(weights, version - 1, 1.0)
        update(weights, version, step=0.25)
        parameter = weight_of(weights)
        slots.add(parameter.data_ptr())

        assert parameter.item() == 1.0 - 0.25 * version
        assert parameter.grad is None
        assert weights.take_gradients() == {}
        assert run(weights, version, 1.0).item() == 1.0 - 0.25 * version
    assert len(slots) == versions


def test_a_run_that_continues_another_one_reads_the_versions_before_its_first() -> None:
    _, weights = make(3)
    for version in (1, 2):
        run_back(weights, version - 1, 1.0)
        update(weights, version, step=0.25)
    history = {"weight": {number: tensor.clone() for number, tensor in weights.history(2)["weight"].items()}}
    module, resumed = make(3)
    with torch.no_grad():
        module.weight.copy_(weight_of(weights))
    resumed.restart(history)

    assert {number: tensor.item() for number, tensor in history["weight"].items()} == {"-1": 0.75, "-2": 1.0}
    assert [run(resumed, version, 1.0).item() for version in (0, -1, -2)] == [0.5, 0.75, 1.0]
    assert resumed.history(2) == history
    weights.restart()
    assert run(weights, 0, 1.0).item() == 0.5 == weight_of(weights).item()


def test_replicas_share_the_weights_and_have_gradients_and_buffers_of_their_own() -> None:
    module, first = make(2)
    second = first.replica()
    run_back(first, 0, 3.0)
    run_back(second, 0, 4.0)
    run_back(first, 0, 0.0)
    own = first.take_gradients()["weight"]
    run_back(second, 0, 1.0)
    others = second.take_gradients()["weight"]

    assert (own.item(), others.item()) == (3.0, 5.0)
    assert (module.calls.item(), second.buffers[0].item()) == (2, 2)
    total = {"weight": own + others}
    second.begin_update(1, total)
    with torch.no_grad():
        parameter = weight_of(first)
        parameter -= 0.125 * parameter.grad  # type: ignore[misc]
    second.end_update()
    # The first replica finds the update made.
    assert first.newest == 1

    assert weight_of(first).item() == 0.0 == run(first, 1, 1.0).item() == run(second, 1, 1.0).item()
    assert run(first, 0, 1.0).item() == run(second, 0, 1.0).item() == 1.0
    assert first.take_gradients() == second.take_gradients() == {}
