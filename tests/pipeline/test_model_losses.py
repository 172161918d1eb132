"""Losses that the model computes from labels among its inputs: the numbers of one device, or an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from support import models
from support.jobs import loss_weight_jobs
from support.jobs.loss_weight_jobs import replicate
from support.jobs.transformer_jobs import SUBJECTS
from support.processes import Pool
from support.training import Outcome, assert_equal, train_by_loop, train_by_oracle
from support.training import train as train_on_pairs

FLOAT32 = 1e-5
"""Transformers computes losses in float32, whatever the type of the model, and so their gradients."""


VOCABULARY = 50
IGNORED = -100


def build() -> Any:
    """A Llama of two blocks."""
    return SUBJECTS["llama-padded"].build()


def labelled(samples: int, length: int, seed: int, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Padded sentences with their labels; the first words of each are a prompt, which is not learned."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (samples, length), generator=generator)
    if lengths is None:
        lengths = torch.randint(4, length + 1, (samples,), generator=generator)
    position = torch.arange(length)
    prompts = torch.randint(0, 3, (samples, 1), generator=generator)
    mask = position < lengths[:, None]
    labels = words.masked_fill(~mask | (position < prompts), IGNORED)
    return {"input_ids": words, "attention_mask": mask.long(), "labels": labels}


SENTENCES = [labelled(7, 8, seed) for seed in range(3)]
"""Batches of a step, padded to one length."""
PADDED = [
    penstock.Microbatches([labelled(3, 5, seed), labelled(2, 9, seed + 10), labelled(2, 7, seed + 20)])
    for seed in range(3)
]
"""Batches whose microbatches are padded each to its own length."""


def labelled_options(schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "sample": labelled(2, 8, 99),
        "loss_fn": penstock.model_loss,
        "loss_weight": penstock.token_count("labels", shifted=True),
        "optimizer": models.momentum,
        "schedule": schedule,
        "stages": 2,
        "microbatches": 3,
        **more,
    }


BATCHES = [
    penstock.Microbatches(*zip(*((x[:size, :length], y[:size, :length]) for size, length in shapes), strict=True))
    for (x, y), shapes in zip(
        loss_weight_jobs.BATCHES, [((4, 3), (2, 6), (4, 4)), ((4, 6), (4, 5), (4, 2))], strict=False
    )
]
"""Microbatches of different lengths with targets."""


def ragged_options(schedule: str, **more: Any) -> dict[str, Any]:
    return loss_weight_jobs.weighted_options(schedule, 3, 3, **more)


def train(make: Callable[[], Any], batches: list[Any], options: dict[str, Any]) -> Outcome:
    """The run by `Pipeline`, with an evaluation of the first batch."""
    pipe = penstock.Pipeline(make(), **options)
    return train_on_pairs(pipe, [(batch, None) for batch in batches], evaluates=True)


def oracle(make: Callable[[], Any], batches: list[Any], options: dict[str, Any]) -> Outcome:
    return train_by_oracle(make(), [(batch, None) for batch in batches], **options)


def run_labelled(schedule: str, padded: bool) -> Outcome:
    """A Llama with labels, whose microbatches have one length or lengths of their own."""
    return train(build, PADDED if padded else SENTENCES, labelled_options(schedule))


def refuse_uneven_labels() -> str:
    """The error that a process meets if nothing weighs microbatches with other numbers of labels."""
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None, timeout_seconds=60.0))
    try:
        pipe.step(SENTENCES[0])
        pipe.drain()
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_ragged(schedule: str) -> Outcome:
    """A model without labels, whose microbatches have different lengths."""
    return train(loss_weight_jobs.build, BATCHES, ragged_options(schedule))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream"])
def test_the_pipeline_equals_the_oracle(schedule: str) -> None:
    options = labelled_options(schedule)

    assert_equal(oracle(build, SENTENCES, options), train(build, SENTENCES, options))


@pytest.mark.parametrize("split", [False, True])
def test_replicas_weigh_what_they_have(split: bool) -> None:
    options = replicate(labelled_options("1f1b-flush"), 4, split)
    # Replicas that split a microbatch have at least a sample each.
    batches = [labelled(9, 8, seed) for seed in range(2)]

    assert_equal(oracle(build, batches, options), train(build, batches, options))


def plainly(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor], float]:
    """The losses of the whole batches, as their users write it, the final weights, and an evaluation."""
    found = train_by_loop(model, [(batch, None) for batch in batches], lambda output, _: output.loss, models.momentum)
    with torch.no_grad():
        return list(found.losses), model.state_dict(), model.eval()(**batches[0]).loss.item()


def test_the_numbers_are_those_of_the_whole_batch_on_one_device() -> None:
    losses, state, evaluated = plainly(build(), SENTENCES)
    found = train(build, SENTENCES, labelled_options("1f1b-flush"))
    # Counts other labels than the model does.
    other = train(build, SENTENCES, labelled_options("1f1b-flush", loss_weight=lambda batch: len(batch["labels"])))

    assert found.losses == pytest.approx(losses, rel=FLOAT32)
    assert found.evaluated == pytest.approx(evaluated, rel=FLOAT32)
    torch.testing.assert_close(found.state, state, rtol=1e-4, atol=1e-6)
    assert other.losses != pytest.approx(losses, rel=100 * FLOAT32)


def test_labels_that_are_not_shifted() -> None:
    subject = SUBJECTS["bert"]
    batches = []
    for seed, (inputs, target) in enumerate(subject.batches):
        kept = torch.rand(target.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
        batches.append({**inputs, "labels": target.masked_fill(~kept, -100)})
    losses, *_ = plainly(subject.build(), batches)
    sample = {name: tensor[:2] for name, tensor in batches[0].items()}
    options = labelled_options("1f1b-flush", sample=sample, loss_weight=penstock.token_count("labels", shifted=False))

    assert train(subject.build, batches, options).losses == pytest.approx(losses, rel=FLOAT32)


def test_uneven_labels_without_a_weight_are_refused() -> None:
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None))
    before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    for batch in (SENTENCES[0], transformers.BatchEncoding(SENTENCES[0])):
        with pytest.raises(penstock.PenstockError, match=r"penstock\.token_count\('labels', shifted=True\)"):
            pipe.step(batch)
    # As many in every microbatch, but the first ones of a sequence may not count.
    batch = labelled(3, 6, 0, torch.tensor([6, 6, 6]))
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, 0] = batch["labels"][1, 1] = batch["labels"][2, 2] = -100
    with pytest.raises(penstock.PenstockError, match="which do not count"):
        pipe.step(batch)
    with pytest.raises(penstock.PenstockError, match="which do not count"):
        pipe.evaluate(SENTENCES[0])

    torch.testing.assert_close(pipe.state_dict()["model"], before, rtol=0, atol=0)


def test_uneven_labels_end_every_process(pool: Pool) -> None:
    """The last stage reads the labels, and the other processes must not wait for it."""
    first, last = pool.run(2, refuse_uneven_labels)

    assert "penstock.token_count" in last
    assert first.startswith("TransportError")
    assert "penstock.token_count" in first


def test_even_labels_need_no_weight() -> None:
    lengths = torch.full((6,), 8)
    batches = [{**(made := labelled(6, 8, seed, lengths)), "labels": made["input_ids"]} for seed in range(2)]
    losses, *_ = plainly(build(), batches)
    found = train(build, batches, labelled_options("1f1b-flush", loss_weight=None))

    assert found.losses == pytest.approx(losses, rel=FLOAT32)


class Classifier(nn.Module):
    """Computes its loss from one label of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def test_one_label_of_each_sample() -> None:
    torch.manual_seed(0)
    model, batch = Classifier(), {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4}
    expected = model(**batch)["loss"].item()
    pipe = penstock.Pipeline(
        model,
        sample={name: value[:2] for name, value in batch.items()},
        loss_fn=penstock.model_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=3,
    )

    assert float(pipe.step(batch).loss) == pytest.approx(expected, rel=FLOAT32)
    batch["labels"][0] = IGNORED
    with pytest.raises(penstock.PenstockError, match=r"hold \[1, 0, 0\] labels of -100 in kwargs"):
        pipe.step(batch)


