"""Whatever a model takes and returns, it trains in stages, with the numbers of the oracle.

The captured sample has 3 samples of length 5; hardly any batch here has either.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.paths import ROOT
from support.processes import Pool

SIZES = ((10, 5), (7, 8), (3, 3), (12, 16), (10, 5))
"""Samples and lengths: not all divide by 3; one has a sample for each microbatch; shorter, and longer."""
SUBJECT = models.SUBJECTS["perceptron"]


VOCABULARY, WIDTH, BLOCKS = 20, 6, 4
POSITIONS = torch.arange(16)
"""Without a batch dimension: every microbatch needs all of it."""


class Block(nn.Module):
    """Mixes the positions that the mask leaves; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.near = nn.Linear(WIDTH, WIDTH), nn.Embedding(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        hidden = hidden + self.near(positions[: hidden.shape[1]])
        mean = (hidden * mask[:, :, None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        mixed = torch.tanh(self.linear(hidden + mean))
        return hidden + self.norm(mixed.flatten(0, 1)).view_as(mixed)


class Reader(nn.Module):
    """Every block reads the mask and the positions: arguments that a pipeline must bring to all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        positions: Tensor,
        scale: float = 1.0,
        mode: str = "plain",
        extra: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embedding(tokens) * scale
        for block in self.blocks:
            hidden = block(hidden, mask, positions)
        assert mode == "plain" and extra is None
        return self.head(hidden)


@dataclass
class Rest:
    positions: Tensor
    scale: float = 1.0
    note: str | None = None


@dataclass
class Words:
    tokens: Tensor
    mask: Tensor
    rest: Rest


class Trio(NamedTuple):
    tokens: Tensor
    mask: Tensor
    positions: Tensor


@dataclass
class Answer:
    logits: Tensor
    length: int
    extra: Tensor | None = None


class OfDict(Reader):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        mask, (positions,) = batch["rest"]
        return {"logits": super().forward(batch["tokens"], mask, positions), "kind": "words", "none": None}


class OfDataclass(Reader):
    def forward(self, words: Words) -> Answer:
        return Answer(super().forward(words.tokens, words.mask, words.rest.positions, words.rest.scale), 7)


class OfTuple(Reader):
    def forward(self, trio: Trio) -> tuple[Tensor, list[Tensor]]:
        logits = super().forward(*trio)
        return logits, [logits.mean(), trio.positions]


@dataclass(frozen=True)
class Way:
    """One way to pass the inputs and to get the logits."""

    kind: Callable[[], nn.Module]
    sample: Callable[[Tensor, Tensor], Any]
    logits: Callable[[Any], Tensor]
    batch: Callable[[Tensor, Tensor], Any] | None = None
    """None if it is as the sample."""

    def loss_fn(self, output: Any, target: Tensor) -> Tensor:
        """Mean over the samples."""
        return F.cross_entropy(self.logits(output).flatten(0, 1), target.flatten())

    def inputs(self, tokens: Tensor, mask: Tensor) -> Any:
        return (self.batch or self.sample)(tokens, mask)


def _same(output: Any) -> Any:
    return output


PLAIN = Way(Reader, lambda t, m: (t, m, POSITIONS), _same)
WAYS = {
    "arguments": PLAIN,
    "list": Way(Reader, lambda t, m: (t, m, POSITIONS), _same, lambda t, m: [t, m, POSITIONS]),
    "keywords": Way(
        Reader,
        lambda t, m: {"tokens": t, "mask": m, "positions": POSITIONS, "scale": 1.0, "mode": "plain", "extra": None},
        _same,
    ),
    "one dict": Way(
        OfDict,
        lambda t, m: ({"tokens": t, "rest": (m, [POSITIONS])},),
        lambda output: output["logits"],
        lambda t, m: {"tokens": t, "rest": (m, [POSITIONS])},
    ),
    "one dataclass": Way(OfDataclass, lambda t, m: Words(t, m, Rest(POSITIONS)), lambda output: output.logits),
    "one named tuple": Way(
        OfTuple, lambda t, m: (Trio(t, m, POSITIONS),), lambda output: output[0], lambda t, m: Trio(t, m, POSITIONS)
    ),
}


def build(way: Way) -> nn.Module:
    """The same weights for every way."""
    torch.manual_seed(0)
    return way.kind().double()


def draw(samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask (every sample of another length) and a target."""
    generator = torch.Generator().manual_seed(samples * 100 + length)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    mask = (torch.arange(length) < 2 + torch.arange(samples)[:, None] % (length - 1)).double()
    return tokens, mask, torch.randint(0, VOCABULARY, (samples, length), generator=generator)


def run_steps(
    way: Way, sizes: Sequence[tuple[int, int]], **options: Any
) -> tuple[list[float], dict[str, Tensor], penstock.Pipeline]:
    """Losses and state after steps on batches of (samples, length), and the pipeline; captured with 3 samples of 5."""
    tokens, mask, _ = draw(3, 5)
    pipe = penstock.Pipeline(
        build(way), way.sample(tokens, mask), loss_fn=way.loss_fn, optimizer=models.momentum, **options
    )
    losses = []
    for size in sizes:
        tokens, mask, target = draw(*size)
        losses.append(pipe.step(way.inputs(tokens, mask), target).loss)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    return [float(loss) for loss in losses], state, pipe


def train_and_look(
    way: str, schedule: str, sizes: Sequence[tuple[int, int]], stages: int | None = None
) -> dict[str, Any]:
    """What this rank sees of a training and, before and after it, of evaluations and predictions of other sizes."""
    chosen = WAYS[way]
    losses, state, pipe = run_steps(chosen, [], schedule=schedule, microbatches=3, stages=stages)
    seen: dict[str, Any] = {"before": _look(pipe, chosen)}
    for size in sizes:
        tokens, mask, target = draw(*size)
        losses.append(float(pipe.step(chosen.inputs(tokens, mask), target).loss))
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    seen |= {"losses": losses, "state": state, "after": _look(pipe, chosen)}
    pipe.close()
    return seen


def _look(pipe: penstock.Pipeline, way: Way) -> list[tuple[float, Tensor]]:
    looks = []
    for size in ((1, 4), (2, 3), (7, 9)):
        tokens, mask, target = draw(*size)
        inputs = way.inputs(tokens, mask)
        looks.append((float(pipe.evaluate(inputs, target).loss), way.logits(pipe.predict(inputs))))
    return looks


@cache
def reference(schedule: str, sizes: tuple[tuple[int, int], ...] = SIZES) -> Any:
    """The oracle's numbers for the plain way; all others must have the same."""
    drawn = [draw(*size) for size in sizes]
    return penstock.reference_train(
        build(PLAIN),
        [(PLAIN.sample(tokens, mask), target) for tokens, mask, target in drawn],
        sample=PLAIN.sample(*draw(3, 5)[:2]),
        loss_fn=PLAIN.loss_fn,
        optimizer=models.momentum,
        schedule=schedule,
        stages=3,
        microbatches=3,
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_pass_inputs_and_every_length(way: str) -> None:
    losses, state, pipe = run_steps(WAYS[way], SIZES, schedule="2bw", stages=3, microbatches=3)
    expected = reference("2bw")

    assert tuple(losses) == expected.losses
    assert state.keys() == expected.state.keys()
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())
    # Mask and positions are each rank's own; only hidden states cross.
    assert [len(pipe._chain.cut(index)) for index in range(1, 6)] == [1] * 5


def test_lengths_change_in_several_processes_too(pool: Pool) -> None:
    alone = train_and_look("one dataclass", "2bw", SIZES, stages=3)
    expected = reference("2bw")

    assert tuple(alone["losses"]) == expected.losses
    for seen in pool.run(3, train_and_look, "one dataclass", "2bw", SIZES):
        assert seen["losses"] == alone["losses"]
        assert all(torch.equal(tensor, expected.state[name]) for name, tensor in seen["state"].items())
        for when in ("before", "after"):
            for (loss, logits), (own_loss, own_logits) in zip(seen[when], alone[when], strict=True):
                assert loss == own_loss
                assert torch.equal(logits, own_logits)


@pytest.mark.parametrize("way", ["keywords", "one named tuple"])
def test_predictions_before_training_are_the_models_own(way: str) -> None:
    chosen, model = WAYS[way], build(PLAIN).eval()
    _, _, pipe = run_steps(chosen, (), stages=2, microbatches=8)
    for size in ((1, 2), (2, 16), (3, 5), (11, 7)):
        tokens, mask, target = draw(*size)
        inputs = chosen.inputs(tokens, mask)
        output, whole = pipe.predict(inputs), model(tokens, mask, POSITIONS)

        torch.testing.assert_close(chosen.logits(output), whole, rtol=0, atol=1e-12)
        assert float(pipe.evaluate(inputs, target).loss) == pytest.approx(
            PLAIN.loss_fn(whole, target).item(), rel=1e-12
        )


def test_what_a_model_returns_comes_back_as_it_is() -> None:
    tokens, mask, _ = draw(2, 5)
    _, _, pipe = run_steps(WAYS["one dict"], (), stages=2)
    output = pipe.predict(WAYS["one dict"].inputs(tokens, mask))

    assert (list(output), output["kind"], output["none"]) == (["logits", "kind", "none"], "words", None)
    _, _, pipe = run_steps(WAYS["one dataclass"], (), stages=2)
    answer = pipe.predict(WAYS["one dataclass"].inputs(tokens, mask))

    assert (type(answer).__name__, answer.length, answer.extra) == ("Answer", 7, None)


def test_lengths_that_must_agree_are_named() -> None:
    tokens, mask, target = draw(6, 5)
    _, _, pipe = run_steps(PLAIN, (), stages=2)
    with pytest.raises(penstock.CaptureError) as caught:
        pipe.step((tokens, mask[:, :4], POSITIONS), target)

    assert "equal sizes only" in str(caught.value)
    assert "{'dimension 1 of args[0]': 5, 'dimension 1 of args[1]': 4}" in str(caught.value)
    assert pipe.step((tokens, mask, POSITIONS), target).loss.item() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 2.0}, r"kwargs\['scale'\] was 1.0 when the model was captured and is now 2.0"),
        ({"extra": POSITIONS}, r"kwargs\['extra'\] was None .* now a tensor of shape \(16,\)"),
        ({"mask": None}, r"kwargs\['mask'\]: expected a tensor, as in sample=, found None"),
        ({"mask": torch.ones(4, 5).double()}, r"disagree on the number of samples .*mask.*: 4"),
        ({"more": 1}, "captured with 0 positional"),
    ],
    ids=str,
)
def test_another_form_than_the_samples_is_refused(change: dict[str, Any], message: str) -> None:
    tokens, mask, target = draw(6, 5)
    _, _, pipe = _keywords()
    with pytest.raises(penstock.PenstockError, match=message):
        pipe.step({**WAYS["keywords"].inputs(tokens, mask), **change}, target)


