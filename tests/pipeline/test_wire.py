"""`wire_dtype=`: a pipeline whose stages send rounded tensors equals the oracle that rounds in the same places."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import PlanError, RowInt8
from penstock.runtime.transport.transport import Channel
from penstock.training.wire_codecs import WireDtype, read_wire_dtype, round_to_wire
from support import models
from support.exports import built_as
from support.jobs.precision_jobs import CAST, CAST_BATCHES, cast_options
from support.training import Case, Outcome, assert_equal, run_pipeline, run_reference, train, train_by_oracle

KINDS: dict[str, WireDtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "rows": RowInt8()}


class Masking(nn.Module):
    """A block that hands on what it was given of integers and booleans."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, kept: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + torch.tanh(self.linear(x)) * kept + places.to(x) / 2**40
        return x, kept.logical_not(), places * 3 + 2**33


class Masked(nn.Module):
    """Floating numbers, integers beyond 32 bits and booleans cross every cut."""

    def __init__(self, width: int = 6, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masking(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept, places = x > 0, (x * 1000).long()
        for block in self.blocks:
            x, kept, places = block(x, kept, places)
        return self.head(x)


def masked() -> nn.Module:
    """The model in float64."""
    torch.manual_seed(3)
    return built_as("masked", Masked().double())


def masked_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator).double(), torch.randint(3, (8,), generator=generator)) for _ in range(3)
    ]


@cache
def reference(case: Case, kind: str) -> Outcome:
    return run_reference(case, wire_dtype=KINDS[kind])


def test_values_that_go_directly_past_stages() -> None:
    """In a large microbatch."""
    case, large = Case("skipping", "1f1b-flush", 8, 4), (torch.zeros(3000, 6, dtype=torch.float64),)

    assert_equal(reference(case, "bfloat16"), run_pipeline(case, wire_dtype=torch.bfloat16, sample=large))


@pytest.mark.parametrize("kind", [torch.bfloat16, RowInt8()], ids=str)
def test_autocast(kind: Any) -> None:
    """Some values are in bfloat16 by themselves, and others are not."""
    for schedule in ("1f1b-flush", "2bw"):
        options = {**cast_options(schedule, 3, 4, torch.bfloat16), "wire_dtype": kind}
        pipe = penstock.Pipeline(CAST["typed"](), **options)

        assert_equal(train_by_oracle(CAST["typed"](), CAST_BATCHES, **options), train(pipe, CAST_BATCHES))


def test_gradients_that_overflow_on_the_way_are_seen() -> None:
    """A scale of the loss for which gradients are infinite in float16, but not in float64."""
    options: dict[str, Any] = {"wire_dtype": torch.float16, "loss_scale": penstock.LossScale(initial=2.0**30)}
    case = Case("perceptron", "1f1b-flush", 3, 4)
    pipe = penstock.Pipeline(case.build(), **case.options, **options)
    for x, y in case.batches:
        pipe.step(x, y)
    expected = run_reference(case, **options)

    assert pipe.skipped_updates > 0
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in pipe.state_dict()["model"].items())


def test_evaluations_and_predictions_round_as_training_does() -> None:
    subject = models.SUBJECTS["perceptron"]
    model = subject.build()
    assert isinstance(model, models.Perceptron)
    pipe = penstock.Pipeline(
        model, subject.sample, F.cross_entropy, models.momentum, stages=4, balance="layers", wire_dtype=RowInt8()
    )
    (x, y), samples = subject.batches[0], len(subject.sample[0])
    x, y = x[:samples], y[:samples]
    codec = read_wire_dtype(RowInt8())
    assert codec is not None
    output = x
    with torch.no_grad():
        for number, layer in enumerate([*model.blocks, model.head]):
            output = layer(round_to_wire(codec, output) if number in (2, 4, 6) else output)

    assert torch.equal(pipe.predict(x), output)
    assert float(pipe.evaluate(x, y).loss) == float(F.cross_entropy(output, y))


def spy_on(pipe: penstock.Pipeline) -> list[torch.Tensor]:
    """The tensors of activations and gradients that ranks of this process send each other, from now on."""
    transport = pipe._engine.transport
    sent, send = [], transport.send

    def note(edge: Any, kind: Any, message: Any) -> None:
        if edge.channel == Channel.STAGES and kind[0] != "specs":
            sent.extend(tensor for tensor in message if tensor is not None)
        send(edge, kind, message)

    setattr(transport, "send", note)  # noqa: B010
    return sent


def test_integers_and_booleans_stay_exact() -> None:
    options: dict[str, Any] = {
        "sample": (torch.zeros(2, 6).double(),),
        "loss_fn": F.cross_entropy,
        "optimizer": models.momentum,
        "plan": penstock.Plan.uniform(6, 3, schedule="1f1b-flush", microbatches=4),
        "wire_dtype": torch.bfloat16,
    }
    expected = penstock.reference_train(masked(), masked_batches(), **options)
    pipe = penstock.Pipeline(masked(), **options)
    sent = spy_on(pipe)
    losses = [float(pipe.step(x, y).loss) for x, y in masked_batches()]

    assert tuple(losses) == expected.losses
    assert {tensor.dtype for tensor in sent} == {torch.bfloat16, torch.bool, torch.int64}


def build(model: nn.Module, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(model, (torch.zeros(2, 4),), F.mse_loss, models.momentum, **options)


def test_a_type_that_makes_nothing_smaller_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"wire_dtype=torch.float32: .*smaller, found .* \(2, 4\) torch.float32: leave"):
        build(model, stages=2, wire_dtype=torch.float32)
    build(model, stages=1, wire_dtype=torch.float32).close()


@pytest.mark.parametrize("kind", [None, *KINDS.values()], ids=str)
def test_the_simulator_counts_the_bytes_that_the_transport_carries(kind: Any) -> None:
    case = Case("skipping", "1f1b-flush", 8, 4)
    x, y = case.batches[0]
    for times in (1, 3000):
        x, y = x.repeat(times, 1), y.repeat(times)
        pipe = penstock.Pipeline(case.build(), **{**case.options, "sample": (x[: len(x) // 4],)}, wire_dtype=kind)
        sent = spy_on(pipe)
        pipe.step(x, y)
        profile = pipe.measure(iterations=1, warmup=1)
        timeline = penstock.simulate(pipe.schedule, profile, penstock.Cluster.uniform(8, 1e9))
        sends = [span.size_bytes or 0.0 for span in timeline.spans if "S" in span.action]

        assert sum(sends) == sum(tensor.nbytes for tensor in sent) > 0
        assert bool(pipe.schedule.skips) is (times > 1)


def test_the_automatic_plan_knows_what_links_carry() -> None:
    subject = models.SUBJECTS["perceptron"]
    pipe = penstock.Pipeline(
        subject.build(), subject.sample, F.cross_entropy, models.momentum, plan="auto", stages=2, wire_dtype=RowInt8()
    )

    assert pipe.auto_plan is not None
    assert {layer.wire_bytes for layer in pipe.auto_plan.profile.layers[:-1]} == {len(subject.sample[0]) * (6 + 2)}
    assert "Links carry" in pipe.auto_plan.plan.explain()
