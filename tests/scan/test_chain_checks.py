"""Every backward of a `ScanSequential` is compared with autograd, layer by layer; a layer is refused by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.scan import ScanRNN, ScanSequential, blelloch, diagonal_recurrence, estimate, linear


def chain_of(layer: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """The scan over a chain with `layer`, and PyTorch's chain of the same layers."""
    # Else the samples may be sorted as they are.
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), layer, nn.Linear(4, 4)]
    return ScanSequential(*layers).double(), nn.Sequential(*layers).double()


def gradients(chain: nn.Sequential) -> list[Tensor]:
    """The gradients of the input and of the parameters. Samples differ in what they count."""
    given = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4).requires_grad_()
    loss = (chain(given).sum(1) * torch.arange(5)).sum()
    return list(torch.autograd.grad(loss, [given, *chain.parameters()]))


def check(chain: nn.Sequential, plain: nn.Sequential) -> None:
    for found, expected in zip(gradients(chain), gradients(plain), strict=True):
        # The order of additions differs.
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_a_layer_may_change_after_a_backward() -> None:
    """Its Jacobian followed from a rule, and the pattern was kept."""
    chain, plain = chain_of(nn.Linear(4, 4))
    check(chain, plain)
    handle = chain[1].register_forward_hook(lambda module, args, output: output**2)
    check(chain, plain)
    handle.remove()
    layer: Any = chain[2]
    layer.forward = lambda input: nn.functional.linear(input.sin(), layer.weight, layer.bias)
    check(chain, plain)


def test_a_convolution_may_change_its_stride() -> None:
    convolution = nn.Conv2d(1, 1, 3, stride=2, padding=1, dtype=torch.float64)
    chain, plain = (
        kind(nn.Unflatten(1, (1, 2, 2)), convolution, nn.Flatten()) for kind in (ScanSequential, nn.Sequential)
    )
    check(chain, plain)
    convolution.stride = (1, 1)
    check(chain, plain)


def test_a_product_that_leaves_the_range_does_no_harm() -> None:
    """Two layers have 1e320 together in a direction that nothing goes along."""
    layers = [nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(4)]
    for layer in layers:
        layer.weight.data = torch.diag(torch.tensor([1e160, 2.0], dtype=torch.float64))
    given = torch.tensor([[0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(ScanSequential(*layers)(given)[0, 1], given)

    assert torch.equal(found, torch.autograd.grad(nn.Sequential(*layers)(given)[0, 1], given)[0])


def test_a_gradient_that_is_not_finite_is_left_as_it_is() -> None:
    chain, _ = chain_of(nn.Linear(4, 4))
    given = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    (chain(given) * torch.tensor([[1.0], [torch.inf]])).sum().backward()

    assert given.grad is not None and given.grad[0].isfinite().all() and not given.grad[1].isfinite().any()


def test_a_second_backward_and_weights_that_have_changed() -> None:
    chain, plain = chain_of(nn.Linear(4, 4))
    found = []
    for each in (chain, plain):
        each.zero_grad()
        loss = each(torch.ones(2, 4, dtype=torch.float64)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in each.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    loss = chain(torch.ones(2, 4, dtype=torch.float64)).sum()
    with torch.no_grad():
        chain[2].weight.add_(1)
    with pytest.raises(PenstockError, match=r"layer 2 \(Linear\).*modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_the_first_layer_may_take_whole_numbers(sparse: bool) -> None:
    """It needs no Jacobian. Neither does any layer before the first parameter that is trained."""
    results = []
    for kind in (nn.Sequential, ScanSequential):
        torch.manual_seed(0)
        chain = kind(
            nn.Identity(), nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)
        ).double()
        (chain(torch.tensor([[0, 3], [8, 3]])) * torch.arange(2)).sum().backward()
        results.append([parameter.grad for parameter in chain.parameters()])
    torch.testing.assert_close(*results)
    wide = ScanSequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 1), most_bytes=50_000).requires_grad_(False)
    wide[2].requires_grad_()
    wide(torch.ones(3, 100)).sum().backward()

    assert wide[2].weight.grad is not None


def test_layers_run_once_in_a_checkpoint_and_under_autocast() -> None:
    chain, plain = chain_of(nn.Dropout(0.3))
    found = []
    for each in (chain, plain):
        torch.manual_seed(0)
        given = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        torch.utils.checkpoint.checkpoint(each, given, use_reentrant=False).square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    chain, plain = chain_of(nn.GELU())
    for each in (chain.float(), plain.float()):
        given = torch.ones(3, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            each(given).float().square().sum().backward()
        found.append(given.grad)
    # Eight bits of a number.
    torch.testing.assert_close(found[2], found[3], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("layers", "given", "text"),
    [
        ([nn.ReLU(inplace=True)], torch.ones(2, 4), r"layer 0 \(ReLU\).*leaves the input of the chain as it is"),
        ([nn.Flatten(), nn.ReLU(inplace=True)], torch.ones(2, 2, 2), r"layer 1 \(ReLU\).*leaves the input"),
        ([nn.Linear(4, 4)], torch.ones(4), r"layer 0 \(Linear\).*mixes samples"),
        ([nn.Tanh()], torch.tensor(1.0), r"layer 0 \(Tanh\).*Give several samples as a batch"),
        ([nn.Tanh()], (torch.ones(2, 4), 1), r"ScanSequential\(input=\): expected a torch.Tensor"),
        ([nn.ELU(), nn.Linear(4, 4).requires_grad_(False), nn.Softmax(0)], torch.ones(2, 4), r"layer 2 \(Softmax\)"),
    ],
)
def test_chains_that_are_refused(layers: list[nn.Module], given: Any, text: str) -> None:
    chain = ScanSequential(*layers)
    with pytest.raises(PenstockError, match=text):
        output = chain(given.clone().requires_grad_() * 1 if isinstance(given, Tensor) else given)
        (output * torch.rand_like(output)).sum().backward()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ScanRNN(2, 2, group=5), r"ScanRNN\(group=5\): expected a torch.distributed.P"),  # type: ignore[arg-type]
        (lambda: estimate(1, 1, 1, device="tpu"), r"estimate\(device=\): expected a type of device"),
        (lambda: estimate(None, 1, 1), r"estimate\(steps=\): expected a whole number"),  # type: ignore[arg-type]
        (lambda: estimate(1, 1.5, 1), r"estimate\(batch=\): expected a whole number"),  # type: ignore[arg-type]
        (lambda: blelloch(None, None), r"scan\(gradient=\): expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: linear(torch.ones(1, 1), [1]), r"scan\(jacobians=\): expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: diagonal_recurrence(torch.ones(2), None), r"diagonal_recurrence\(inputs=\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        call()
