"""Small computations with weights, to be run backward at once and in two parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.split_backward import run_input_backward

WIDTH, SAMPLES, MICROBATCHES = 4, 6, 3


@dataclass(frozen=True)
class Bench:
    """A function of some received values and `leaves`, for a few microbatches."""

    compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
    """Of the number of the microbatch and what was received."""
    leaves: Sequence[Tensor]
    received: Sequence[tuple[int, ...]] = ((SAMPLES, WIDTH),)
    """Shapes."""
    dtype: torch.dtype = torch.float64

    def run(self, divided: bool, hooked: bool = False) -> list[Tensor | None]:
        """The gradients of what was received, microbatch by microbatch, and of the leaves. `hooked`: these have hooks
        while the weight backwards run.
        """
        for leaf in self.leaves:
            leaf.grad = None
        executor, found, generator = StageExecutor(), [], torch.Generator().manual_seed(1)
        for k in range(MICROBATCHES):
            received = [torch.randn(shape, dtype=self.dtype, generator=generator) for shape in self.received]
            leaves = [tensor.requires_grad_() for tensor in received]
            outputs = executor.forward(k, leaves, lambda values, k=k: tuple(self.compute(k, values)))  # type: ignore[misc]
            gradients = [
                torch.randn(output.shape, dtype=output.dtype, generator=generator) if output.requires_grad else None
                for output in outputs
            ]
            found += (executor.backward_input if divided else executor.backward)(k, gradients)
        if divided:
            assert len(executor.in_flight) == MICROBATCHES
            trained = [leaf for leaf in self.leaves if leaf.requires_grad and hooked]
            hooks = [leaf.register_post_accumulate_grad_hook(lambda _: None) for leaf in trained]
            for k in range(MICROBATCHES):
                executor.backward_weight(k)
            for hook in hooks:
                hook.remove()
        assert not executor.in_flight
        return [*found, *(leaf.grad for leaf in self.leaves)]

    def check(self) -> None:
        """Both parts together have the bits of a whole backward."""
        expected = self.run(divided=False)
        assert any(gradient is not None for gradient in expected)
        for hooked in (False, True):
            for number, (one, other) in enumerate(zip(expected, self.run(divided=True, hooked=hooked), strict=True)):
                assert (one is None) == (other is None), number
                if one is not None and other is not None:
                    assert one.dtype == other.dtype and one.layout == other.layout, number
                    assert one.layout is not torch.strided or one.stride() == other.stride(), number
                    # A tensor on the meta device stands for a gradient that does not exist.
                    assert one.is_meta == other.is_meta, number
                    assert one.is_meta or torch.equal(one.to_dense(), other.to_dense()), number

    def deferred(self) -> list[int]:
        """Which of the leaves have no gradient, and none is made for them, before the weight part."""
        received = [torch.randn(shape, dtype=self.dtype).requires_grad_() for shape in self.received]
        outputs = [output for output in self.compute(0, received) if output.requires_grad]
        edges = list(map(get_gradient_edge, outputs))
        _, part = run_input_backward(edges, [torch.ones_like(output) for output in outputs], received)
        made = {id(leaf) for leaf, _ in part._made}
        return [number for number, leaf in enumerate(self.leaves) if leaf.requires_grad and id(leaf) not in made]


def leaf(*shape: int, trained: bool = True, seed: int = 3) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator), requires_grad=trained)


def bench_of(module: nn.Module, *received: tuple[int, ...], index: int = -1) -> Bench:
    """A module of one argument; `index`: of its result if that is a tuple."""
    torch.manual_seed(0)
    module = module.double()

    def compute(k: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        result = module(*values)
        return [result if index < 0 else result[index]]

    return Bench(compute, list(module.parameters()), received or ((SAMPLES, WIDTH),))


def words(k: int) -> Tensor:
    """Indices, with repetitions."""
    return torch.randint(WIDTH, (SAMPLES,), generator=torch.Generator().manual_seed(k))


class Attending(nn.MultiheadAttention):
    """Attention to itself, or to another value."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, x if y is None else y, x if y is None else y, need_weights=False)[0]


W, V, B = leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH, seed=8), leaf(WIDTH)
WIDE, EXPERTS, FROZEN = leaf(3 * WIDTH, WIDTH), leaf(SAMPLES, WIDTH, WIDTH), leaf(WIDTH, WIDTH, trained=False)
COLUMNS = nn.Parameter(leaf(WIDTH, WIDTH, seed=9).detach().t())
NORM = leaf(WIDTH, seed=5)
FULL, ROWS, ONE = leaf(SAMPLES, WIDTH), leaf(SAMPLES, 1), leaf(1)

