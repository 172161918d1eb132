"""Capture of models that this file defines: every front door, every kind of input and output, every refusal."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.capturing import LayerChain, capture
from penstock.capturing.module_state import find_writable
from penstock.capturing.samples import Call
from penstock.errors import CaptureError
from support.chain_execution import assert_equals_model, every_split, run_stages
from support.models import InARow

WIDTH = 4


def data(samples: int, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, *sizes, generator=generator, dtype=torch.float64)


def positive(samples: int) -> Tensor:
    return data(samples, WIDTH).gt(0).long()


def double(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64) / 2
    return model.double()


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.normalization = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(dropout)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.dropout(self.normalization(self.convolution(x))))


class Images(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.blocks = nn.ModuleList(Residual(dropout) for _ in range(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.stem(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("one", "two", "three", "four", "five", "six"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x).tanh()
        b = self.two(a).tanh()
        c = self.three(b).tanh()
        d = self.four(c + x)
        return self.six(F.gelu(self.five(d) + a))


class Masked(nn.Module):
    """Keywords, an integer mask, a constant, None; a dict with an early result and an input in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.three, self.four = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.five = nn.Linear(5, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, bias: Tensor | None = None) -> Any:
        h = self.one(x)
        chosen = h > 0
        auxiliary = h.square().mean()
        if mask is not None:
            h = h.masked_fill(mask == 0, 0.0)
        h = self.two(h) * scale
        h = torch.where(chosen, self.three(h), h)
        h = self.five(self.four(h))
        return {"logits": h, "auxiliary": auxiliary, "x": x, "kind": "masked", "bias": bias}


@dataclass
class Batch:
    x: Tensor
    scale: Tensor


@dataclass
class Result:
    value: Tensor
    parts: dict[str, Tensor]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, batch: Batch) -> Result:
        h = batch.x
        parts = {}
        for index, layer in enumerate(self.layers):
            h = layer(h) * batch.scale
            parts[str(index)] = h.sum(-1)
        return Result(h, parts)


class Shared(nn.Module):
    """One block called twice, out of order."""

    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if normalized else nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.blocks[1](self.blocks[0](x)))
        return self.last(h)


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.three = nn.Linear(WIDTH, WIDTH)


