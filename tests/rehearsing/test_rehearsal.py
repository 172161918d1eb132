"""What a rehearsal compares, what it says, and that it changes nothing."""

import copy
import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError, RehearsalError
from penstock.rehearsing import Rehearsal
from support.found_inputs import Block, Chain, contrastive, dice, penalty, rows
from support.models import momentum
from support.random_models import WIDTH, DrawnModel, drawn_models


def rehearse_in_processes() -> tuple[str, str]:
    """What a rehearsal says of an equal training, and of a loss that reads the weights of all stages."""
    torch.manual_seed(0)
    x, t = rows(8, 8), rows(8, 8)
    found = penstock.rehearse(
        Chain(), [(x, t)] * 2, sample=(x[:2],), loss_fn=F.mse_loss, optimizer=torch.optim.Adam, microbatches=4
    )
    try:
        penstock.rehearse(lambda: penalty(2, "1f1b-flush"))
    except penstock.PenstockError as error:
        return str(found), str(error)
    return str(found), ""


def arguments(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x, t = rows(8, 8), rows(8, 8)
    given = {"model": Chain(), "batches": [(x, t), (t, x), (x, t)], "sample": (x[:2],), "loss_fn": F.mse_loss}
    return {**given, "optimizer": torch.optim.Adam, "microbatches": 4, **changes}


def rehearsed(**changes: Any) -> Rehearsal:
    return penstock.rehearse(**arguments(**changes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "zb-h1", "interleaved", "2bw", "pipedream"])
def test_equal_trainings_are_equal(schedule: str) -> None:
    found = rehearsed(
        schedule=schedule,
        clip_grad_norm=None if schedule == "pipedream" else 0.5,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )

    assert found.steps == 3
    assert found.dtype == "float64"
    assert found.difference is None
    assert [one.after for one in found.comparisons[:2]] == ["your loop again", "the pipeline"]
    assert (found.comparisons[-1].after == "the pipeline as given") == (schedule in ("2bw", "pipedream"))
    assert "not judged: several processes" in str(found)


def test_options_with_numbers_of_their_own_are_judged_beside_the_oracle() -> None:
    found = rehearsed(wire_dtype=torch.bfloat16, update_hooks=[penstock.WeightAverage(0.9)])

    assert [(one.before, one.largest) for one in found.comparisons][-1] == ("reference_train", 0.0)


def test_rounding_is_no_difference() -> None:
    # A bias before a normalization has a gradient of zero but for rounding, by which Adam divides.
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]
    batches = [(x.float(), t.float()) for x, t in arguments()["batches"]]
    model = nn.Sequential(*layers, nn.Softmax(1))
    model.requires_grad_(True)

    assert rehearsed(model=model, batches=batches, sample=(batches[0][0][:2],)).difference is None


class OnlyFloat32(Block):
    """A block that computes in float32, and refuses anything else."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return super().forward(x)


def test_a_model_of_float32_is_judged_by_its_own_rounding() -> None:
    batches = [(x.float(), t.float()) for x, t in arguments()["batches"]]
    given = {"model": Chain(OnlyFloat32).float(), "batches": batches, "sample": (batches[0][0][:2],)}
    found = rehearsed(**given)

    assert found.dtype == "float32"
    assert found.difference is None
    with pytest.raises(RehearsalError, match="the loss is no mean over samples"):
        rehearsed(**given, loss_fn=dice)


def test_dropout_is_left_out_and_other_random_numbers_are_drawn_alike() -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    dropped = rehearsed(model=nn.Sequential(Block(), nn.Dropout(0.5), Block(), nn.Dropout(0.5)))
    noisy = rehearsed(model=Chain(Noisy))

    assert "not judged: dropout, switched off" in str(dropped)
    assert "not judged: the whole batch at once, since the model draws random numbers" in str(noisy)
    assert [(one.before, one.after) for one in noisy.comparisons[1:]] == [
        ("your loop in microbatches", "one stage without a seed"),
        ("one stage", "the pipeline"),
    ]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        # Steep, so that rounding grows.
        return torch.tanh(10 * self.linear(x.to(torch.complex128)))


def test_the_rounding_of_complex_weights_is_measured() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output.abs() - target).square().mean()

    assert rehearsed(model=Chain(Complex), loss_fn=loss_fn).difference is None


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer, and does not call ``super().__init__()``."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_without_hooks_is_judged_by_its_weights() -> None:
    assert rehearsed(optimizer=Wrapping).difference is None


class Branching(Block):
    """A block whose way `torch.cond` chooses."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y / 2, (y,))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_with_torch_cond_is_judged() -> None:
    model, batches = nn.Sequential(Block(), Branching(), Branching(), Block()), arguments()["batches"][:2]

    assert rehearsed(model=model, batches=batches, microbatches=1).difference is None


