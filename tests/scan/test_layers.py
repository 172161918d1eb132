"""`ScanRNN`, `ScanGRU` and `ScanLSTM` equal PyTorch's modules, in outputs and all gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from penstock.errors import PenstockError
from penstock.scan import ScanGRU, ScanLSTM, ScanRNN

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (nn.RNN, ScanRNN, {}),
    (nn.RNN, ScanRNN, {"nonlinearity": "relu"}),
    (nn.GRU, ScanGRU, {}),
    (nn.LSTM, ScanLSTM, {}),
]
PAIRS = [(nn.RNN, ScanRNN), (nn.GRU, ScanGRU), (nn.LSTM, ScanLSTM)]
GROWTH = {"RNN_TANH": 2.7, "RNN_RELU": 2.35, "GRU": 6.0, "LSTM": 9.0}
"""Factors of the hidden weights with which gradients neither vanish nor explode."""


def pair(plain: Any, scanning: Any, width: int = 6, method: str = "blelloch", **options: Any) -> tuple[Any, Any]:
    """A module of PyTorch and ours with the same weights, scaled so that gradients do not vanish."""
    torch.manual_seed(1)
    expected = plain(3, width, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "weight_hh" in name:
                parameter.mul_(GROWTH[expected.mode])
    found = scanning(3, width, dtype=torch.float64, method=method, **options)
    found.load_state_dict(expected.state_dict())
    return expected, found


def gradients(module: nn.Module, inputs: Any, first: Tensor | None, every: bool) -> list[Tensor]:
    """Outputs and gradients of inputs, first state and parameters; of a loss on all outputs or on the last.

    An LSTM has another tensor beside `first`, the values of its cell, and beside the last state.
    """
    leaves = [inputs.data if isinstance(inputs, PackedSequence) else inputs]
    leaves += [] if first is None else [first]
    for leaf in leaves:
        leaf.requires_grad_(True)
    if isinstance(module, nn.LSTM):
        outputs, states = module(inputs, None if first is None else (first, first.flip(-1)))
        last = torch.cat(states, -1)
    else:
        outputs, last = module(inputs, first)
    data = outputs.data if isinstance(outputs, PackedSequence) else outputs
    loss = (last * torch.linspace(1, 2, last.numel(), dtype=last.dtype).view_as(last)).sum()
    if every:
        loss = loss + (data * torch.linspace(-1, 1, data.numel(), dtype=data.dtype).view_as(data)).sum()
    found = torch.autograd.grad(loss, [*leaves, *module.parameters()])
    return [data.detach(), last.detach(), *found]


def check(expected: list[Tensor], found: list[Tensor], tolerance: float = 1e-10) -> None:
    """Compares each row (of outputs and gradients of inputs: each step) relative to its own norm."""
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape
        rows = [each.reshape(len(each), -1) for each in (one, other)]
        assert bool(((rows[0] - rows[1]).norm(dim=1) <= tolerance * rows[0].norm(dim=1)).all())


@pytest.mark.parametrize("method", ["linear", "blelloch", "chunked"])
@pytest.mark.parametrize(("plain", "scanning", "options"), KINDS)
def test_lengths(plain: Any, scanning: Any, options: dict[str, Any], method: str) -> None:
    for steps in (1, 2, 3, 31, 32, 33):
        expected, found = pair(plain, scanning, method=method, **options)
        inputs, first = torch.randn(steps, 2, 3, dtype=torch.float64) / 10, torch.randn(1, 2, 6, dtype=torch.float64)
        for every in (False, True):
            check(gradients(expected, inputs, first, every), gradients(found, inputs, first, every))


@pytest.mark.parametrize("method", ["linear", "blelloch", "chunked"])
@pytest.mark.parametrize(("plain", "scanning", "options"), KINDS)
def test_single_precision_is_as_good_as_that_of_pytorch(
    plain: Any, scanning: Any, options: dict[str, Any], method: str
) -> None:
    """The error of each step of the inputs' gradient, against the one in double precision."""
    torch.manual_seed(0)
    inputs = torch.randn(300, 2, 3, dtype=torch.float64) / 10
    expected, found = pair(plain, scanning, method=method, **options)
    exact = gradients(expected, inputs, None, True)[2].flatten(1)
    errors = []
    for module in (expected.float(), found.float()):
        single = gradients(module, inputs.detach().float(), None, True)[2].double().flatten(1)
        errors.append(float(((single - exact).norm(dim=1) / exact.norm(dim=1)).max()))

    assert errors[1] < 3 * errors[0]


