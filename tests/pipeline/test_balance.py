"""Where stages begin without a plan: the stage with the most work has as little as possible."""

import logging
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import PlanError
from support import models
from support.own_schedules import OWN
from support.processes import Pool

WIDTH, BLOCKS = 32, 8
TOKENS = torch.arange(64).view(2, 32) % 30


class Repeated(nn.Module):
    """Works as often as its first number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.detach().flatten()[0].abs()) + 1):
            x = x + 0 * self.linear(x)
        return x


def _cut(x: Tensor, balance: Any) -> penstock.Plan:
    torch.manual_seed(0)
    layers = [Repeated(), *(nn.Linear(16, 16) for _ in range(4))]
    with penstock.Pipeline(layers, (x,), nn.functional.mse_loss, models.plain, balance=balance) as pipe:
        return pipe.plan


def cut_by_own_data() -> penstock.Plan:
    """The plan of a model that works more on the sample of rank 1 than on that of rank 0."""
    return _cut(torch.full((2, 16), 60.0 * dist.get_rank()), "work")


def measure_and_cut() -> penstock.Plan:
    """The plan by measured seconds."""
    return _cut(torch.ones(2, 16), "measured")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.narrow(F.relu(self.wide(x))))


def language_model(vocabulary: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(vocabulary, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, vocabulary)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make(vocabulary: int = 30, model: Any = None, **options: Any) -> penstock.Pipeline:
    given = language_model(vocabulary) if model is None else model
    return penstock.Pipeline(given, (TOKENS,), loss_fn, models.plain, **options)


def cuts(pipe: penstock.Pipeline) -> list[int]:
    return [stage.stop for stage in pipe.plan.stages]


def test_a_large_vocabulary_is_a_stage_of_its_own_and_a_small_one_is_not() -> None:
    """By numbers of layers they are cut alike."""
    assert cuts(make(30, stages=2)) == [5, 10]
    assert cuts(make(8000, stages=2)) == [9, 10]
    assert cuts(make(8000, stages=3)) == [4, 9, 10]
    assert cuts(make(8000, stages=3, balance="layers")) == cuts(make(30, stages=3, balance="layers")) == [4, 7, 10]


def test_as_many_stages_as_layers_need_no_choice() -> None:
    assert cuts(make(8000, stages=10)) == list(range(1, 11))
    with pytest.raises(PlanError, match="cannot cut 10 layers into 11 stages"):
        make(8000, stages=11)


class Alone(nn.Module):
    """Computes all with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Deep(nn.Module):
    """Has a list of blocks, which torch.fx loses."""

    def __init__(self, compiles: bool = False) -> None:
        super().__init__()
        for_blocks: Any = partial(torch.compile, backend="eager") if compiles else nn.Sequential
        self.blocks = nn.ModuleList(for_blocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WITHOUT_CUTS: dict[str, Any] = {
    "GraphModule": lambda: torch.fx.symbolic_trace(Deep()),
    "own parameter": Alone,
    "compiled blocks": lambda: Deep(compiles=True),
    "one module": lambda: nn.Linear(4, 4),
    "list of one": lambda: [nn.Linear(4, 4)],
    "Sequential of one": lambda: nn.Sequential(nn.Linear(4, 4)),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", WITHOUT_CUTS)
def test_a_model_without_blocks_says_so(kind: str) -> None:
    model, sample = WITHOUT_CUTS[kind](), (torch.ones(2, 4),)
    two = penstock.Plan.uniform(2, 2)
    for options in ({"stages": 2}, {"stages": 2, "plan": "auto"}, {"plan": two}, {"stages": 2, "schedule": "zb-v"}):
        with pytest.raises(
            PlanError, match=r"expected 1, found 2: the model has no blocks .*torch\.compile hide them.*nn\.ModuleList"
        ):
            penstock.Pipeline(model, sample, F.mse_loss, models.plain, **options)
    with pytest.raises(PlanError, match="the model has no blocks"):
        penstock.reference_train(
            model, [(sample, sample[0])], sample=sample, loss_fn=F.mse_loss, optimizer=models.plain, stages=2
        )
    assert cuts(penstock.Pipeline(model, sample, F.mse_loss, models.plain, stages=1)) == [1]


def test_the_model_before_torch_fx_has_blocks() -> None:
    assert cuts(penstock.Pipeline(Deep(), (torch.ones(2, 4),), F.mse_loss, models.plain, stages=3)) == [1, 2, 3]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "pipedream", OWN["eager"]], ids=str)