CASES: dict[str, tuple[Bench, list[int]]] = {
    # Linear layers, by dimensions, layouts and bias.
    "linear": (bench_of(nn.Linear(WIDTH, 3)), [0, 1]),
    "one sample": (bench_of(nn.Linear(WIDTH, 3), (1, WIDTH)), [0, 1]),
    "one column": (bench_of(nn.Linear(1, 3), (SAMPLES, 1)), [0, 1]),
    "one unit": (bench_of(nn.Linear(WIDTH, 1)), [0, 1]),
    "no bias": (bench_of(nn.Linear(WIDTH, 3, bias=False)), [0]),
    "sequences": (bench_of(nn.Linear(WIDTH, 3), (2, 3, WIDTH)), [0, 1]),
    "sequences without a bias": (bench_of(nn.Linear(WIDTH, 3, bias=False), (2, 3, WIDTH)), [0]),
    "images": (bench_of(nn.Linear(WIDTH, 3), (2, 3, 2, WIDTH)), [0, 1]),
    "vectors": (bench_of(nn.Linear(WIDTH, 3), (WIDTH,)), [0, 1]),
    "turned sequences": (Bench(lambda k, x: [F.linear(x[0].transpose(0, 1), W, B)], [W, B], ((2, 3, WIDTH),)), [0]),
    "column-major input": (Bench(lambda k, x: [F.linear(x[0].t(), W, B)], [W, B], ((WIDTH, SAMPLES),)), [0, 1]),
    "column-major weight": (Bench(lambda k, x: [F.linear(x[0], COLUMNS, B)], [COLUMNS, B]), [0, 1]),
    "an expanded gradient": (Bench(lambda k, x: [F.linear(x[0], W, B).sum(0).sum()], [W, B]), [0, 1]),
    # Products.
    "product": (Bench(lambda k, x: [x[0] @ W], [W]), [0]),
    "product on the left": (Bench(lambda k, x: [W @ x[0].t()], [W]), [0]),
    "columns on the left": (Bench(lambda k, x: [COLUMNS @ x[0].t()], [COLUMNS]), [0]),
    "addmm": (Bench(lambda k, x: [torch.addmm(B, x[0], W)], [B, W]), [0, 1]),
    "addmm to each": (Bench(lambda k, x: [torch.addmm(FULL, x[0], W)], [FULL, W]), [0, 1]),
    "addmm to rows": (Bench(lambda k, x: [torch.addmm(ROWS, x[0], W)], [ROWS, W]), [0, 1]),
    "addmm to all": (Bench(lambda k, x: [torch.addmm(ONE, x[0], W)], [ONE, W]), [0, 1]),
    "addmm with factors": (Bench(lambda k, x: [torch.addmm(B, x[0], W, alpha=0.5)], [B, W]), []),
    "experts": (Bench(lambda k, x: [torch.bmm(x[0], EXPERTS)], [EXPERTS], ((SAMPLES, 2, WIDTH),)), [0]),
    "sums by name": (Bench(lambda k, x: [torch.einsum("ij,jk->ik", x[0], W)], [W]), [0]),
    "bilinear": (bench_of(nn.Bilinear(WIDTH, WIDTH, 3), (SAMPLES, WIDTH), (SAMPLES, WIDTH)), []),
    # Convolutions.
    "signals": (bench_of(nn.Conv1d(3, 4, 3, padding=1), (2, 3, 7)), [0, 1]),
    "pictures": (bench_of(nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2), (2, 4, 9, 9)), [0, 1]),
    "pictures without a bias": (bench_of(nn.Conv2d(3, 4, 3, padding="same", bias=False), (2, 3, 5, 5)), [0]),
    "volumes": (bench_of(nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)), [0, 1]),
    "transposed": (bench_of(nn.ConvTranspose2d(3, 4, 2, stride=2, output_padding=1), (2, 3, 4, 4)), [0, 1]),
    # Others.
    "words": (Bench(lambda k, x: [F.embedding(words(k), W) + x[0]], [W]), [0]),
    "words with options": (
        Bench(lambda k, x: [F.embedding(words(k), W, padding_idx=1, scale_grad_by_freq=True) * x[0]], [W]),
        [0],
    ),
    "sparse words": (Bench(lambda k, x: [F.embedding(words(k), W, sparse=True) * x[0]], [W]), [0]),
    "attention": (bench_of(Attending(WIDTH, 2), (3, 2, WIDTH)), [0, 1, 2, 3]),
    "attention across": (bench_of(Attending(WIDTH, 2), (3, 2, WIDTH), (5, 2, WIDTH)), [0, 1, 2, 3]),
    "recurrence": (bench_of(nn.LSTM(WIDTH, 5, batch_first=True), (2, 3, WIDTH), index=0), [0, 1, 3]),
    "block": (bench_of(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0), (3, 2, WIDTH)), [0, 1, 2, 3, 4, 5, 6, 7]),
    "norms": (bench_of(nn.LayerNorm(WIDTH)), []),
    # What is shared, frozen, moved, or used in other ways.
    "twice": (Bench(lambda k, x: [F.linear(torch.tanh(F.linear(x[0], W, B)), W, B)], [W, B]), [0, 1]),
    "twice, around another": (Bench(lambda k, x: [x[0] @ W.t() @ V @ W.t() @ W.t()], [W, V]), [0, 1]),
    "four times": (Bench(lambda k, x: [x[0] @ W.t() @ W.t() @ W.t() @ W.t()], [W]), [0]),
    "three times directly": (Bench(lambda k, x: [x[0] @ W @ W @ W], [W]), [0]),
    "two ways": (Bench(lambda k, x: [F.linear(x[0] @ W, W)], [W]), [0]),
    "two ways, three times": (Bench(lambda k, x: [F.linear(x[0] @ W @ W, W)], [W]), []),
    "tied words": (Bench(lambda k, x: [F.linear(F.embedding(words(k), W) + x[0], W)], [W]), [0]),
    "tied words, twice": (
        Bench(lambda k, x: [F.linear(F.embedding(words(k), W) + F.embedding(words(k + 1), W) * x[0], W)], [W]),
        [],
    ),
    "one transpose for two": (Bench(lambda k, x: [(lambda t: x[0] @ t @ t)(W.t())], [W]), [0]),
    "also elementwise": (Bench(lambda k, x: [F.linear(x[0], W, B) * W.sum()], [W, B]), [1]),
    "one bias for two": (Bench(lambda k, x: [F.linear(F.linear(x[0], W, B), V, B)], [W, V, B]), [0, 1, 2]),
    "a bias that is also added": (Bench(lambda k, x: [F.linear(x[0], W, B) + B], [W, B]), [0]),
    "packed": (Bench(lambda k, x: [F.linear(x[0], w) for w in WIDE.chunk(3)], [WIDE]), [0]),
    "packed, partly used": (Bench(lambda k, x: [F.linear(x[0], w) for w in WIDE.chunk(3)[:2]], [WIDE]), [0]),
    "slices": (Bench(lambda k, x: [F.linear(x[0], WIDE[:WIDTH]) + F.linear(x[0], WIDE[WIDTH:8])], [WIDE]), [0]),
    "a weight that is made": (Bench(lambda k, x: [F.linear(x[0], W * NORM)], [W, NORM]), []),
    "low rank": (Bench(lambda k, x: [F.linear(x[0], FROZEN) + x[0] @ W @ V], [FROZEN, W, V]), [1, 2]),
    "merged low rank": (Bench(lambda k, x: [F.linear(x[0], FROZEN + W @ V)], [FROZEN, W, V]), [1, 2]),
    "frozen weight": (Bench(lambda k, x: [F.linear(x[0], FROZEN, B)], [FROZEN, B]), [1]),
    "frozen behind words": (Bench(lambda k, x: [F.linear(F.embedding(words(k), W), FROZEN)], [W], ()), [0]),
    "nothing received": (Bench(lambda k, x: [F.linear(torch.ones(3, WIDTH).double() * k, W, B)], [W, B], ()), [0, 1]),
    "nothing trained": (Bench(lambda k, x: [F.linear(x[0], FROZEN)], [FROZEN]), []),
    "the weight itself": (Bench(lambda k, x: [x[0] @ W, W * 1], [W]), []),
    "written in place": (Bench(lambda k, x: [F.linear(x[0], W, B).mul_(2).relu_() @ V], [W, B, V]), [0, 1, 2]),
    "sequences written in place": (
        Bench(lambda k, x: [F.linear(x[0], W, B).relu_() @ V], [W, B, V], ((2, 3, WIDTH),)),
        [0, 1, 2],
    ),
    "unused results": (Bench(lambda k, x: [x[0] @ W, (x[0] @ V).detach()], [W, V]), [0, 1]),
    "unused in some": (Bench(lambda k, x: [x[0] @ W + (x[0] @ V if k != 1 else 0)], [W, V]), [0, 1]),
    "received twice": (Bench(lambda k, x: [x[0] @ W + x[1] + x[0]], [W], ((SAMPLES, WIDTH),) * 2), [0]),
    "received and not used": (Bench(lambda k, x: [x[0] @ W], [W], ((SAMPLES, WIDTH),) * 2), [0]),
    "products of what was received": (Bench(lambda k, x: [x[0].t() @ x[1] @ W], [W], ((SAMPLES, WIDTH),) * 2), [0]),
    "added to what was received": (Bench(lambda k, x: [x[0] + V], [V], ((WIDTH, WIDTH),)), []),
    "checkpointed": (
        Bench(
            lambda k, x: [checkpoint(lambda y: torch.tanh(F.linear(y, W, B)) @ V, x[0], use_reentrant=False)], [W, V]
        ),
        [0, 1],
    ),
}
