"""A backward in two parts has the bits of one backward, for any model; and what it defers, holds and costs."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PenstockError
from penstock.runtime.execution import split_backward
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.weight_gradients import OPERATORS
from support import models
from support.live_tensors import forget_what_is_there, live_tensors
from support.skip_models import build_web
from support.split_backward_cases import CASES, MICROBATCHES, SAMPLES, WIDTH, B, Bench, V, W, words


@pytest.mark.parametrize("name", CASES)
def test_two_parts_have_the_bits_of_one(name: str) -> None:
    bench, deferred = CASES[name]

    if name != "nothing trained":
        bench.check()
    else:
        assert all(leaf.grad is None for leaf in bench.leaves)
    assert bench.deferred() == deferred


@pytest.mark.parametrize("name", [name for name in CASES if any(word in name for word in ("twice", "tied", "times"))])
def test_groups_part_no_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little is computed before it is added, what goes to one weight still comes together."""
    monkeypatch.setattr(split_backward, "GROUP_BYTES", 0)

    CASES[name][0].check()


LAID_OUT = ("linear", "one sample", "one column", "column-major input", "column-major weight", "product", "experts")
LAID_OUT += ("product on the left", "columns on the left", "addmm", "addmm to rows", "signals", "transposed")  # type: ignore[assignment]


