"""The operators that a capture counts in every layer, and the seconds that are estimated from them."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from penstock.capturing import LayerChain, capture
from penstock.capturing.operators import OperatorCall
from penstock.capturing.weightless import capture_weightless
from penstock.capturing.work_estimates import estimate_seconds
from support.models import InARow

FLOAT = 4
CPU = torch.device("cpu")


def operators(*layers: Any, sample: Tensor) -> list[tuple[OperatorCall, ...]]:
    return [layer.operators for layer in capture(list(layers), (sample,)).layers]


def test_a_matrix_product_counts_its_flops_its_bytes_and_its_backwards() -> None:
    first, second = operators(nn.Linear(3, 5), nn.Linear(5, 7, bias=False), sample=torch.randn(2, 3))

    # The sample needs no gradient, so the first layer has one product in its backward.
    assert first == (OperatorCall(2 * 2 * 3 * 5, FLOAT * (5 + 2 * 3 + 3 * 5 + 2 * 5), FLOAT, 1),)
    assert second == (OperatorCall(2 * 2 * 5 * 7, FLOAT * (2 * 5 + 5 * 7 + 2 * 7), FLOAT, 2),)


def test_what_is_frozen_has_no_backward_or_passes_the_gradient_only() -> None:
    layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    for frozen in (layers[0], layers[2]):
        frozen.requires_grad_(False)

    assert [own[0].backwards for own in operators(*layers, sample=torch.randn(2, 3))] == [0, 1, 1]


def test_an_embedding_reads_its_rows_and_fills_the_gradient_of_its_table() -> None:
    (found,) = operators(nn.Embedding(100, 4), sample=torch.tensor([[1, 2, 3]]))

    assert found == (OperatorCall(0, FLOAT * 100 * 4, FLOAT, 0), OperatorCall(0, 3 * 8 + 2 * FLOAT * 3 * 4, FLOAT, 2))


def test_other_operators_move_bytes_and_views_do_nothing() -> None:
    def view(x: Tensor) -> Tensor:
        return x.view(2, 2, 2).transpose(0, 1).detach()

    def spread_out(x: Tensor) -> Tensor:
        """Reads 4 elements and writes 400."""
        return x[:, :1, :1].expand(2, 100, 2).exp()

    views, spread = operators(view, spread_out, sample=torch.randn(2, 4))

    assert views == ()
    assert spread == (OperatorCall(0, FLOAT * (2 + 400), FLOAT, 0),)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_attention_and_scripted_modules_are_counted() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    (attention,) = operators(attend, sample=torch.randn(2, 3, 5, 8))
    (scripted,) = operators(torch.jit.script(nn.Sequential(nn.Linear(3, 5), nn.ReLU())), sample=torch.randn(2, 3))

    # Each of two products has 2 x 3 x 5 x 5 x 8 multiplications and additions.
    assert sum(operator.flops for operator in attention) == 2 * 2 * (2 * 3 * 5 * 5 * 8)
    assert sum(operator.flops for operator in scripted) == 2 * 2 * 3 * 5
    assert [operator.backwards for operator in scripted] == [1, 2]


@torch.library.custom_op("penstock_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture
def formula() -> Iterator[None]:
    register_flop_formula(torch.ops.penstock_tests.doubled)(lambda shape, **_: 1000 * shape[0])
    yield
    del flop_registry[torch.ops.penstock_tests.doubled]


def test_an_operator_of_the_users_moves_bytes() -> None:
    assert operators(doubled, sample=torch.randn(3, 2)) == [(OperatorCall(0, FLOAT * 2 * 6, FLOAT, 0),)]


@pytest.mark.usefixtures("formula")
def test_an_operator_of_the_users_may_have_a_formula() -> None:
    assert operators(doubled, sample=torch.randn(3, 2))[0][0].flops == 3000


def test_compiled_layers_are_counted() -> None:
    """PyTorch refuses to compile a whole graph under a dispatch mode."""
    # Another test of this process may have had its compiler skip the forward of nn.Linear.
    torch.compiler.reset()
    compiled = torch.compile(nn.Linear(3, 5), backend="eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)

    assert operators(compiled, sample=torch.randn(2, 3))[0][0].flops == 2 * 2 * 3 * 5


class Restless(nn.Module):
    """Has state in Python, draws numbers, and does what its data says."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.history: list[float] = []
        self.met: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.history.append(random.random())
        self.met.add(self.calls)
        x = F.dropout(self.linear(x), 0.5)
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("traced", [False, True])
def test_counting_leaves_no_trace(traced: bool) -> None:
    torch.manual_seed(0)
    blocks = [Restless() for _ in range(3)]
    hooked: list[str] = []
    x = torch.randn(2, 4)
    twins = copy.deepcopy(blocks)
    hooks = [block.register_forward_hook(lambda *_: hooked.append("")) for block in blocks]
    states = torch.get_rng_state(), random.getstate()
    chain = capture(InARow(*blocks) if traced else blocks, (x,))

    assert all(layer.operators for layer in chain.layers)
    assert [(block.calls, block.history, float(block.seen)) for block in blocks] == [(0, [], 0.0)] * 3
    assert [block.met for block in blocks] == [set()] * 3
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    # The hooks ran on copies, and are still there, and there are no others.
    assert not hooked
    assert [list(block._forward_hooks) for block in blocks] == [[hook.id] for hook in hooks]
    results = []
    for run in (blocks, twins):
        torch.manual_seed(1)
        random.seed(1)
        values = x
        for block in run:
            values = block(values)
        results.append((values, [block.history for block in run]))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def model(vocabulary: int = 50) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
    return [nn.Embedding(vocabulary, 8), *map(InARow, blocks), nn.Linear(8, vocabulary)]


def estimate(chain: LayerChain) -> tuple[float, ...]:
    found = estimate_seconds(chain, CPU)
    assert found is not None
    return found


def test_equal_layers_take_equally_long_and_a_large_vocabulary_longer() -> None:
    x = torch.randint(50, (2, 16))
    small, large = (estimate(capture(model(vocabulary), (x,))) for vocabulary in (50, 5000))

    assert len(set(small[1:4])) == 1
    assert small[1:4] == large[1:4]
    assert large[0] > small[0] and large[-1] > 20 * small[-1]


def test_the_last_layer_has_the_loss() -> None:
    x = torch.randn(64, 8)
    last = estimate(capture([nn.Linear(8, 8), nn.Linear(8, 8)], (x,)))[-1]
    inner = estimate(capture([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)], (x,)))[1]

    assert last - inner == pytest.approx(6 * 64 * 8 * FLOAT / 10e9)


def test_a_model_without_weights_takes_as_long() -> None:
    x = torch.randint(50, (2, 16))
    with torch.device("meta"):
        weightless = model()

    assert estimate(capture_weightless(weightless, (x,)).chain) == estimate(capture(model(), (x,)))


def test_a_gpu_has_other_rates() -> None:
    """Arithmetic is cheaper there than moving bytes: the product of large matrices weighs less beside a sum."""

    def double(x: Tensor) -> Tensor:
        return x + x

    x = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    with torch.device("meta"):
        layers: list[Any] = [nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16), double]
    chain = capture_weightless(layers, (x,)).chain
    (product, added), (fast, moved) = (estimate_seconds(chain, torch.device(kind)) or () for kind in ("cpu", "cuda"))

    assert product / added > 2 * fast / moved


def test_nothing_is_known_of_layers_that_run_no_operator() -> None:
    def numbers(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    assert estimate_seconds(capture([numbers, numbers], (torch.ones(2),)), CPU) is None