class Graph(Chain):
    """Adds to each node what the nodes before it have, by a list of edges."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x).index_add(0, edges[1], x[edges[0]])
        return x


def test_an_input_that_must_not_be_cut_is_a_likely_cause() -> None:
    x, edges = rows(8, 8), torch.arange(16).reshape(2, 8) % 8
    with pytest.raises(PenstockError, match=r"your loop trains. Likely cause: an input that must not be cut"):
        rehearsed(model=Graph(), batches=[((x, edges), x)], sample=(x, edges))


def test_state_that_every_forward_updates_is_a_likely_cause() -> None:
    model = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8).double()) for _ in range(3)))
    with pytest.raises(RehearsalError, match=r"or on state that every forward updates \(spectral_norm\)"):
        rehearsed(model=model)


def test_nothing_of_the_user_is_changed() -> None:
    given = arguments()
    model = given["model"]
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    states = random.getstate(), list(numpy.random.get_state(legacy=False)["state"]["key"]), torch.get_rng_state()

    penstock.rehearse(**given)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == states[0]
    assert list(numpy.random.get_state(legacy=False)["state"]["key"]) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(
    ("loss_fn", "target", "cause"),
    [
        (contrastive, rows(8, 8), "the loss is no mean over samples"),
        (dice, rows(8, 8), "the loss is no mean over samples"),
        (lambda o, t: F.cross_entropy(o, t), torch.tensor([1, -100, 2, -100, -100, 3, 4, 5]), "loss_weight="),
    ],
)
def test_losses_that_are_no_mean_over_samples(loss_fn: Any, target: Tensor, cause: str) -> None:
    x = rows(8, 8)
    with pytest.raises(
        RehearsalError, match="the numbers of your loop in microbatches are not those of your loop"
    ) as raised:
        rehearsed(loss_fn=loss_fn, batches=[(x, target)])
    found = raised.value.rehearsal

    assert isinstance(found, Rehearsal)
    assert cause in found.cause
    assert found.difference is not None
    assert (found.difference.step, found.difference.kind) == (0, "loss")
    # The other steps of the way are as they should be.
    assert [one.after for one in found.comparisons if one.difference] == ["your loop in microbatches"]
    # A loop that is cut in the same way has the same numbers, and so has the right weight.
    assert rehearsed(loss_fn=loss_fn, batches=[(x, target)], accumulation=True).difference is None


def test_a_metric_that_is_no_mean_is_named() -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        found = F.mse_loss(output, target)
        return found, {"perplexity": found.exp(), "error": (output - target).abs().mean()}

    with pytest.raises(RehearsalError, match="First the metric perplexity in step 0") as raised:
        rehearsed(loss_fn=loss)
    assert "the metric is no mean over samples" in str(raised.value)


@settings(max_examples=12, deadline=None)
@given(drawn_models())
def test_models_of_random_habits_train_equal_or_are_refused(model: DrawnModel) -> None:
    torch.manual_seed(0)
    batches = [tuple(rows(2, 8, WIDTH)) for _ in range(2)]
    try:
        found = rehearsed(
            model=model.make, batches=batches, sample=(batches[0][0][:2],), optimizer=momentum, accumulation=True
        )
    except PenstockError as error:
        assert not isinstance(error, RehearsalError)
    else:
        assert found.difference is None


def test_the_right_weight_of_microbatches_makes_trainings_equal() -> None:
    target = torch.tensor([1, -100, 2, -100, 5, 3, 4, 5])

    assert rehearsed(
        loss_fn=nn.CrossEntropyLoss(), batches=[(rows(8, 8), target)], loss_weight=lambda t: (t != -100).sum()
    )


def test_batch_normalization_is_named() -> None:
    model = nn.Sequential(Block(), nn.BatchNorm1d(8), Block(), Block())

    with pytest.raises(RehearsalError, match="likely cause: BatchNorm"):
        rehearsed(model=model)
    assert rehearsed(model=model, accumulation=True).difference is None


def test_state_that_copies_share_is_found() -> None:
    calls = []

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) / len(calls)

    with pytest.raises(RehearsalError, match="the numbers of your loop again are not those of your loop") as raised:
        rehearsed(model=Chain(Counts))
    assert "Pass a function that makes the model" in str(raised.value)
    with pytest.raises(RehearsalError, match="does not make it new every time"):
        rehearsed(model=lambda: Chain(Counts))


def penalized() -> dict[str, Any]:
    given = arguments(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model = given["model"]
    return {**given, "loss_fn": lambda o, t: F.mse_loss(o, t) + 0.1 * sum(p.square().sum() for p in model.parameters())}


def test_a_loss_that_reads_the_model_needs_a_function_that_makes_both() -> None:
    with pytest.raises(PenstockError, match="pass a function that makes model and loss_fn"):
        penstock.rehearse(**penalized())

    with pytest.raises(PenstockError, match=r"loss_fn .* depends on the parameter blocks\.1"):
        penstock.rehearse(penalized)


def test_batches_that_the_user_cuts_have_no_whole() -> None:
    x, t = rows(6, 8), rows(6, 8)
    cut = penstock.Microbatches([x[:2], x[2:]], [t[:2], t[2:]])

    assert rehearsed(batches=[cut], microbatches=2).comparisons[0].before == "your loop in microbatches"


def test_a_model_that_computes_its_loss() -> None:
    class WithLoss(Chain):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return {"loss": F.mse_loss(out, labels), "out": out}

    x, t = rows(8, 8), rows(8, 8)
    found = rehearsed(
        model=WithLoss(),
        sample={"x": x[:2], "labels": t[:2]},
        batches=[{"x": x, "labels": t}],
        loss_fn=penstock.model_loss,
    )

    assert found.difference is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batches": []}, "at least one batch"),
        ({"batches": [5]}, "expected pairs"),
        ({"batches": None}, "expected batches"),
        ({"steps": 0}, "steps"),
        ({"learning_rate": 1}, "learning_rate="),
        ({"model": lambda: {"model": Chain(), "microbatch": 2}}, "microbatch="),
        ({"model": nn.Linear}, "call it to make one"),
        ({"loss_fn": lambda o, t: F.mse_loss(o, t) / 0}, "found inf in the first step of your own loop"),
        ({"loss_fn": lambda o, t: o.nothing}, "your loop fails with AttributeError.*correct it first"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        rehearsed(**changes)


def test_refusals_of_the_pipeline_are_its_own() -> None:
    with pytest.raises(penstock.PlanError):
        rehearsed(stages=50)


def test_two_processes(pool: Any) -> None:
    equal, penalty = zip(*pool.run(2, rehearse_in_processes), strict=True)

    assert len(set(equal)) == 1
    assert "your loop, the pipeline" in equal[0]
    assert "several processes" not in equal[0]
    # The loss does not read the weights of another process, nor does its gradient come there.
    assert all("its newest numbers are in another process" in text for text in penalty)
