"""Layers that are hostile to a backward by scan: each has the gradients of `torch.nn.Sequential`, or is refused.

What is compared after two updates: outputs, to the bit; gradients, None where PyTorch has None; buffers; and how often
a layer or a hook was called.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from penstock.errors import PenstockError
from penstock.scan import ScanSequential

CALLS: Counter[str] = Counter()
"""Of layers and hooks of a training."""


class Own(nn.Module):
    """A layer of a function of its own, with a weight and a buffer that the function may use."""

    def __init__(self, function: Callable[["Own", Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.frozen = nn.Parameter(torch.linspace(1, 2, 6), requires_grad=False)
        self.register_buffer("seen", torch.zeros(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        CALLS["forward"] += 1
        return self.function(self, x)


class Doubled(torch.autograd.Function):
    """The square, with twice its gradient; for a gradient of several samples at once it would be another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CALLS["function"] += 0
        (x,) = ctx.saved_tensors
        return gradient * 4 * x


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Clipped(torch.autograd.Function):
    """Its backward is no product with a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class ByValue(torch.autograd.Function):
    """Its backward looks at values, which a backward of many gradients at once cannot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.negative = bool(x.sum() < 0)
        return -x if ctx.negative else 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if float(gradient.abs().sum()) < 0:
            raise AssertionError
        return -gradient if ctx.negative else 3 * gradient


class Masked(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight * self.weight.detach().abs().gt(0.2), self.bias)


