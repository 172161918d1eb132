"""The comparison of the first batch with the plain model: what it finds and passes, and that it leaves no trace."""

import logging
import random
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from support.found_inputs import contrastive, dice, masked_mean
from support.models import Blocks, InARow, sgd
from support.processes import Pool

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2)).double()
LABELS = torch.tensor([0, 1, -100, -100, 2, 3, 1, -100])
WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 0.5]).double()


def tokens(length: int, width: int) -> Tensor:
    return torch.randint(0, 11, (length, width), generator=torch.Generator().manual_seed(1))


def layout() -> nn.Sequential:
    """An encoder in PyTorch's default layout: the samples are in dimension 1."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))
    return nn.Sequential(nn.Embedding(11, 8), *layers, nn.Linear(8, 11)).double()


def ragged() -> nn.Sequential:
    """A model of tokens, each by itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)).double()


def labels() -> Tensor:
    """Labels of 8 samples, of which some end earlier."""
    return tokens(8, 6).masked_fill(torch.arange(6) >= torch.tensor([6, 3, 2, 5, 4, 4, 1, 6])[:, None], -100)


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "first" in record.getMessage() or record.levelno >= logging.WARNING:
            self.texts.append(f"{record.levelname} {record.getMessage()}")


def first_step(
    model: Any, sample: Any, batch: Any, target: Any, loss_fn: Any, *, only_here: int | None = None, **options: Any
) -> tuple[list[str], str]:
    """What the first two steps log, and the error of the first one; empty if there is none.

    `only_here`: the rank that has the target; the others pass None.
    """
    made = model() if callable(model) and not isinstance(model, nn.Module) else model
    records = _Records()
    log = logging.getLogger("penstock")
    level = log.level
    log.addHandler(records)
    log.setLevel(logging.INFO)
    try:
        options = {"stages": 2, "microbatches": 2, **options}
        pipe = penstock.Pipeline(made, sample, loss_fn, sgd, **options)
        own = target if only_here in (None, pipe.rank) else None
        pipe.step(batch, own)
        pipe.step(batch, own)
    except penstock.PenstockError as error:
        return records.texts, f"{type(error).__name__}: {error}"
    finally:
        log.removeHandler(records)
        log.setLevel(level)
    return records.texts, ""


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).double()


class Packed(nn.Module):
    """Attention inside of each of the sequences that `offsets` cut out of one row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, row: Tensor, offsets: Tensor) -> Tensor:
        found = self.table(row)
        which = torch.bucketize(torch.arange(len(row)), offsets[1:], right=True)
        scores = (found @ self.mix(found).T).masked_fill(which[:, None] != which, -1e9)
        return scores.softmax(-1) @ found


def packed() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Packed().double(), nn.Tanh(), nn.Linear(8, 11).double()]


class OverSamples(nn.Linear):
    """Looks at all samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = super().forward(x)
        return mixed + (mixed @ x.T).softmax(-1) @ x


class ByCount(nn.Module):
    """Divides by the number of samples, and computes every entry of dimension 1 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class Routed(nn.Module):
    """Returns a loss that balances the experts over the batch beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(4, 3).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        return self.last(torch.tanh(x)), shares.mean(0).pow(2).sum()


def routed_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target) + output[1]