@cache
def _keywords() -> tuple[Any, Any, penstock.Pipeline]:
    return run_steps(WAYS["keywords"], (), stages=2)


@dataclass
class Task:
    label: Tensor
    weight: Tensor
    options: dict[str, float]


def weighted(output: Tensor, label: Tensor, weight: Tensor, smoothing: float) -> Tensor:
    """A loss of two targets and a constant."""
    losses = F.cross_entropy(output, label, reduction="none", label_smoothing=smoothing)
    return (losses * weight).mean()


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (lambda y, w: (y, w, 0.1), lambda output, target: weighted(output, *target)),
        (
            lambda y, w: {"label": y, "of": {"weight": w, "smoothing": 0.1}},
            lambda output, target: weighted(output, target["label"], **target["of"]),
        ),
        (
            lambda y, w: Task(y, w, {"smoothing": 0.1}),
            lambda output, target: weighted(output, target.label, target.weight, target.options["smoothing"]),
        ),
    ],
    ids=["tuple", "dict", "dataclass"],
)
def test_a_target_of_several(make: Callable[[Tensor, Tensor], Any], loss_fn: Callable[[Any, Any], Tensor]) -> None:
    options = {"sample": SUBJECT.sample, "optimizer": models.momentum, "stages": 2, "microbatches": 3}
    targets = [torch.rand(16, generator=torch.Generator().manual_seed(i)).double() for i in range(len(SUBJECT.batches))]
    batches = [(x, (y, w)) for (x, y), w in zip(SUBJECT.batches, targets, strict=True)]
    expected = penstock.reference_train(
        SUBJECT.build(),
        batches,
        loss_fn=lambda output, target: weighted(output, *target, 0.1),  # type: ignore[call-arg]
        **options,  # type: ignore[call-arg]
    )
    pipe = penstock.Pipeline(SUBJECT.build(), loss_fn=loss_fn, **options)

    assert tuple(float(pipe.step(x, make(y, w)).loss) for x, (y, w) in batches) == expected.losses
    x, (y, w) = batches[0]
    whole = loss_fn(pipe.predict(x), make(y, w)).item()
    assert float(pipe.evaluate(x, make(y, w)).loss) == pytest.approx(whole, rel=1e-12)