@pytest.mark.parametrize("name", LAID_OUT)
def test_formulas_lay_gradients_out_as_autograd_does(name: str) -> None:
    bench, _ = CASES[name]
    (received,) = [torch.randn(shape, dtype=bench.dtype).requires_grad_() for shape in bench.received]
    (output,) = bench.compute(0, [received])
    node = output.grad_fn
    while type(node) not in OPERATORS:
        ((node, _), *_) = node.next_functions
    edges = {slot: node.next_functions[slot] for slot in OPERATORS[type(node)].slots if node.next_functions[slot][0]}
    # Its argument itself is not a weight; the formula has it too, and is held to it here.
    formula = OPERATORS[type(node)].read(node, tuple(edges))
    caught = torch.randn(node._input_metadata[0].shape, dtype=bench.dtype)
    expected = torch.autograd.grad(GradientEdge(node, 0), [GradientEdge(*edge) for edge in edges.values()], caught)
    for one, other in zip(expected, formula(caught), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


class Probed(torch.autograd.Function):
    """The identity, and something that lives as long as autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probes: list[weakref.ref[object]]) -> Tensor:
        ctx.probe = type("Probe", (), {})()
        probes.append(weakref.ref(ctx.probe))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def hooked(tensor: Tensor) -> Tensor:
    """With a hook of the user's, which turns its gradient around."""
    tensor.register_hook(lambda gradient: -gradient)
    return tensor


HOOKED = {
    "linear": Bench(lambda k, x: [hooked(F.linear(x[0], W, B)) @ V], [W, B, V]),
    "sequences": Bench(lambda k, x: [hooked(F.linear(x[0], W, B)) @ V], [W, B, V], ((2, 3, WIDTH),)),
    "words": Bench(lambda k, x: [hooked(F.embedding(words(k), W)) + x[0]], [W]),
    "result": Bench(lambda k, x: [hooked(torch.tanh(x[0]) @ W)], [W]),
    "input": Bench(lambda k, x: [hooked(torch.tanh(x[0])) @ W], [W]),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_tensors_run_once(name: str) -> None:
    HOOKED[name].check()


def lowered(compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]], *leaves: Tensor) -> Bench:
    """In bfloat16 under autocast, with weights in float32."""
    own = [nn.Parameter(leaf.detach().float()) for leaf in leaves]

    def under_autocast(k: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return compute(k, [*values, *own])

    return Bench(under_autocast, own, dtype=torch.float32)


LOWERED = {
    "linear": (lowered(lambda k, x: [F.linear(x[0], x[1], x[2])], W, B), [0, 1]),
    "norm between": (
        lowered(lambda k, x: [F.linear(F.layer_norm(F.linear(x[0], x[1]), (WIDTH,), x[2], x[2]), x[3])], W, B, V),
        [0, 2],
    ),
    "twice, cast once": (lowered(lambda k, x: [F.linear(torch.tanh(F.linear(x[0], x[1])), x[1])], W), [0]),
    "four times, cast once": (
        lowered(lambda k, x: [F.linear(F.linear(F.linear(F.linear(x[0], x[1]), x[1]), x[1]), x[1])], W),
        [0],
    ),
    "tied words": (lowered(lambda k, x: [F.linear(F.embedding(words(k), x[1]) + x[0], x[1])], W), [0]),
    "attention": (lowered(lambda k, x: [F.linear(x[0], x[1]).softmax(-1) @ x[0].t() @ x[0] @ x[2]], W, V), [0, 1]),
}


@pytest.mark.parametrize("name", LOWERED)
def test_autocast_has_the_bits_of_one_backward(name: str) -> None:
    bench, deferred = LOWERED[name]
    bench.check()

    assert bench.deferred() == deferred


def test_gradients_may_be_wider_than_weights() -> None:
    """As those of weight versions in bfloat16 are, whose masters are in float32."""
    weight, other, row = (nn.Parameter(tensor.detach().bfloat16()) for tensor in (W, V, B))
    weight.grad_dtype = other.grad_dtype = row.grad_dtype = torch.float32
    bench = Bench(lambda k, x: [F.linear(x[0] @ weight, other) + row], [weight, other, row], dtype=torch.bfloat16)
    bench.check()

    assert bench.deferred() == [0, 1]


STEPS = ("linear", "plain", "turned", "left", "words", "packed", "tanh", "add", "times", "scaled", "norm", "in place")


@st.composite
def programs(draw: st.DrawFn) -> Bench:
    """A random computation with few weights, which are used in all ways and again and again."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))

    def make(*shape: int) -> nn.Parameter:
        values = torch.randn(shape, dtype=torch.float64, generator=generator) / 2
        return nn.Parameter(values, requires_grad=draw(st.booleans()) or len(shape) == 2)

    squares, vectors, packed = [make(WIDTH, WIDTH) for _ in range(2)], [make(WIDTH) for _ in range(2)], make(8, WIDTH)
    number = st.integers(0, 1)
    steps = [
        (draw(st.sampled_from(STEPS)), draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(number), draw(number))
        for _ in range(draw(st.integers(1, 9)))
    ]
    also = draw(st.integers(0, 3))

    def compute(k: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        made = list(received)
        for kind, a, b, c, d in steps:
            # Mostly what came last, so that chains are long.
            x, y = made[-1 - min(a // 2, len(made) - 1)], made[b % len(made)]
            made.append(_do(kind, k, x, y, squares[c], vectors[d], vectors[1 - d], packed))
        return [made[-1], made[also % len(made)] * 1.5]

    return Bench(compute, [*squares, *vectors, packed], ((SAMPLES, WIDTH),) * draw(st.integers(1, 2)))


def _do(kind: str, k: int, x: Tensor, y: Tensor, w: Tensor, v: Tensor, u: Tensor, packed: Tensor) -> Tensor:
    match kind:
        case "linear":
            return F.linear(x, w, v)
        case "plain":
            return x @ w
        case "turned":
            return x @ w.t()
        case "left":
            return (w @ x.t()).t()
        case "words":
            return F.embedding(words(k), w) + x
        case "packed":
            first, second = packed.chunk(2)
            return F.linear(x, first, v) + F.linear(y, second)
        case "tanh":
            return torch.tanh(x)
        case "add":
            return x + y
        case "times":
            return torch.tanh(x) * torch.tanh(y)
        case "scaled":
            return x * v
        case "norm":
            return F.layer_norm(x, (WIDTH,), u, v)
        case _:
            return F.linear(x, w).mul_(0.5)


@given(programs())
@settings(max_examples=80)
def test_random_programs_have_the_bits_of_one_backward(bench: Bench) -> None:
    expected, found = (bench.run(divided=divided) for divided in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        # A tensor on the meta device stands for a gradient that does not exist.
        assert one is None or (one.is_meta and other.is_meta) or torch.equal(one, other)


SUBJECTS = {
    **{name: (subject.build, subject.sample) for name, subject in models.SUBJECTS.items()},
    "layered": (models.LAYERED.build, models.LAYERED.sample),
    "U-Net": (lambda: models.UNet().double(), (torch.randn(2, 3, 8, 8).double(),)),
    "web": (lambda: build_web(((), (0,), (0, 1), (2,))), (torch.randn(3, 6).double(),)),
    "recurrent": (lambda: models.Recurrent().double(), (torch.randint(50, (2, 3)),)),
}


# A stateful model computes something else at every call, so that its backwards cannot be compared here.
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "stateful"])
def test_stages_of_captured_models_defer_their_linear_layers(name: str) -> None:
    build, sample = SUBJECTS[name]
    chain = penstock.capture(build(), sample)
    middle = len(chain.layers) // 2
    values = dict(zip(chain.inputs.names, sample, strict=True))
    with torch.no_grad():
        between = chain.stage(0, middle)((), values, seed=1)
    stage = chain.stage(middle, len(chain.layers))
    named, buffers = dict(stage.named_parameters()), [buffer.clone() for buffer in stage.buffers()]

    def compute(k: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        for buffer, copy in zip(stage.buffers(), buffers, strict=True):
            buffer.copy_(copy)
        given = [x if y.is_floating_point() else y for x, y in zip(received, between, strict=True)]
        return stage(given, values, seed=k)

    bench = Bench(compute, list(named.values()), tuple(tuple(tensor.shape) for tensor in between))
    bench.check()
    deferred = bench.deferred()
    left = [key for number, key in enumerate(named) if number not in deferred]
    assert all("norm" in key or (name == "recurrent" and "bias" in key) for key in left), left


class Counting(TorchDispatchMode):
    """Counts the products that are computed, and of a convolution's backward each of its three results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "embedding_dense_backward"):
            self.counts[name] += 1
        elif name == "convolution_backward":
            self.counts[name] += sum(args[-1])
        return operator(*args, **(kwargs or {}))


def test_nothing_is_computed_twice_and_autograd_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    engine = torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", lambda *a, **b: runs.append(1) or engine(*a, **b))
    for name in ("block", "pictures", "experts", "tied words", "transposed"):
        bench = CASES[name][0]
        with Counting() as whole:
            bench.run(divided=False)
        runs.clear()
        with Counting() as parts:
            bench.run(divided=True)

        assert parts.counts == whole.counts
        assert sum(whole.counts.values()) >= 3 * MICROBATCHES
        # The weight part needs autograd where operators share a weight.
        assert len(runs) == MICROBATCHES * (2 if name == "tied words" else 1)
        runs.clear()
        bench.run(divided=True, hooked=True)
        assert len(runs) == MICROBATCHES * 2


def test_between_the_parts_only_what_weights_need_is_held() -> None:
    probes: list[weakref.ref[object]] = []

    def compute(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        middle = torch.tanh(Probed.apply(F.linear(values[0], W, B), probes))
        return (torch.sigmoid(F.linear(middle, V)) * 2,)

    executor, received = StageExecutor(), torch.randn(SAMPLES, WIDTH).double().requires_grad_()
    gradient = torch.randn(SAMPLES, WIDTH).double()
    for leaf in (W, B, V):
        leaf.grad = None
    forget_what_is_there()
    before = {tensor.untyped_storage().data_ptr() for tensor in (received, *live_tensors())}
    executor.forward(0, [received], compute)
    assert probes[0]() is not None
    executor.backward_input(0, [gradient])
    more = {t.untyped_storage().data_ptr(): t.nbytes for t in live_tensors()}
    size = sum(nbytes for address, nbytes in more.items() if address not in before)

    # Of the first layer the gradient of its result, since what was received is there; of the second what it read, too.
    assert size == 3 * gradient.nbytes
    assert probes[0]() is None
    executor.backward_weight(0)
    after = {tensor.untyped_storage().data_ptr() for tensor in live_tensors()} - before
    assert after == {leaf.grad.untyped_storage().data_ptr() for leaf in (W, B, V) if leaf.grad is not None}


def test_nothing_may_depend_on_a_stage() -> None:
    """All gradients that come are absent then, and so are those that leave."""
    executor, leaf = StageExecutor(), nn.Parameter(W.detach().clone())
    executor.forward(0, [torch.ones(SAMPLES, WIDTH).double().requires_grad_()], lambda values: (values[0] @ leaf,))

    (gradient,) = executor.backward_input(0, [None])
    assert gradient is not None and gradient.is_meta
    executor.backward_weight(0)
    assert leaf.grad is None


def test_parts_come_in_their_order_and_once() -> None:
    executor = StageExecutor()
    received = [torch.ones(SAMPLES, WIDTH).double().requires_grad_()]
    gradients = [torch.ones(SAMPLES, WIDTH).double()]
    executor.forward(0, received, lambda values: (values[0] @ W,))
    with pytest.raises(AssertionError, match="comes after its input backward"):
        StageExecutor(dict(executor.in_flight)).backward_weight(0)
    executor.backward_input(0, gradients)
    for again in (StageExecutor.backward_input, StageExecutor.backward):
        with pytest.raises(AssertionError, match="instead of a whole backward"):
            again(StageExecutor(dict(executor.in_flight)), 0, gradients)


def test_a_checkpoint_that_cannot_be_divided_says_so() -> None:
    bench = Bench(lambda k, x: [checkpoint(lambda y: y @ W, x[0], use_reentrant=True)], [W])
    with pytest.raises(PenstockError, match="use_reentrant=False"):
        bench.run(divided=True)