@pytest.mark.parametrize(
    ("model", "batch", "target", "loss_fn", "says"),
    [
        (packed, (tokens(24, 1)[:, 0], torch.tensor([0, 5, 10, 14, 24])), tokens(24, 1)[:, 0], functional.cross_entropy,
         "packed into one"),
        (lambda: nn.Sequential(OverSamples(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), X, Y, functional.mse_loss,
         "looks at the whole batch"),
        (lambda: nn.Sequential(nn.Linear(4, 4).double(), ByCount()), X[:, None].expand(8, 6, 4),
         Y[:, None].expand(8, 6, 4), functional.mse_loss, "looks at the whole batch"),
        (lambda: nn.Sequential(nn.Tanh(), Routed()), X, Y, routed_loss, "loss_weight="),
        (perceptron, X, Y, contrastive, "compare samples"),
        (perceptron, X, Y, masked_mean, "a mask"),
        (perceptron, X, Y, dice, "divide sums"),
        (perceptron, X, Y, nn.MSELoss(reduction="sum"), "loss_fn returns a sum"),
        (perceptron, X, Y, partial(functional.mse_loss, reduction="sum"), "reduction='mean'"),
        (ragged, tokens(8, 6), labels(), ignoring, "labels that are not -100"),
        (perceptron, X, LABELS, nn.CrossEntropyLoss(), "labels that are not -100"),
        (perceptron, X, LABELS, nn.CrossEntropyLoss(weight=WEIGHTS), "weights: loss_weight="),
        (perceptron, X, LABELS.clamp(min=0), nn.CrossEntropyLoss(ignore_index=0), "loss_weight="),
        (perceptron, X, LABELS.clamp(min=0), nn.CrossEntropyLoss(weight=WEIGHTS), "weights: loss_weight="),
        (lambda: nn.Sequential(perceptron(), nn.LogSoftmax(-1)), X, LABELS, nn.NLLLoss(), "labels that are not -100"),
    ],
    ids=["packed", "attention over samples", "by the number of samples", "router", "contrastive", "masked", "dice",
         "sum", "partial sum", "-100", "criterion", "weighted and ignored", "ignore_index", "weighted", "nll"],
)  # fmt: skip
def test_what_is_no_mean_over_samples_has_one_warning(
    model: Callable[[], Any], batch: Any, target: Any, loss_fn: Any, says: str
) -> None:
    sample = tuple(each[: len(each) // 2] for each in batch) if isinstance(batch, tuple) else (batch[:2],)
    sample = (batch[0][:12], batch[1]) if isinstance(batch, tuple) else sample
    (warning,), error = first_step(model, sample, batch, target, loss_fn)
    assert error == ""
    assert warning.startswith("WARNING the loss of the first two microbatches at once is ")
    assert says in warning

    assert first_step(model, sample, batch, target, loss_fn, check="off") == ([], "")
    texts, error = first_step(model, sample, batch, target, loss_fn, check="strict")
    assert texts == []
    assert error.startswith("CaptureError: the loss of the first two microbatches at once is ")


def test_samples_in_another_dimension_are_an_error() -> None:
    batch, target = tokens(8, 6), tokens(8, 6)
    texts, error = first_step(layout, (batch[:4],), batch, target, ignoring)
    assert texts == []
    assert "the samples are in dimension 1 (1.self_attn has batch_first=False)" in error


FACTOR = ContextVar("factor", default=1.0)
"""What the script changes after the model was captured, and nothing sees: it is no attribute."""


class Chained(Blocks):
    """Reads a number of the script between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * FACTOR.get()
        return x


def small() -> nn.Module:
    return nn.Linear(4, 4).double()


def test_a_chain_that_holds_for_the_capture_only_is_an_error() -> None:
    before = FACTOR.set(1.0)

    def switch(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        FACTOR.set(2.0)
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    _, error = first_step(Chained(small), (X[:2],), X, Y, functional.mse_loss, microbatches=4, lr_scheduler=switch)
    FACTOR.reset(before)
    assert "the captured chain of Chained has a loss of " in error


def traced() -> nn.Module:
    """A model with all that a run leaves behind."""
    return Blocks(Block, 3).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.calls, self.seen = 0, []
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.average = 0.9 * self.average + x.detach().mean(0)
        noise = 1 + 0.01 * random.random() + 0.01 * numpy.random.random() + 0.001 * self.calls
        return x + noise * self.drop(self.norm(torch.tanh(self.linear(x))))


CALLS = [0]


def divided_by_calls(output: Tensor, target: Tensor) -> Tensor:
    CALLS[0] += 1
    return functional.mse_loss(output, target) / CALLS[0]


@pytest.mark.parametrize("model", [perceptron, traced], ids=["in a row", "traced"])
def test_a_loss_that_counts_its_calls_is_not_the_fault_of_the_model(model: Callable[[], nn.Module]) -> None:
    texts, error = first_step(model, (X[:2],), X, Y, divided_by_calls)
    assert texts == []
    assert error.startswith("CaptureError: the first batch is not compared with the model: loss_fn gives another")

    assert first_step(model, (X[:2],), X, Y, divided_by_calls, check="off") == ([], "")


class Centred(nn.Module):
    """A loss with state and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.calls = nn.Dropout(0.5), 0
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.centre += output.detach().mean(0)
        return functional.mse_loss(self.drop(output), target) + 0.1 * (output - self.centre).pow(2).mean()


def counted(loss: nn.Module, count: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def counting(output: Tensor, target: Tensor) -> Tensor:
        count[0] += 1
        return loss(output, target)  # type: ignore[no-any-return]  # a tensor

    return counting


class Residual(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("closure", [False, True])
def test_it_leaves_no_trace(schedule: str, seed: int | None, closure: bool) -> None:
    found = []
    for check in ("off", "warn"):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model, loss, count = traced(), Centred().double(), [0]
        loss_fn = counted(loss, count) if closure else loss
        options: dict[str, Any] = {"schedule": schedule, "stages": 2, "microbatches": 2, "seed": seed, "check": check}
        pipe = penstock.Pipeline(model, (X[:2],), loss_fn, sgd, **options)
        losses = [float(pipe.step(X, Y).loss) for _ in range(3)]
        pipe.drain()
        state = [*model.state_dict().values(), *loss.state_dict().values()]
        counts = [count, loss.calls, *((block.calls, block.seen) for block in model.blocks)]
        generators = torch.get_rng_state(), random.random(), numpy.random.random()
        found.append((losses, state, counts, generators, [module.training for module in model.modules()]))
    (losses, state, counts, generators, flags), other = found
    assert (losses, counts, flags) == (other[0], other[2], other[4])
    assert all(torch.equal(one, its) for one, its in zip(state, other[1], strict=True))
    assert torch.equal(generators[0], other[3][0])
    assert generators[1:] == other[3][1:]


def usual(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def cancelling(output: Tensor, target: Tensor) -> Tensor:
    """The mean of signed numbers, as a critic's."""
    return output.mean()


def tiny(output: Tensor, target: Tensor) -> Tensor:
    return 1e-6 * output.pow(2).mean()


def confident(output: Tensor, target: Tensor) -> Tensor:
    """A loss near 0 of large outputs."""
    picked = functional.one_hot(target, 7).to(output.dtype)
    return functional.cross_entropy((output + 14 * picked).flatten(0, 1), target.flatten())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss_fn", [usual, confident, cancelling, tiny])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
)
def test_rounding_is_no_difference(loss_fn: Any, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(6)]
    model = InARow(*layers, nn.Linear(32, 7)).to(dtype)
    batch, target = torch.randn(12, 10, 32).to(dtype), torch.randint(0, 7, (12, 10))
    found = first_step(model, (batch[:3],), batch, target, loss_fn, microbatches=4, autocast=autocast)
    assert found == ([], "")


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


def with_noise(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output + 0.1 * torch.randn_like(output), target)


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "options", "says"),
    [
        (lambda: nn.Sequential(Noisy(4, 4), Noisy(4, 4)).double(), X, functional.mse_loss, {}, "draws random numbers"),
        (perceptron, X, with_noise, {}, "draws random numbers in evaluation mode"),
        (perceptron, torch.zeros(2_000_000, 4).double(), lambda o, y: o.mean(), {}, "it would take about"),
        (lambda: perceptron().to("meta"), X, functional.mse_loss,
         {"init_fn": lambda name, tensor: torch.nn.init.normal_(tensor)}, "its weights were made for parts of it"),
        (perceptron, X, lambda o, y: functional.mse_loss(o.view(4, 4), y), {}, "RuntimeError"),
    ],
    ids=["model", "loss", "dear", "meta", "one size"],
)  # fmt: skip
def test_what_is_not_compared_is_said(model: Any, batch: Tensor, loss_fn: Any, options: Any, says: str) -> None:
    target = Y if len(batch) == 8 else batch[:, 0]
    (text,), error = first_step(model, (batch[:2],), batch, target, loss_fn, **options)
    assert error == ""
    assert text.startswith("INFO the first batch is not compared with the model: ")
    assert says in text


@pytest.mark.parametrize(
    ("model", "batch", "target", "loss_fn", "options"),
    [
        (perceptron, X, Y, functional.mse_loss, {}),
        (perceptron, X, Y, functional.mse_loss, {"microbatches": 1}),
        (perceptron, X[:7], Y[:7], functional.mse_loss, {"microbatches": 3}),
        (ragged, tokens(8, 6), labels(), ignoring, {"loss_weight": lambda target: (target != -100).sum()}),
        (perceptron, X, LABELS, nn.CrossEntropyLoss(weight=WEIGHTS),
         {"loss_weight": lambda target: WEIGHTS[target[target != -100]].sum()}),
        (normalized, X, Y, functional.mse_loss, {}),
        (perceptron, penstock.Microbatches([X[:5], X[5:]], [Y[:5], Y[5:]]), None, functional.mse_loss,
         {"loss_weight": len}),
        (lambda: Residual(small, 3), X, Y, functional.mse_loss, {"compile": {"backend": "eager"}}),
    ],
    ids=["plain", "one microbatch", "remainder", "weighed", "weighted", "batch norm", "own cut", "compiled"],
)  # fmt: skip
def test_right_batches_say_nothing(model: Any, batch: Any, target: Any, loss_fn: Any, options: Any) -> None:
    sample = (X[:2],) if isinstance(batch, penstock.Microbatches) else (batch[:2],)
    for check in ("warn", "strict"):
        assert first_step(model, sample, batch, target, loss_fn, check=check, **options) == ([], "")


def test_processes_find_the_same_and_rank_0_warns_for_all(pool: Pool) -> None:
    batch = tokens(8, 6)
    refused, weighed = (layout, (batch[:4],), batch, batch, ignoring), (ragged, (batch[:2],), batch, labels(), ignoring)
    alone, warned = first_step(*refused), first_step(*weighed)
    for only_here in (None, 1):
        job = partial(first_step, only_here=only_here)
        assert pool.run(2, job, *refused) == [alone, alone]
        assert pool.run(2, job, *weighed) == [warned, ([], "")]


def count_items(target: Tensor) -> Tensor:
    return (target != -100).sum()


def test_items_are_counted_where_the_target_is_read(pool: Pool) -> None:
    job = partial(first_step, loss_weight=count_items, check="strict")

    assert pool.run(2, job, ragged, (tokens(8, 6)[:2],), tokens(8, 6), labels(), ignoring) == [([], "")] * 2