def test_a_last_batch_that_is_too_small_says_what_to_do() -> None:
    pipe = penstock.Pipeline(
        SUBJECT.build(), SUBJECT.sample, loss_fn=SUBJECT.loss_fn, optimizer=models.plain, stages=2, microbatches=8
    )
    (x, y), _, *_ = SUBJECT.batches
    pipe.step(x, y)
    with pytest.raises(penstock.PenstockError) as caught:
        pipe.step(x[:5], y[:5])

    assert "a minibatch of 5 sample(s) cannot be cut into 8 microbatches: pass at least 8 samples" in str(caught.value)
    assert "drop_last=True" in str(caught.value)
    assert "microbatches=5 or fewer" in str(caught.value)
    # Nothing was lost: evaluation takes the same batch, and training goes on.
    assert float(pipe.evaluate(x[:5], y[:5]).loss) > 0
    pipe.step(x, y)


def test_evaluations_take_microbatches_as_large_as_those_of_the_steps_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    sizes: list[int] = []
    model[0].register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    x = torch.randn(32, 4, dtype=torch.float64)
    pipe = penstock.Pipeline(model, (x[:2],), F.mse_loss, models.plain, stages=2, microbatches=4)

    def sizes_of(call: Callable[..., object], *arguments: Tensor) -> list[int]:
        sizes.clear()
        call(*arguments)
        return list(sizes)

    assert sizes_of(pipe.evaluate, x[:7], x[:7]) == [2, 2, 2, 1]
    assert sizes_of(pipe.step, x[:30], x[:30]) == [8, 8, 7, 7]
    assert sizes_of(pipe.evaluate, x, x) == [8, 8, 8, 8]
    assert sizes_of(pipe.predict, x[:20]) == [7, 7, 6]
    assert sizes_of(pipe.step, x[:8], x[:8]) == [2, 2, 2, 2]
    assert sizes_of(pipe.evaluate, x, x) == [8, 8, 8, 8]