class Leaking(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.leaky_relu(input, 0.3)


class Tripled(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * input


class Renamed(nn.Conv1d):
    """A class of another layer that acts as this one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.unsqueeze(1)).flatten(1)


def hooked(layer: nn.Module, hook: Callable[..., Any], *, before: bool = False) -> nn.Module:
    if before:
        layer.register_forward_pre_hook(hook)
    else:
        layer.register_forward_hook(hook)
    return layer


def with_backward_hook(full: bool) -> nn.Module:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    if full:
        layer[1].register_full_backward_hook(lambda module, before, after: (2 * before[0],))
    else:
        layer.register_full_backward_pre_hook(lambda module, after: None)
    return layer


def with_parameter_hook() -> nn.Module:
    layer = nn.Linear(6, 6)

    def double(gradient: Tensor) -> Tensor:
        CALLS["hook of a parameter"] += 1
        return 2 * gradient

    layer.weight.register_hook(double)
    layer.bias.register_post_accumulate_grad_hook(lambda each: CALLS.update(["accumulated"]))
    return layer


def with_activation_hook(change: Callable[[Tensor], Tensor]) -> nn.Module:
    def register(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(change)

    return hooked(nn.Linear(6, 6), register)


def replaced_on_the_instance() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.forward = lambda input: nn.functional.linear(input, layer.weight) ** 2  # type: ignore[method-assign]
    return layer


def tied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    layer[2].weight = layer[0].weight
    return layer


def counted(layer: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.seen += x.sum(0)
    return x * layer.seen.detach().tanh() * layer.weight


def clamped_weight(layer: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(0.6, 1.4)
    return x * layer.weight


def written(layer: Own, x: Tensor) -> Tensor:
    y = layer.inner(x)
    y[:, 1:3] *= 2
    y[:, 0].copy_(x[:, 5])
    return y


def single_within(layer: Own, x: Tensor) -> Tensor:
    return (x.float() * layer.weight.float()).double()


FREE = torch.linspace(0, 1, 6, dtype=torch.float64, requires_grad=True)

RIGHT: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Own(lambda layer, x: x.mul_(2)),
    "in place on parts": lambda: Own(written),
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "PReLU": nn.PReLU,
    "PReLU, as wide as the batch is large": lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 6)),
    "function with a wrong gradient": lambda: Own(lambda layer, x: Doubled.apply(x)),
    "function without a gradient": lambda: Own(lambda layer, x: Nothing.apply(x * layer.weight)),
    "function that looks at values": lambda: Own(lambda layer, x: ByValue.apply(x)),
    "dropout": lambda: nn.Dropout(0.4),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "alpha dropout within": lambda: nn.Sequential(nn.Linear(6, 6), nn.AlphaDropout(0.3)),
    "drawn numbers": lambda: Own(lambda layer, x: x * torch.rand_like(x) + torch.randn(6)),
    "BatchNorm in evaluation": lambda: nn.BatchNorm1d(6).eval(),
    "BatchNorm without a scale in evaluation": lambda: nn.BatchNorm1d(6, affine=False).eval(),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "Softmax": lambda: nn.Softmax(1),
    "Softplus after Unflatten": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Softplus(), nn.Flatten()),
    "forward hook": lambda: hooked(nn.Linear(6, 6), lambda module, args, output: 2 * output),
    "forward hook of a layer with a rule": lambda: hooked(nn.Sigmoid(), lambda module, args, output: output**2),
    "forward hook that counts": lambda: hooked(nn.Tanh(), lambda module, args, output: CALLS.update(["hook"])),
    "forward pre-hook": lambda: hooked(nn.Tanh(), lambda module, args: (3 * args[0],), before=True),
    "hook of an inner layer": lambda: nn.Sequential(hooked(nn.ReLU(), lambda module, args, output: output + 1)),
    "hook of a parameter": with_parameter_hook,
    "hook of an activation": lambda: with_activation_hook(lambda gradient: 3 * gradient),
    "view": lambda: Own(lambda layer, x: x.view(-1, 2, 3).transpose(1, 2)),
    "part of the input": lambda: Own(lambda layer, x: x[:, ::2]),
    "expanded": lambda: Own(lambda layer, x: x[:, :1].expand(-1, 6)),
    "output that is not contiguous": lambda: Own(lambda layer, x: torch.stack([x, 2 * x]).permute(1, 2, 0)),
    "tied weights": tied,
    "branch on values": lambda: Own(lambda layer, x: layer.inner(x) if bool(x.sum() > 0) else -x),
    "branch on a sample": lambda: Own(lambda layer, x: torch.stack([3 * s if s[0] > 0 else s * s for s in x])),
    "numbers of Python": lambda: Own(lambda layer, x: x * float(x.detach().abs().max())),
    "float32 behind it": lambda: nn.Sequential(nn.Linear(6, 6), Own(lambda layer, x: x.float())),
    "detached": lambda: Own(lambda layer, x: x.detach()),
    "detached, with a weight": lambda: Own(lambda layer, x: layer.inner(x.detach())),
    "detached in part": lambda: Own(lambda layer, x: x.detach() * x),
    "without gradients": lambda: Own(torch.no_grad()(lambda layer, x: layer.inner(x))),
    "weight only": lambda: Own(lambda layer, x: layer.weight.expand(len(x), -1)),
    "frozen": lambda: nn.Linear(6, 6).requires_grad_(False),
    "unused parameters": lambda: Own(lambda layer, x: x * layer.frozen),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "parametrization": lambda: register_and_return(nn.Linear(6, 6)),
    "subclass of Linear": lambda: Masked(6, 6),
    "subclass of ReLU": Leaking,
    "subclass of Identity": Tripled,
    "subclass of Conv1d": lambda: Renamed(1, 2, 3),
    "forward replaced": replaced_on_the_instance,
    "state": lambda: Own(counted),
    "weight written in the forward": lambda: Own(clamped_weight),
    "checkpointed": lambda: Own(
        lambda layer, x: torch.utils.checkpoint.checkpoint(layer.inner, x, use_reentrant=False)
    ),
    "chain within": lambda: ScanSequential(nn.Linear(6, 6), nn.Tanh()),
    "values that grow and vanish": lambda: nn.Sequential(Own(lambda layer, x: 1e200 * x), nn.Tanh()),
    "NaN where nothing is chosen": lambda: Own(lambda layer, x: torch.where(x > 0, x, (x.abs() + 1).log())),
    "rounding": lambda: Own(lambda layer, x: x.round() + x - x.detach()),
    "sorted values": lambda: Own(lambda layer, x: x.sort(1).values),
    "running sum": lambda: Own(lambda layer, x: x.cumsum(1)),
    "complex within": lambda: Own(lambda layer, x: torch.fft.fft(x).abs()),
}


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.softplus(weight)


def register_and_return(layer: nn.Module) -> nn.Module:
    register_parametrization(layer, "weight", Positive())
    return layer


MIXES = r"mixes samples \(as BatchNorm does in training mode\), a hook or a function of its own"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm in training": (lambda: nn.BatchNorm1d(6), MIXES),
    "Softmax over samples": (lambda: nn.Softmax(0), MIXES),
    "mean over samples": (lambda: Own(lambda layer, x: x - x.mean(0)), MIXES),
    "samples in another order": (lambda: Own(lambda layer, x: x.roll(1, 0)), MIXES),
    "gate over samples": (lambda: Own(lambda layer, x: x * torch.sigmoid(x.mean())), MIXES),
    "sorted samples": (lambda: Own(lambda layer, x: x.sort(0).values), MIXES),
    "clipped gradient": (lambda: Own(lambda layer, x: Clipped.apply(x)), MIXES),
    "hook that clips": (lambda: with_activation_hook(lambda gradient: gradient.clamp(-0.01, 0.01)), MIXES),
    "float32 within": (lambda: Own(single_within), "or it computes in fewer digits than its input has"),
    "weakly mixed": (lambda: Own(lambda layer, x: x + 1e-6 * x.mean(0)), MIXES),
    "tuple": (lambda: Own(lambda layer, x: (x, x)), "returns one tensor, found tuple"),
    "LSTM": (lambda: nn.LSTM(6, 6), "returns one tensor, found tuple"),
    "nothing": (lambda: Own(lambda layer, x: None), "returns one tensor, found NoneType"),
    "sum over samples": (lambda: Own(lambda layer, x: x.sum(0)), r"samples of its input, of shape \(5, 6\)"),
    "number": (lambda: Own(lambda layer, x: x.sum()), r"found an output of shape \(\)"),
    "more samples": (lambda: Own(lambda layer, x: torch.cat([x, x])), r"found an output of shape \(10, 6\)"),
    "transposed": (lambda: Own(lambda layer, x: x.T), r"found an output of shape \(6, 5\)"),
    "complex numbers": (lambda: Own(lambda layer, x: torch.fft.fft(x)), "real floating-point numbers, found"),
    "free variable": (lambda: Own(lambda layer, x: x * FREE), "no tensors with gradients but its own parameters"),
    "full backward hook": (partial(with_backward_hook, True), "without backward hooks, found some"),
    "full backward pre-hook": (partial(with_backward_hook, False), "without backward hooks, found some"),
}


def chain_of(kind: type[nn.Sequential], build: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layer = build()
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), layer]
    with torch.no_grad():
        output = nn.Sequential(*layers).double()(torch.ones(5, 4, dtype=torch.float64))
    if isinstance(output, Tensor) and len(output.shape) > 1 and output.is_floating_point():
        layers += [nn.Flatten(), nn.Linear(output[0].numel(), 3, dtype=output.dtype)]
    return kind(*layers)


def train(chain: nn.Sequential) -> list[Any]:
    """Outputs, gradients and buffers of two updates, and the calls."""
    CALLS.clear()
    torch.manual_seed(1)
    found: list[Any] = []
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        given = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        outputs = chain(given)
        optimizer.zero_grad()
        if outputs.requires_grad:
            (outputs * torch.randn(outputs.shape, dtype=torch.float64)).sum().backward()
        optimizer.step()
        found += [outputs.detach(), given.grad]
        found += [None if each.grad is None else each.grad.clone() for each in chain.parameters()]
    return [*found, *chain.buffers(), dict(CALLS)]


@pytest.mark.parametrize("build", RIGHT.values(), ids=RIGHT)
def test_right(build: Callable[[], nn.Module]) -> None:
    expected, found = (train(chain_of(kind, build)) for kind in (nn.Sequential, ScanSequential))

    assert torch.equal(found[0], expected[0])
    # The order of additions differs.
    tolerance = 1e-4 if expected[0].dtype == torch.float32 else 1e-9
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 100)
        else:
            assert one == other


@pytest.mark.parametrize(("build", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(PenstockError, match=rf"ScanSequential: (a layer|layer 3 \().*{text}.*use torch.nn.Sequential"):
        train(chain_of(ScanSequential, build))
