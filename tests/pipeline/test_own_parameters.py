"""Parameters are the user's own objects under every schedule, and what the user leaves in ``.grad`` trains nothing."""

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import penstock
from model_cases.habit_blocks import does
from model_cases.modules import Build
from penstock.errors import PenstockError
from support.blocks import Block, Stack, batches, build, sgd, squares
from support.processes import Pool

FORMS = [("1f1b-flush", 2, 1), ("zb-h1", 3, 1), ("gpipe", 2, 2), ("2bw", 2, 1), ("2bw", 2, 2), ("pipedream", 3, 1)]
"""Schedules, and the numbers of stages and of the replicas of each."""
Outcome = tuple[list[float], dict[str, Tensor]]


ROUNDS = batches((6, 5, 8, 7))
OwnParameters = tuple[str, str, int, int]
"""The way, the schedule, the number of stages, and that of the replicas of each."""
SCALES: dict[int, float] = {}


class ScaledParameter(nn.Parameter):
    """A parameter with a method."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * 0.3


def scales(scale: Callable[[Any, Tensor], Tensor], prepare: Callable[[Any], object] | None = None) -> Build:
    """Makes blocks that scale their input."""
    return does(lambda block, inner, x: inner(scale(block, x)), prepare)


def computes(
    product: Callable[[Any, Tensor], Tensor], name: str = "", hold: Callable[[nn.Linear], object] = lambda linear: None
) -> Build:
    """Makes blocks that find the weight of their linear layer in what they `hold` as `name`."""
    return does(
        lambda block, inner, x: (product(block, x) + block.linear.bias).tanh(),
        lambda block: setattr(block, name, hold(block.linear)),
    )


def enclose(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight)


fixed = scales(lambda block, x: x * 0.3)
WAYS: dict[str, tuple[Build, Build]] = {
    "attribute": (scales(lambda block, x: x * getattr(block.linear.weight, "scale", 1.0)), fixed),
    "table by identity": (scales(lambda block, x: x * SCALES.get(id(block.linear.weight), 1.0)), fixed),
    "table by weight": (
        scales(
            lambda block, x: x * block.table[block.linear.weight],
            lambda block: setattr(block, "table", {block.linear.weight: 0.3}),
        ),
        fixed,
    ),
    "method": (
        scales(
            lambda block, x: block.linear.weight.scaled(x),
            lambda block: setattr(block.linear, "weight", ScaledParameter(block.linear.weight.data)),
        ),
        fixed,
    ),
    "bound": (
        computes(lambda block, x: block.compute(x), "compute", lambda linear: partial(F.linear, weight=linear.weight)),
        Block,
    ),
    "enclosed": (computes(lambda block, x: block.compute(x), "compute", lambda linear: enclose(linear.weight)), Block),
    "tabled": (
        computes(
            lambda block, x: F.linear(x, block.table["weight"][0]), "table", lambda linear: {"weight": (linear.weight,)}
        ),
        Block,
    ),
    "weak": (
        computes(
            lambda block, x: F.linear(x, block.reference()), "reference", lambda linear: weakref.ref(linear.weight)
        ),
        Block,
    ),
    "own backward": (Block, Block),
    "own backward of a part": (Block, Block),
    "kept gradients": (Block, Block),
    "late hook": (Block, Block),
    "late hook after accumulation": (Block, Block),
}


def make(way: str, twin: bool = False) -> Stack:
    model = build(WAYS[way][twin])
    for block in model.blocks:
        block.linear.weight.scale = 0.3  # type: ignore[union-attr]
        SCALES[id(block.linear.weight)] = 0.3  # type: ignore[union-attr]
    if twin:
        _hook(way, model)
    return model


def use(way: str, model: Stack, step: int) -> None:
    """What the loop does with the model before a step, and the twin does not."""
    away = [each for each in model.parameters() if any("penstock" in base.__module__ for base in type(each).__mro__)]
    if away and ("own backward" in way or way == "kept gradients"):
        # Another process has their newest numbers.
        with pytest.raises(PenstockError, match="its newest numbers are in another process"):
            model(ROUNDS[step][0])
        for parameter in {*model.parameters()} - {*away}:
            parameter.grad = torch.full_like(parameter, 7.0)
    elif way == "own backward":
        model(ROUNDS[step][0]).sum().backward()
    elif way == "own backward of a part":
        model.blocks[0](ROUNDS[step][0]).sum().backward()
    elif way == "kept gradients":
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
    elif step == 0:
        _hook(way, model)


def _hook(way: str, model: Stack) -> None:
    """Registers hooks: those of a twin before the pipeline is built."""
    if way == "late hook":
        model.last.weight.register_hook(lambda gradient: gradient * 0.1)
    elif way == "late hook after accumulation":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def train(run: OwnParameters, twin: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    way, schedule, stages, replicas = run
    model, size = make(way, twin), 6 // stages
    parts = [
        penstock.Stage(s * size, (s + 1) * size, tuple(range(s * replicas, (s + 1) * replicas))) for s in range(stages)
    ]
    plan = penstock.Plan(tuple(parts), schedule, microbatches=4)
    with penstock.Pipeline(model, (ROUNDS[0][0][:1],), squares, sgd, plan=plan) as pipe:
        losses = []
        for step, (x, target) in enumerate(ROUNDS):
            if not twin:
                use(way, model, step)
            losses.append(pipe.step(x, target).loss.item())
        pipe.drain()
        assert all(parameter.grad is None for parameter in pipe.parameters())
        return losses, dict(pipe.full_state_dict(rank=None) or {})


def train_these(runs: Sequence[OwnParameters]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(run) for run in runs]


class _Beside(nn.Module):
    """A model beside a frozen copy of another one."""

    def __init__(self, model: nn.Module, frozen: nn.Module) -> None:
        super().__init__()
        self.model, self.frozen = model, frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) - self.frozen(x)


def copies() -> tuple[list[int], bool, list[float], list[float]]:
    """While a pipeline trains a model: how many hooks its copies have, whether a file of it needs Penstock, and the
    losses of a pipeline over a copy and of one over its like that was never trained.
    """
    model, other, file = build(Block), copy.deepcopy(build(Block)), io.BytesIO()
    with penstock.Pipeline(model, (ROUNDS[0][0][:2],), squares, sgd, stages=2, microbatches=2) as pipe:
        twins = [copy.deepcopy(model), copy.deepcopy(other)]
        pipe.step(*ROUNDS[0])
        if dist.is_initialized():
            for copied in (partial(torch.save, model, io.BytesIO()), partial(copy.deepcopy, model)):
                with pytest.raises(PenstockError, match="its newest numbers are in another process"):
                    copied()
            pipe.gather_model()
        torch.save(model, file)
        hooks = [_hooks_in(each) for each in (copy.deepcopy(model), AveragedModel(model))]
        losses = []
        for twin in twins:
            torch.manual_seed(7)
            both = _Beside(Stack(Block).double(), twin)
            with penstock.Pipeline(both, (ROUNDS[0][0][:2],), squares, sgd, stages=2, microbatches=2) as second:
                losses.append([second.step(x, target).loss.item() for x, target in ROUNDS])
    return hooks, b"penstock" in file.getvalue(), losses[0], losses[1]


def _hooks_in(model: nn.Module) -> int:
    tables = [table for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")]
    return sum(len(table) for table in tables)


def train_adversaries(piped: bool, schedule: str = "1f1b-flush") -> list[float]:
    """The losses of a model, and those of a second one by whose outputs the first one is trained: in two pipelines of
    this process, or in a plain loop.
    """
    maker, judge = build(Block), build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    judge.last, losses = nn.Linear(6, 6).double(), []
    maker.last = nn.Linear(6, 6).double()
    torch.manual_seed(8)
    for module in (judge.last, maker.last):
        module.reset_parameters()

    def fool(output: Tensor, target: Tensor) -> Tensor:
        return squares(judge(output) - 1.0, target)

    if piped:
        options: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": schedule}
        pipes = [
            penstock.Pipeline(m, (ROUNDS[0][0][:2],), f, sgd, **options) for m, f in ((maker, fool), (judge, squares))
        ]
        for x, target in ROUNDS:
            losses += [pipe.step(x, target).loss.item() for pipe in pipes]
        return losses
    optimizers = [sgd(list(model.parameters())) for model in (maker, judge)]
    for x, target in ROUNDS:
        for model, optimizer, loss_fn in ((maker, optimizers[0], fool), (judge, optimizers[1], squares)):
            optimizer.zero_grad()
            parts = [loss_fn(model(part), target) / 2 for part in x.chunk(2)]
            for part in parts:
                part.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
    return losses


def train_plainly(way: str) -> Outcome:
    model, losses = make(way), []
    optimizer = sgd(list(model.parameters()))
    for step, (x, target) in enumerate(ROUNDS):
        use(way, model, step)
        optimizer.zero_grad()
        parts = [squares(model(part), target) / 4 for part in x.chunk(4)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def train_twin(run: OwnParameters) -> Outcome:
    way, *form = run
    same = next(
        other for other in WAYS if WAYS[other][1] is WAYS[way][1] and (other == way or "late" not in way + other)
    )
    return _train_twin((same, *form))  # type: ignore[arg-type]


_train_twin = cache(partial(train, twin=True))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_loop(way: str) -> None:
    assert_equal(train((way, "1f1b-flush", 2, 1)), train_plainly(way))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_in_one_process(way: str) -> None:
    """Half of the forms for each way, with versions and without; in two processes it meets others."""
    for form in FORMS[(list(WAYS).index(way) + 1) % 2 :: 2]:
        run: OwnParameters = (way, *form)
        assert_equal(train(run), train_twin(run))


FORMS_APART = [("1f1b-flush", 2, 1), ("zb-h1", 2, 1), ("2bw", 2, 1), ("2bw", 1, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS_APART, ids=str)
def test_two_processes(pool: Pool, form: tuple[str, int, int]) -> None:
    """Every way under two of the forms; under others it is in one process."""
    turn = FORMS_APART.index(form)
    runs: list[OwnParameters] = [(way, *form) for number, way in enumerate(WAYS) if number % 2 == turn % 2]
    for outcomes in pool.run(2, train_these, runs):
        for run, found in zip(runs, outcomes, strict=True):
            assert_equal(found, train_twin(run))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_memory_of_the_user(schedule: str) -> None:
    """Where a schedule keeps versions, they have memory of their own, and other memory is refused."""
    model = make("weak")
    pipe = penstock.Pipeline(model, ROUNDS[0][:1], squares, sgd, stages=2, schedule=schedule, microbatches=4)
    pipe.step(*ROUNDS[0])
    weight = model.get_parameter("blocks.3.linear.weight")
    weight.data = torch.zeros_like(weight)
    if schedule == "2bw":
        with pytest.raises(PenstockError, match=r"parameter blocks.3.linear.weight: its memory was replaced after"):
            pipe.step(*ROUNDS[1])
        return
    loss = squares(model(ROUNDS[1][0]), ROUNDS[1][1])
    assert pipe.step(*ROUNDS[1]).loss.item() == loss.item()
    assert weight.abs().max() > 0


def test_evaluations_leave_gradients_of_the_user() -> None:
    model = make("weak")
    with penstock.Pipeline(model, ROUNDS[0][:1], squares, sgd, stages=2) as pipe:
        squares(model(ROUNDS[0][0]), ROUNDS[0][1]).backward()  # type: ignore[no-untyped-call]
        pipe.evaluate(*ROUNDS[1])
        pipe.predict(ROUNDS[1][0])
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_of_the_model_have_nothing_of_penstock(pool: Pool) -> None:
    for hooks, in_file, losses, expected in (*pool.run(2, copies), copies()):
        assert hooks == [0, 0] and not in_file
        assert losses == expected


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_two_pipelines_one_of_which_reads_the_model_of_the_other(schedule: str) -> None:
    assert train_adversaries(True, schedule) == train_adversaries(False)


class Failing(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("a backward that fails")


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_step_that_fails_leaves_the_newest_weights_and_no_gradient(schedule: str) -> None:
    model, fails = make("weak"), False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return squares(Failing.apply(output) if fails else output, target)

    plan = penstock.Plan((penstock.Stage(0, 3, (0, 1)), penstock.Stage(3, 6, (2, 3))), schedule, microbatches=4)
    pipe = penstock.Pipeline(model, (ROUNDS[0][0][:1],), loss, sgd, plan=plan)
    for step in range(2):
        pipe.step(*ROUNDS[step])
    newest = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    fails = True
    with pytest.raises(ValueError, match="a backward that fails"):
        pipe.step(*ROUNDS[0])

    # Under 2bw the first stage may have made the update of the step before.
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, newest[name])}
    assert same == newest.keys() if schedule == "1f1b-flush" else same >= {"last.weight", "last.bias"}
    assert all(parameter.grad is None for parameter in model.parameters())
    squares(model(ROUNDS[0][0]), ROUNDS[0][1]).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
