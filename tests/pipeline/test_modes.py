"""The model's own `eval` and `train` run as in a plain loop, and no capture or check leaves a trace of its runs."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.models import Blocks
from support.processes import Pool

WIDTH, SAMPLES, PARTS = 8, 8, 4


class Layer(nn.Module):
    """A frozen weight and a trained one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(width, width), requires_grad=False)
        self.own = nn.Linear(width, width)

    def frozen(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.frozen()) + self.own(x))


class Net(Blocks):
    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__(kind)

    def after_step(self, here: Collection[nn.Parameter]) -> None:
        """What a loop does after a step, with the parameters `here`."""


class Merged(Layer):
    """In evaluation one product with the sum of both weights, which has other bits than the sum of two products."""

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            if mode:
                self.weight.data.copy_(self.before)
            else:
                self.before = self.weight.data.clone()
                self.weight.data += self.own.weight.data
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return x + torch.tanh(F.linear(x, self.weight) + self.own.bias)


class Averaged(Net):
    """Averages of all weights are in their place in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = [parameter.detach().clone() for parameter in self.parameters()]

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            for parameter, average in zip(self.parameters(), self.averages, strict=True):
                now = parameter.data.clone()
                parameter.data.copy_(average)
                average.copy_(now)
        return super().train(mode)

    def after_step(self, here: Collection[nn.Parameter]) -> None:
        for parameter, average in zip(self.parameters(), self.averages, strict=True):
            if parameter in here:
                average.lerp_(parameter.detach(), 0.5)


class WithNorm(nn.Module):
    """Its BatchNorm stays in the mode `trains`."""

    trains: bool

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.train(self.trains)
        return self

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))  # type: ignore[misc]


class Normed(WithNorm, Net):
    trains = True


class NormedLayer(WithNorm, Layer):
    trains = False


class Scaled(Net):
    """Sets a number that the code between its blocks reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def train(self, mode: bool = True) -> Any:
        self.scale = 1.0 if mode else 0.5
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Doubling(Layer):
    """Never in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class PartlyFrozen(Net):
    """One block is in evaluation mode from the start, and stays in it."""

    def __init__(self) -> None:
        super().__init__(NormedAtWill)
        self.blocks[1].eval()

    def after_step(self, here: Collection[nn.Parameter]) -> None:
        self.blocks[1].eval()


class NormedAtWill(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def in_line(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(4)))


OVERRIDES: dict[str, Callable[[], nn.Module]] = {
    "merged adapters": lambda: Net(Merged),
    "merged adapters in a row": lambda: in_line(Merged),
    "averages": Averaged,
    "a norm of the root that trains": Normed,
    "norms of blocks that do not train": lambda: Net(NormedLayer),
    "a number of the root": Scaled,
    "blocks that always train": lambda: Net(Doubling),
    "a block in evaluation mode": PartlyFrozen,
}


class Packing(Layer):
    """Packs its weight in a forward in evaluation mode, and says so in an attribute of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.form = SimpleNamespace(packed=False, scales=[1.0])  # type: ignore[attr-defined]

    def frozen(self) -> Tensor:
        form = self.weight.form  # type: ignore[attr-defined]
        if not self.training and not form.packed:
            self.weight.data = (self.weight.data / 3).to(torch.bfloat16)
            form.packed, form.scales[0] = True, 3.0
        return self.weight.to(torch.float64) * form.scales[0]


class Transposing(Layer):
    """Transposes its weight where it lies in a forward in evaluation mode."""

    def frozen(self) -> Tensor:
        if not self.training and not getattr(self.weight, "turned", False):
            self.weight.data = self.weight.data.t()
            self.weight.turned = True  # type: ignore[attr-defined]
        return self.weight.t() if getattr(self.weight, "turned", False) else self.weight


class Moving(Layer):
    """Takes codes and scales out of its weight in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        scale = self.weight.abs().max() / 127
        self.weight.codes = (self.weight.data / scale).round()  # type: ignore[attr-defined]
        self.weight.scale = scale  # type: ignore[attr-defined]
        self.state: list[Tensor] = []

    def frozen(self) -> Tensor:
        weight: Any = self.weight
        if weight.codes is not None:
            self.state = [weight.codes, weight.scale]
            weight.codes = weight.scale = None
        return self.state[0] * self.state[1]


class Quantizing(Layer):
    """Makes its weight one of integers in the first forward."""

    scale: Tensor | None = None

    def frozen(self) -> Tensor:
        if self.scale is None:
            self.scale = self.weight.abs().max() / 127
            self.weight.data = (self.weight.data / self.scale).round().to(torch.int8)
        return self.weight.to(torch.float64) * self.scale


class Rounding(Layer):
    """Writes its weight in place in evaluation mode, and does not count it."""

    def frozen(self) -> Tensor:
        if not self.training:
            self.weight.data.copy_(self.weight.data.to(torch.bfloat16))
        return self.weight


class Caching(Layer):
    """Adds a sum of all that it saw in evaluation mode, which is in an attribute of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.seen = torch.zeros(())  # type: ignore[attr-defined]

    def frozen(self) -> Tensor:
        seen: Tensor = self.weight.seen  # type: ignore[attr-defined]
        if not self.training:
            seen += 0.125
        return self.weight + seen