def test_every_schedule_has_balanced_stages(schedule: Any) -> None:
    pipe = make(8000, stages=4, schedule=schedule, microbatches=4)

    assert cuts(pipe)[-2:] == [9, 10]
    assert pipe.plan.schedule == schedule


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "interleaved"])
@pytest.mark.parametrize("balance", ["work", "layers"])
def test_the_oracle_cuts_alike(schedule: str, balance: Any) -> None:
    """Under asynchronous schedules the numbers depend on the cut."""
    options = {"schedule": schedule, "microbatches": 4, "stages": 4, "balance": balance}
    x = TOKENS.repeat(4, 1)
    pipe = make(model=[layer.double() for layer in language_model(2000)], **options)
    losses = [float(pipe.step((x,), x).loss) for _ in range(3)]
    pipe.drain()
    expected = penstock.reference_train(
        [layer.double() for layer in language_model(2000)],
        [((x,), x)] * 3,
        sample=(TOKENS,),
        loss_fn=loss_fn,
        optimizer=models.plain,
        **options,
    )

    assert losses == list(expected.losses)
    assert cuts(pipe) == ([3, 6, 9, 10] if balance == "work" else [3, 6, 8, 10])


def test_a_model_without_weights_is_cut_as_one_that_has_them() -> None:
    with torch.device("meta"):
        weightless = language_model(8000)
    pipe = make(model=weightless, stages=4, init_fn=penstock.reset_parameters(weightless))

    assert cuts(pipe) == cuts(make(8000, stages=4))


class Slow(nn.Module):
    """Takes long, which no operator shows."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return x * 1


def test_measured_seconds_find_what_no_operator_shows() -> None:
    x = torch.randn(2, 4)

    def build(balance: Any) -> penstock.Pipeline:
        layers = [Slow(), *(nn.Linear(4, 4) for _ in range(5))]
        return penstock.Pipeline(layers, (x,), F.mse_loss, models.plain, stages=2, balance=balance)

    assert cuts(build("measured")) == [1, 6]
    assert cuts(build("layers")) == [3, 6]


def test_without_an_estimate_stages_have_equal_numbers_of_layers(caplog: pytest.LogCaptureFixture) -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy() * 2)

    layers = [Numbers() for _ in range(4)]
    pipe = penstock.Pipeline(layers, (torch.ones(2),), F.mse_loss, models.plain, stages=2)

    assert cuts(pipe) == [2, 4]
    assert "stages get equal numbers of layers" in caplog.text


def test_the_log_says_each_stages_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        make(stages=2, balance="layers")
        given = make(stages=2)
        make(plan=given.plan)

    assert len(caplog.messages) == 2
    assert caplog.messages[0] == "stages by layers: layers [0, 5) 50.0%, layers [5, 10) 50.0%"
    assert caplog.messages[1].startswith("stages by estimated work: layers [0, 5) 4")


def test_a_balance_that_contradicts_a_plan_is_refused() -> None:
    plan = penstock.Plan.uniform(10, 2)
    for given in (plan, "auto"):
        with pytest.raises(PlanError, match="balance='layers' and plan= are both given"):
            make(plan=given, balance="layers")
    assert make(plan=plan, balance="work").plan == plan
    with torch.device("meta"):
        weightless = language_model(30)
    with pytest.raises(PlanError, match="the model is on the meta device, where nothing can be measured"):
        make(model=weightless, stages=2, init_fn=penstock.reset_parameters(weightless), balance="measured")


@pytest.mark.processes
def test_all_processes_cut_alike(pool: Pool) -> None:
    """Where the work depends on the data, and where it is measured."""
    first, second = pool.run(2, cut_by_own_data)

    assert first == second
    assert [stage.stop for stage in first.stages] == [2, 5]
    first, second = pool.run(2, measure_and_cut)
    assert first == second