def test_products_that_leave_the_range_do_no_harm() -> None:
    """At zero the Jacobian of each step is the weight, and 1.2 ** 2000 is no float32. The loss reads the other."""
    layer = ScanRNN(1, 2, bias=False, method="blelloch")
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").copy_(torch.diag(torch.tensor([1.0, 1.2])))
        layer.get_parameter("weight_ih_l0").fill_(1.0)
    inputs = torch.zeros(2000, 1, 1, requires_grad=True)
    (found,) = torch.autograd.grad(layer(inputs)[1][0, 0, 0], inputs)

    assert torch.equal(found, torch.ones(2000, 1, 1))


@pytest.mark.parametrize(("plain", "scanning", "options"), KINDS)
def test_a_wrong_order_of_factors_would_show(plain: Any, scanning: Any, options: dict[str, Any]) -> None:
    """The gradient has not vanished where it reaches the first step."""
    expected, found = pair(plain, scanning, **options)
    inputs = torch.randn(33, 2, 3, dtype=torch.float64) / 10
    of_inputs = gradients(expected, inputs, None, False)[2]
    with torch.no_grad():
        found.weight_hh_l0.copy_(found.weight_hh_l0.flip(0))
    other = gradients(found, inputs, None, False)[2]

    assert float(of_inputs[0].norm()) > 1e-3 * float(of_inputs[-1].norm())
    assert float((other[0] - of_inputs[0]).norm()) > 1e-3 * float(of_inputs[0].norm())


@pytest.mark.parametrize("plain_and_scanning", PAIRS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 3},
        {"batch_first": True},
        {"bias": False},
        {"bidirectional": True, "num_layers": 2},
        {"bidirectional": True, "batch_first": True, "bias": False},
    ],
    ids=str,
)
def test_options(plain_and_scanning: Any, options: dict[str, Any]) -> None:
    expected, found = pair(*plain_and_scanning, **options)
    assert str(dict(found.named_parameters()).keys()) == str(dict(expected.named_parameters()).keys())
    states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    inputs = torch.randn(7, 5, 3, dtype=torch.float64)
    for first in (None, torch.randn(states, 5 if not options.get("batch_first") else 7, 6, dtype=torch.float64)):
        check(gradients(expected, inputs, first, True), gradients(found, inputs, first, True))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("plain_and_scanning", PAIRS)
def test_packed_sequences(plain_and_scanning: Any, bidirectional: bool) -> None:
    expected, found = pair(*plain_and_scanning, num_layers=2, bidirectional=bidirectional)
    lengths = torch.tensor([4, 9, 1, 9])
    padded = torch.randn(9, 4, 3, dtype=torch.float64)
    first = torch.randn(4 if bidirectional else 2, 4, 6, dtype=torch.float64)
    packed = [pack_padded_sequence(padded.clone(), lengths, enforce_sorted=False) for _ in range(2)]

    check(gradients(expected, packed[0], first, True), gradients(found, packed[1], first, True))
    outputs, _ = found(packed[0])
    assert torch.equal(pad_packed_sequence(outputs)[1], lengths)


@pytest.mark.parametrize("plain_and_scanning", PAIRS)
def test_one_sample_without_a_batch(plain_and_scanning: Any) -> None:
    expected, found = pair(*plain_and_scanning)
    inputs, first = torch.randn(5, 3, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)

    check(gradients(expected, inputs, first, True), gradients(found, inputs, first, True))