WRITERS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: partial(Net, kind) for kind in (Packing, Transposing, Moving, Quantizing, Rounding)},
    "Caching": lambda: Net(Caching),
    "Packing in a row": lambda: in_line(Packing),
    "Moving in a row": lambda: in_line(Moving),
}

Found = tuple[list[float], Tensor, dict[str, Tensor], list[bool]]


def made(name: str) -> nn.Module:
    """A model in float64: all but what it keeps in attributes."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return (OVERRIDES | WRITERS)[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def rounds() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield tuple(torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[misc]


def after_step(model: nn.Module, pipe: penstock.Pipeline | None = None) -> None:
    if isinstance(model, Net):
        model.after_step(set((pipe or model).parameters()))


def loop(name: str) -> Found:
    """A plain loop that evaluates after the first step and predicts after the second."""
    model = made(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    numbers, output = [], torch.empty(0)
    for step, (x, target) in enumerate(rounds()):
        total = 0.0
        for part, wanted in zip(x.chunk(PARTS), target.chunk(PARTS), strict=True):
            loss = F.mse_loss(model(part), wanted) / PARTS
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(total)
        after_step(model)
        modes = [module.training for module in model.modules()]
        if step < 2:
            model.eval()
            with torch.no_grad():
                output = model(x[:2])
            numbers.append(float(F.mse_loss(output, target[:2])))
            model.train()
            after_step(model) if name == "a block in evaluation mode" else None
    return numbers, output, dict(model.state_dict()), modes


def pipeline(name: str) -> Found:
    model = made(name)
    first = next(rounds())[0]
    with penstock.Pipeline(
        model,
        (first[:2],),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=PARTS,
        stages=dist.get_world_size() if dist.is_initialized() else 2,
        check="strict",
    ) as pipe:
        numbers, output = [], torch.empty(0)
        for step, (x, target) in enumerate(rounds()):
            numbers.append(float(pipe.step(x, target).loss))
            after_step(model, pipe)
            if step == 0:
                numbers.append(float(pipe.evaluate(x[:2], target[:2]).loss))
            elif step == 1:
                output = pipe.predict(x[:2])
                numbers.append(float(F.mse_loss(output, target[:2])))
        state = pipe.full_state_dict(rank=None)
    return numbers, output, dict(state), [module.training for module in model.modules()]


def assert_alike(expected: Found, found: Found) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    assert [name for name, tensor in expected[2].items() if not torch.equal(found[2][name], tensor)] == []
    assert found[3] == expected[3]


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_modes_of_a_model_are_its_own(name: str) -> None:
    assert_alike(loop(name), pipeline(name))


@pytest.mark.parametrize("name", WRITERS)
def test_layers_that_write_their_weights_in_some_forward_train_as_in_a_loop(name: str) -> None:
    assert_alike(loop(name), pipeline(name))


def pipelines(names: list[str]) -> list[Found]:
    return [pipeline(name) for name in names]


def test_modes_in_two_processes(pool: Pool) -> None:
    names = ["merged adapters", "averages", "a number of the root", "Rounding", "Moving"]
    for each in pool.run(2, pipelines, names):
        for name, found in zip(names, each, strict=True):
            assert_alike(loop(name), found)


def test_a_mode_that_cannot_be_set_is_an_error_and_modes_are_given_back() -> None:
    model = made("a block in evaluation mode")
    x, target = next(rounds())
    modes = [module.training for module in model.modules()]
    with penstock.Pipeline(model, (x[:2],), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), stages=2) as pipe:
        model.eval = lambda: 1 / 0  # type: ignore[assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            pipe.evaluate(x, target)
        assert [module.training for module in model.modules()] == modes
        del model.eval
        pipe.evaluate(x, target)
        assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("name", ["Packing", "Moving", "merged adapters", "Caching"])
def test_a_profile_leaves_no_trace(name: str) -> None:
    x = next(rounds())[0][:2]
    expected, found = (made(name).eval() for _ in range(2))
    penstock.profile(found, (x,), iterations=1, warmup=1)
    assert [str(vars(p)) for p in found.parameters()] == [str(vars(p)) for p in expected.parameters()]
    assert torch.equal(expected(x), found(x))