def test_a_microbatch_without_labels_that_count_is_refused() -> None:
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush"))
    batch = {**SENTENCES[0], "labels": SENTENCES[0]["labels"].clone()}
    batch["labels"][:3] = -100
    with pytest.raises(penstock.PenstockError, match="nothing in it counts"):
        pipe.step(batch)


def test_a_target_beside_the_labels_is_refused() -> None:
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush"))
    with pytest.raises(penstock.PenstockError, match="takes no target"):
        pipe.step(SENTENCES[0], SENTENCES[0]["labels"])


def test_a_model_without_a_loss_is_refused() -> None:
    sample = {"input_ids": SENTENCES[0]["input_ids"][:2]}
    with pytest.raises(penstock.PenstockError, match="CausalLMOutputWithPast, has no loss"):
        penstock.Pipeline(build(), **labelled_options("1f1b-flush", sample=sample))


class Own(nn.Module):
    """Returns its loss in one of the forms that models use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        loss = (x - y).square().mean()
        return {"scalar": loss, "tuple": (loss, x), "dict": {"output": x, "loss": loss}}[self.form]


@pytest.mark.parametrize("form", ["scalar", "tuple", "dict"])
def test_every_form_of_an_output(form: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Own(form).double()

    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    expected = make()
    loss = penstock.model_loss(expected(*batch))
    options = labelled_options("1f1b-flush", sample=tuple(t[:2] for t in batch), loss_weight=None)
    found = train(make, [batch, batch], options)

    assert found.losses[0] == pytest.approx(loss.item(), rel=1e-12)
    assert found.losses[1] < found.losses[0]


class Routed(nn.Module):
    """Experts in every block, and a loss that asks all their routers to use the experts evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        chosen = []
        for block in self.blocks:
            x, logits = block(x)
            chosen.append(logits)
        balance = torch.cat(chosen).softmax(-1).mean(0).square().sum()
        return {"loss": (self.head(x) - y).square().mean() + 0.5 * balance, "balance": balance}