class FewAtOnce(nn.Module):
    """Its evaluation holds for fewer sizes than its training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.shape[0] > 5:
            x = x * 2
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_an_evaluation_that_holds_for_fewer_sizes_takes_the_size_of_the_sample() -> None:
    model, x = FewAtOnce(), torch.randn(32, 6)
    pipe = penstock.Pipeline(model, (x[:2],), F.mse_loss, models.plain, stages=2, microbatches=4)
    pipe.step(x, x)
    found = pipe.predict(x)
    pipe.close()
    model.eval()

    assert torch.equal(found, torch.cat([model(part) for part in x.split(2)]))


class Crowd(nn.Module):
    """Does something else with four samples or more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.two(hidden.tanh() if x.shape[0] < 4 else hidden)


def test_the_number_of_samples_that_counts_is_a_microbatchs() -> None:
    """The capture is for fewer than 4; of 6 in two microbatches each has 3, of 8 each has 4."""
    pipe = penstock.Pipeline(
        Crowd().double(), SUBJECT.sample, loss_fn=F.cross_entropy, optimizer=models.plain, stages=2, microbatches=2
    )
    (x, y), *_ = SUBJECT.batches
    expected = F.cross_entropy(pipe.predict(x[:6]), y[:6]).item()

    assert float(pipe.step(x[:6], y[:6]).loss) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(penstock.CaptureError, match=r"has 4 sample\(s\) in a microbatch, but the capture holds for at"):
        pipe.step(x[:8], y[:8])