class WritesInput(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.three(self.two(self.one(x) + x) + x)


class WritesPieces(ThreeLayers):
    """A tensor made of nothing but sizes, filled by one layer after the other; a mask that is written on the way."""

    def forward(self, x: Tensor) -> Tensor:
        result, mask = torch.zeros_like(x), torch.zeros_like(x)
        mask[:, 1] = 1
        for index, layer in enumerate((self.one, self.two, self.three)):
            x = layer(x) + mask
            mask[:, index] = 2
            result[:, index] = x[:, index]
        return result


class WritesBuffer(ThreeLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        self.count.add_(h.detach().mean(0))
        h = self.two(h) * self.scale
        return self.three(h.relu_() + self.count) * self.scale, self.scale


class WritesView(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        flat = h.view(-1)
        g = self.two(x)
        h.relu_()
        return self.three(g) + flat.view(-1, WIDTH)


class Numbers(ThreeLayers):
    """A number that no cut can carry, and an unused, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        number = h.sum().item()
        return self.three(self.two(h) * number) / number


def stacked() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return InARow(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 3))


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 3),
    )


def shared_statistics() -> nn.Sequential:
    normalization = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), normalization, nn.Linear(WIDTH, WIDTH), normalization, nn.Linear(WIDTH, 3)
    )


def writing_through_views() -> nn.Sequential:
    """What crosses its cuts is written in place a layer later, through a view."""
    return nn.Sequential(
        nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)
    )


class CountsCalls(nn.Module):
    """Keeps a number in Python and a buffer that is another tensor after each call."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        return self.linear(x) / (1 + self.calls) - self.average


def shared_count() -> list[nn.Module]:
    """A block that counts its calls, three times."""
    counting = CountsCalls()
    return [layer for _ in range(3) for layer in (counting, nn.Linear(WIDTH, WIDTH))]


class Table(nn.Module):
    """Makes a table with its first call, which is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.table.numel():
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return self.linear(x) + self.table


CASES: list[Any] = [
    pytest.param(sequential, lambda n: Call((data(n, WIDTH),), {}), id="sequential"),
    pytest.param(Images, lambda n: Call((data(n, 3, 6, 6),), {}), id="images"),
    pytest.param(Plain, lambda n: Call((data(n, WIDTH),), {}), id="long skips"),
    pytest.param(Masked, lambda n: Call((), {"x": data(n, WIDTH), "mask": positive(n), "scale": 0.5}), id="keywords"),
    pytest.param(Masked, lambda n: Call((data(n, WIDTH), None), {}), id="none"),
    pytest.param(Structured, lambda n: Call((Batch(data(n, WIDTH), torch.tensor(0.5).double()),), {}), id="dataclass"),
    pytest.param(WritesInput, lambda n: Call((data(n, WIDTH),), {}), id="writes its input"),
    pytest.param(WritesPieces, lambda n: Call((data(n, WIDTH),), {}), id="writes pieces"),
    pytest.param(WritesBuffer, lambda n: Call((data(n, WIDTH),), {}), id="writes a buffer"),
    pytest.param(WritesView, lambda n: Call((data(n, WIDTH),), {}), id="writes a view"),
    pytest.param(Numbers, lambda n: Call((data(n, WIDTH),), {}), id="numbers"),
    pytest.param(stacked, lambda n: Call((data(n, 5, 8),), {}), id="torch's own encoder"),
    pytest.param(lambda: Shared(False), lambda n: Call((data(n, WIDTH),), {}), id="shared block"),
    pytest.param(lambda: Shared(True), lambda n: Call((data(n, WIDTH),), {}), id="shared statistics"),
    pytest.param(shared_statistics, lambda n: Call((data(n, WIDTH),), {}), id="shared statistics of a list"),
    pytest.param(writing_through_views, lambda n: Call((data(n, WIDTH),), {}), id="writes through views"),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("build", "call"), CASES)
def test_the_chain_equals_the_model_at_every_cut(build: Callable[[], nn.Module], call: Callable[[int], Call]) -> None:
    model = double(build())
    chain = capture(model, call(3).kwargs or call(3).args)

    assert len(chain.layers) >= 2
    for samples in (3, 5):
        assert_equals_model(chain, model, call(samples))
    evaluation = chain.evaluation()
    assert evaluation is chain.evaluation()
    assert evaluation.evaluation() is evaluation
    assert [layer.name for layer in evaluation.layers] == [layer.name for layer in chain.layers]
    model.eval()
    assert_equals_model(evaluation, model, call(4))


def names(chain: LayerChain) -> list[str]:
    return [layer.name for layer in chain.layers]


def test_a_sample_of_one_serves_any_batch() -> None:
    model = double(Plain())

    assert_equals_model(capture(model, (data(1, WIDTH),)), model, Call((data(4, WIDTH),), {}))


def test_layers_are_named_after_blocks() -> None:
    assert names(capture(double(Images()), (data(2, 3, 6, 6),))) == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert names(capture(double(sequential()), (data(2, WIDTH),))) == ["0", "1.0", "1.1", "2", "3", "4"]
    assert names(capture(double(Plain()), (data(2, WIDTH),))) == ["one", "two", "three", "four", "five", "six"]
    shared = capture(double(Shared(False)), (data(2, WIDTH),))
    assert names(shared) == ["blocks.0", "blocks.1", "blocks.0@1", "last"]
    assert shared.readers["blocks.0.0.weight"] == (0, 2)


def test_a_block_that_a_list_holds_several_times_is_cut_at_every_call() -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * 4
    repeated = capture(double(InARow(nn.Linear(WIDTH, WIDTH), *blocks)), (data(2, WIDTH),))

    assert names(repeated) == ["layers.0", "layers.1", "layers.1@1", "layers.1@2", "layers.1@3"]
    assert repeated.readers["layers.1.0.weight"] == (1, 2, 3, 4)


def test_layers_that_write_the_same_statistics_are_one() -> None:
    assert names(capture(double(Shared(True)), (data(2, WIDTH),))) == ["blocks.0", "last"]
    assert names(capture(double(shared_statistics()), (data(2, WIDTH),))) == ["0", "1", "4"]


def test_layers_that_change_one_module_are_one() -> None:
    assert names(capture(double(InARow(*shared_count())), (data(2, WIDTH),))) == ["layers.0", "layers.5"]
    assert names(capture(shared_count(), (torch.zeros(2, WIDTH),))) == ["0", "5"]
    table = Table()
    assert names(capture([table, nn.Tanh(), table, nn.Tanh()], (torch.zeros(2, WIDTH),))) == ["0", "3"]


class CountsEvaluations(nn.Module):
    """Writes a buffer in evaluation only. Its code does not show which; a run does."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.write()
        return self.linear(x)

    def write(self) -> None:
        for buffer in self.buffers():
            buffer += 1


class CountsOpenly(CountsEvaluations):
    def write(self) -> None:
        self.count += 1


def test_layers_that_change_one_module_in_evaluation_only_are_one() -> None:
    counts = CountsOpenly()
    chain = capture([counts, nn.Tanh(), counts, nn.Linear(WIDTH, 3)], (torch.zeros(2, WIDTH),))

    assert names(chain) == names(chain.evaluation()) == ["0", "3"]


def test_a_list_whose_layers_may_not_be_cut_in_evaluation_only_cannot_evaluate() -> None:
    counts = CountsEvaluations()
    chain = capture([counts, nn.Tanh(), counts, nn.Linear(WIDTH, 3)], (torch.zeros(2, WIDTH),))

    assert names(chain) == ["0", "1", "2", "3"]
    with pytest.raises(CaptureError, match=r"list of layers has other layers in evaluation .* \(1 is in one of them"):
        chain.evaluation()


def test_a_list_of_layers_passes_tuples_and_dicts_as_arguments() -> None:
    first, second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    layers = [
        first,
        lambda h: (h, h.relu()),
        lambda h, positive: {"sign": "plus", "right": positive, "left": second(h)},
        lambda left, right, sign: left + right if sign == "plus" else left,
    ]
    x = data(3, WIDTH)
    chain = capture(layers, (x,))
    stage = chain.stage(0, 4)

    assert list(chain.parameters) == ["0.weight", "0.bias"]
    assert [len(chain.cut(index)) for index in range(5)] == [0, 1, 2, 2, 1]
    assert torch.equal(stage((), chain.inputs.bind((x,), {}))[0], second(first(x)) + first(x).relu())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return -self.layer(x)


class Item(Branching):
    def forward(self, x: Tensor) -> Tensor:
        width = int(self.layer(x).sum().item())
        return self.layer(x)[:, :width]


class Numpy(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.from_numpy(numpy.sort(x.detach().numpy()))


class FixedBatch(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(3, 2, 2)


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        (Branching, "if x.sum() > 0:", "control flow depends on the values"),
        (Item, "width = int(self.layer(x).sum().item())", "control flow depends on the values"),
        (Numpy, "numpy.sort(x.detach().numpy())", "NumPy"),
    ],
)
def test_a_refusal_names_the_line(kind: type[nn.Module], line: str, reason: str, capfd: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(kind().double(), (data(3, WIDTH),))

    message = str(caught.value)
    assert "test_capture.py:" in message
    assert line in message
    assert reason in message
    assert "list of layers" in message
    assert len(message) < 700
    assert "def forward" not in "".join(capfd.readouterr())


def test_a_model_that_fixes_its_batch_size_takes_microbatches_of_the_sample_s_size() -> None:
    chain = capture(FixedBatch().double(), (data(3, WIDTH),))

    chain.inputs.check_samples(3)
    with pytest.raises(CaptureError, match=r"has 4 sample\(s\) in a microbatch, and the model's code takes 3 only"):
        chain.inputs.check_samples(4)


def test_eager_layers_may_branch_on_the_data() -> None:
    model = double(nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching()))
    chain = capture(model, (data(3, WIDTH),))

    for x in (data(3, WIDTH).abs() * 9, -data(3, WIDTH).abs() * 9):
        assert_equals_model(chain, model, Call((x,), {}))


def test_capture_leaves_no_trace() -> None:
    for model, x in ((double(Images(0.5)), data(3, 3, 6, 6)), (double(sequential()), data(3, WIDTH))):
        next(iter(model.children())).eval()
        flags = [module.training for module in model.modules()]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        capture(model, (x,)).evaluation()

        assert torch.equal(torch.rand(3), expected)
        assert flags == [module.training for module in model.modules()]
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_draws_by_seed_and_layer() -> None:
    model = double(Images(0.5))
    chain = capture(model, (data(3, 3, 6, 6),))
    call = Call((data(3, 3, 6, 6),), {})
    expected = run_stages(chain, model, call, (0, 5), seed=3)

    assert [layer.random for layer in chain.layers] == [False, True, True, True, False]
    assert not any(layer.random for layer in chain.evaluation().layers)
    for bounds in every_split(5):
        found = run_stages(chain, model, call, bounds, seed=3)
        assert torch.equal(found.outputs[0], expected.outputs[0])
        assert all(torch.equal(found.buffers[name], expected.buffers[name]) for name in expected.buffers)
    assert not torch.equal(run_stages(chain, model, call, (0, 5), seed=4).outputs[0], expected.outputs[0])


@pytest.mark.parametrize("build", [Images, lambda: Images().blocks])
def test_a_stage_copies_over_other_parameters_and_the_same_buffers(build: Callable[[], Any]) -> None:
    """So the runtime makes the replica of a weight version."""
    model = build()
    chain = capture(double(model), (data(3, 3, 6, 6),))
    stage = chain.stage(1, 3)
    memo: dict[int, Any] = {id(buffer): buffer for buffer in stage.buffers()}
    others = {id(p): nn.Parameter(p.detach() + 1) for p in stage.parameters()}
    twin = copy.deepcopy(stage, memo | others)

    assert {id(p) for p in twin.parameters()} == {id(p) for p in others.values()}
    assert {id(b) for b in twin.buffers()} == {id(b) for b in stage.buffers()}
    received = [data(3, 3, 6, 6)]
    (result,) = twin(received, {})
    result.sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in stage.parameters())


def test_inputs_are_checked_against_the_capture() -> None:
    chain = capture(double(Masked()), {"x": data(3, WIDTH), "scale": 0.5})

    with pytest.raises(CaptureError, match=r"kwargs\['scale'\] was 0.5 .* now 0.25"):
        chain.inputs.bind((), {"x": data(3, WIDTH), "scale": 0.25})
    with pytest.raises(CaptureError, match=r"kwargs\['x'\] has shape \(3, 5\).*\(any, 4\)"):
        chain.inputs.bind((), {"x": data(3, 5), "scale": 0.5})
    with pytest.raises(CaptureError, match="keywords"):
        chain.inputs.bind((), {"x": data(3, WIDTH)})


class Statistics(nn.Module):
    """Writes buffers by an operator that does not declare it, and by a view; one buffer is read only."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "variance", "fixed"):
            self.register_buffer(name, torch.ones(4))
        self.register_buffer("seen", torch.zeros(2, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.mean, self.variance, training=True) * self.fixed
        self.seen[0].add_(x.detach().sum(0))
        for block in self.blocks:
            x = block(x)
        return x


def test_buffers_that_a_traced_layer_may_write_are_known() -> None:
    chain = capture(Statistics(), (torch.randn(3, 4),))

    assert {name for layer in chain.layers for _, name in find_writable(layer.module)} == {"mean", "variance", "seen"}