class RoutedBlock(nn.Module):
    """Sends each sample to one of two experts, in a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, result = logits.softmax(-1), x.clone()
        for index, expert in enumerate(self.experts):
            rows = (logits.argmax(-1) == index).nonzero().flatten()
            if len(rows):
                result[rows] = result[rows] + weights[rows, index, None] * expert(x[rows])
        return result, logits


@pytest.mark.parametrize("stages", [1, 3])
def test_losses_of_routers_in_all_stages(stages: int) -> None:
    """As in a plain loop, which accumulates the gradients of the same microbatches."""
    torch.manual_seed(4)
    start = Routed().double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    expected = train_by_loop(
        copy.deepcopy(start), [(batch, None)] * 2, lambda output, _: output["loss"], models.momentum, 3
    )
    options = labelled_options("1f1b-flush", sample=tuple(t[:2] for t in batch), loss_weight=None, stages=stages)
    found = train(lambda: copy.deepcopy(start), [batch, batch], options)

    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-12, atol=1e-14)
    gradients = {name for name, tensor in found.state.items() if not torch.equal(tensor, start.state_dict()[name])}
    assert {f"blocks.{index}.router.weight" for index in range(4)} <= gradients


def test_router_losses_that_hooks_collect_are_refused() -> None:
    """Transformers collects the logits of routers by hooks inside of blocks, which no block returns."""
    config = transformers.MixtralConfig(  # type: ignore[call-arg]
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True, experts_implementation="eager",
    )  # fmt: skip
    sample = {name: SENTENCES[0][name][:2] for name in ("input_ids", "labels")}
    with pytest.raises(penstock.CaptureError, match="MixtralForCausalLM cannot be traced"):
        penstock.Pipeline(transformers.MixtralForCausalLM(config), **labelled_options("1f1b-flush", sample=sample))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream", "zb-h1"])
def test_lengths_that_differ_equal_the_oracle(schedule: str) -> None:
    options = ragged_options(schedule)

    assert_equal(oracle(loss_weight_jobs.build, BATCHES, options), run_ragged(schedule))


def test_in_three_processes(pool: Pool) -> None:
    expected = run_ragged("1f1b-flush")
    for outcome in pool.run(3, run_ragged, "1f1b-flush"):
        assert_equal(expected, outcome)
        assert outcome.evaluated == expected.evaluated


def test_sentences_with_labels_in_two_processes(pool: Pool) -> None:
    expected = oracle(build, PADDED, labelled_options("1f1b-flush"))
    for outcome in pool.run(2, run_labelled, "1f1b-flush", True):
        assert_equal(expected, outcome)


def test_the_padding_of_one_batch_changes_nothing() -> None:
    """The same sentences, padded to one length and to a length of each microbatch."""
    microbatches = PADDED[0].inputs
    longest = max(batch["input_ids"].shape[1] for batch in microbatches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def padded(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            name: torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1]), value=fill[name])
            for name, tensor in batch.items()
        }

    whole = {name: torch.cat([padded(batch)[name] for batch in microbatches]) for name in fill}
    options = labelled_options("1f1b-flush")
    ragged, even = (train(build, [batch], options) for batch in (PADDED[0], whole))

    # Losses in float32, and sums in another order.
    assert ragged.losses == pytest.approx(even.losses, rel=1e-5)
    torch.testing.assert_close(ragged.state, even.state, rtol=1e-4, atol=1e-6)


def refused(microbatches: penstock.Microbatches, target: Any = None, **options: Any) -> str:
    pipe = penstock.Pipeline(loss_weight_jobs.build(), **{**ragged_options("1f1b-flush"), **options})
    with pytest.raises(penstock.PenstockError) as error:
        pipe.step(microbatches, target)
    return str(error.value)


def test_lengths_that_differ_need_a_weight() -> None:
    assert "pass loss_weight=lambda target: (target != -100).sum()" in refused(BATCHES[0], loss_weight=None)
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None))
    with pytest.raises(penstock.PenstockError, match=r"pass loss_weight=penstock\.token_count"):
        pipe.step(PADDED[0])


def test_microbatches_without_their_targets_are_refused() -> None:
    inputs, targets = BATCHES[0]
    assert targets is not None

    assert "3 inputs and 2 targets" in refused(penstock.Microbatches(inputs, targets[:2]))
    assert "a target beside it" in refused(BATCHES[0], targets[0])


def test_a_prediction_takes_one_batch() -> None:
    pipe = penstock.Pipeline(loss_weight_jobs.build(), **ragged_options("1f1b-flush"))
    with pytest.raises(penstock.PenstockError, match="predict takes one batch"):
        pipe.predict(BATCHES[0])


def test_prefetching_keeps_the_microbatches() -> None:
    (found,) = penstock.prefetch([BATCHES[0]], "cpu")

    assert isinstance(found, penstock.Microbatches)
    assert [x.shape for x in found.inputs] == [x.shape for x in BATCHES[0].inputs]
    assert all(x.is_meta for x in penstock.shapes_of(BATCHES[0]).inputs)