def test_batchnorm_refuses_a_single_sample_as_it_does_without_a_pipeline() -> None:
    """In training, by the Python of BatchNorm itself."""
    subject = models.SUBJECTS["normalized"]
    pipe = penstock.Pipeline(
        subject.build(), subject.sample, loss_fn=F.cross_entropy, optimizer=models.plain, stages=2, microbatches=4
    )
    (x, y), *_ = subject.batches

    assert torch.isfinite(pipe.predict(x[:1])).all()
    with pytest.raises(ValueError, match=r"more than 1 value per channel .*\[1, 6\]"):
        pipe.step(x[:5], y[:5])


def test_the_documentation_runs() -> None:
    text = (ROOT / "docs" / "inputs.md").read_text()
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        exec(block, names)

    assert isinstance(names["pipe"], penstock.Pipeline)


class Switching(nn.Module):
    """Its code looks at the length in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.training or x.shape[1] < 8 else -x


def test_an_evaluation_holds_for_the_sizes_of_its_own_trace() -> None:
    x = torch.randn(2, 5, 6)
    pipe = penstock.Pipeline(Switching(), sample=(x,), loss_fn=F.mse_loss, optimizer=models.momentum, stages=2)

    assert pipe.predict(torch.randn(2, 7, 6)).shape == (2, 7, 6)
    with pytest.raises(penstock.CaptureError, match="the capture holds for"):
        pipe.predict(torch.randn(2, 10, 6))


FIRST, LARGER, SHORTER = (6, 5), (11, 9), (4, 3)
STEPS = (FIRST, LARGER, SHORTER)


@cache
def trained_in(pool: Pool) -> list[dict[str, Any]]:
    """What each of three ranks saw; the model returns a dict and takes one."""
    return pool.run(3, train_and_look, "one dict", "1f1b-flush", STEPS)


def test_evaluation_with_a_smaller_batch_and_a_shorter_sequence_sees_no_stale_rows(pool: Pool) -> None:
    seen = trained_in(pool)
    model = build(PLAIN).eval()
    for when in ("before", "after"):
        if when == "after":
            model.load_state_dict({name: tensor for rank in seen for name, tensor in rank["state"].items()})
        for index, size in enumerate(((1, 4), (2, 3), (7, 9))):
            tokens, mask, target = draw(*size)
            whole = model(tokens, mask, POSITIONS)
            for rank in seen:
                loss, logits = rank[when][index]
                torch.testing.assert_close(logits, whole, rtol=0, atol=1e-12)
                assert loss == pytest.approx(PLAIN.loss_fn(whole, target).item(), rel=1e-12)


def test_there_is_no_forward_beside_those_of_the_training(pool: Pool) -> None:
    counts = [
        int(tensor)
        for rank in trained_in(pool)
        for name, tensor in rank["state"].items()
        if name.endswith("num_batches_tracked")
    ]

    # Of three minibatches three microbatches each; captures, evaluations and predictions count nothing.
    assert counts == [9] * BLOCKS