@pytest.mark.parametrize("kind", [ScanRNN, ScanGRU, ScanLSTM])
def test_gradcheck(kind: Any) -> None:
    torch.manual_seed(0)
    for steps, batch, width in ((1, 1, 1), (2, 3, 2), (17, 2, 5)):
        layer = kind(2, width, dtype=torch.float64, method="blelloch")
        inputs = torch.randn(steps, batch, 2, dtype=torch.float64, requires_grad=True)
        first = torch.randn(1, batch, width, dtype=torch.float64, requires_grad=True)
        weights = tuple(parameter.detach().requires_grad_() for parameter in layer.parameters())
        names = [name for name, _ in layer.named_parameters()]

        def run(inputs: Tensor, first: Tensor, *weights: Tensor, layer: Any = layer, names: Any = names) -> Any:
            states = (first, first.flip(-1)) if isinstance(layer, ScanLSTM) else first
            found = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (inputs, states))
            return found if isinstance(found[1], Tensor) else (found[0], *found[1])

        assert torch.autograd.gradcheck(run, (inputs, first, *weights))


def test_dropout_between_layers() -> None:
    layer = ScanRNN(3, 6, num_layers=2, dropout=0.5, method="blelloch")
    inputs = torch.randn(7, 2, 3)
    assert not torch.equal(layer(inputs)[0], layer(inputs)[0])
    layer.eval()
    assert torch.equal(layer(inputs)[0], layer(inputs)[0])


def test_bfloat16_is_scanned_in_single_precision() -> None:
    torch.manual_seed(0)
    layer = ScanRNN(3, 6, method="blelloch").bfloat16()
    inputs = torch.randn(40, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    layer(inputs)[0].float().sum().backward()

    assert inputs.grad is not None and inputs.grad.dtype == torch.bfloat16 and inputs.grad.isfinite().all()


def test_auto_takes_what_is_estimated() -> None:
    assert ScanRNN(3, 512).chosen_method(torch.empty(10, 64, 3)) == "torch"
    assert ScanRNN(3, 64).chosen_method(torch.empty(1000, 16, 3)) == "linear"
    assert ScanRNN(3, 4).chosen_method(torch.empty(1000, 1, 3)) == "blelloch"


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(PenstockError, match="expected one of 'auto', 'torch', 'linear'"):
        ScanGRU(3, 6, method="fast")  # type: ignore[arg-type]


def test_the_cell_of_an_lstm() -> None:
    """Its last values are PyTorch's to the bit, and so are the outputs."""
    expected, found = pair(nn.LSTM, ScanLSTM, num_layers=2)
    inputs = torch.randn(50, 2, 3, dtype=torch.float64)
    for one, other in zip(expected(inputs)[1], found(inputs)[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(expected(inputs)[0], found(inputs)[0])
    with torch.no_grad():
        assert found.chosen_method(inputs) == "torch"


def test_a_projection_and_wrong_states_are_refused() -> None:
    with pytest.raises(PenstockError, match=r"ScanLSTM\(proj_size=2\): expected 0"):
        ScanLSTM(3, 6, proj_size=2)
    layer = ScanLSTM(3, 6, method="blelloch")
    for cell, text in ((7, "equal size"), (5, "Expected hidden")):
        with pytest.raises(RuntimeError, match=text):
            layer(torch.ones(4, 2, 3), (torch.ones(1, 2, 5), torch.ones(1, 2, cell)))


@pytest.mark.parametrize("plain_and_scanning", PAIRS)
def test_the_backward_of_pytorch_is_that_of_its_module(plain_and_scanning: Any) -> None:
    """It can be differentiated again."""
    plain, scanning = plain_and_scanning
    expected, found = pair(plain, scanning, method="torch", num_layers=2, batch_first=True)
    inputs = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    for one, other in zip(gradients(expected, inputs, None, True), gradients(found, inputs, None, True), strict=True):
        assert torch.equal(one, other)
    (first,) = torch.autograd.grad(found(inputs)[0].sum(), inputs, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), inputs)[0].isfinite().all()
