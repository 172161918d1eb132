"""What a user changes after the pipeline was built counts as in a plain loop, or is refused by its name."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune

import penstock
from support.processes import Pool

MICROBATCHES, WIDTH, STEPS = 4, 4, 4
SCALE = 1.0
SETTINGS = SimpleNamespace(scale=1.0, weights=[1.0, 0.5])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.rate)


class Block(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.config = Rate(), config
        self.active, self.gain, self.inner = True, 1.0, 1.0

    def forward(self, x: Tensor, strength: float = 1.0) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.inner * self.config.inner
        if hasattr(self, "more"):
            y = self.more(y)
        return x + strength * self.drop(y)


def twice(x: Tensor) -> Tensor:
    return 2 * x


def same(x: Tensor) -> Tensor:
    return x


def closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    factor = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, set_factor


class Root(nn.Module):
    """Reads places of all kinds between its blocks."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0, inner=1.0, words={"scale": 1.0})
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(4))
        self.table, self.tags, self.function = [1.0, (1.0, 2.0)], {"plain"}, same
        self.words: dict[str, Any] = {"deep": {"scale": 1.0}}
        self.slotted, self.array = Slotted(), numpy.ones(2)
        self.note: list[float] = []
        self.tensor = torch.ones(WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.scaled, self.set_factor = closure()

    def method(self, x: Tensor) -> Tensor:
        return x * self.kind

    @property
    def deep(self) -> float:
        return self.words["deep"]["scale"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not getattr(block, "active", True):
                continue
            if isinstance(block, Block):
                x = block.gain * block(x, strength=1 - block.drop.rate / 2)
            else:
                x = block(x)
        x = x * self.config.scale * self.table[0] * self.table[1][1] * self.deep * self.slotted.scale
        x = x * SCALE * SETTINGS.scale * self.config.words.get("scale", 1.0)
        x = self.function(self.method(self.scaled(x))) * float(self.array.sum()) * self.tensor * self.buffer
        if "double" in self.tags:
            x = 2 * x
        if hasattr(self, "head"):
            x = self.head(x)
        return sum(x * weight for weight in SETTINGS.weights) * getattr(self, "late", 1.0) * len(self.table)


@dataclass(frozen=True)
class Kind:
    """A change to a model, with the word that a refusal has."""

    apply: Callable[[Any, float], object]
    named: str
    followed: bool = True
    """Whether the pipeline must train on."""


def set_global(model: nn.Module, value: float) -> None:
    global SCALE
    SCALE = value


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, result: result * 0.5)


def own_method(model: Any, value: float) -> None:
    model.method = MethodType(lambda self, x: x * value, model)


KINDS = {
    "root attribute": Kind(lambda m, v: setattr(m, "kind", v), "kind"),
    "config": Kind(lambda m, v: setattr(m.config, "scale", v), "scale"),
    "config replaced": Kind(lambda m, v: setattr(m, "config", SimpleNamespace(scale=v, inner=1.0, words={})), "config"),
    "dict in a config": Kind(lambda m, v: m.config.words.update(scale=v), "words"),
    "list": Kind(lambda m, v: m.table.__setitem__(0, v), "table"),
    "longer list": Kind(lambda m, v: m.table.append(v), "table"),
    "tuple in a list": Kind(lambda m, v: m.table.__setitem__(1, (1.0, v)), "table"),
    "set": Kind(lambda m, v: m.tags.add("double"), "tags"),
    "nested dict": Kind(lambda m, v: m.words["deep"].update(scale=v), "words"),
    "slot": Kind(lambda m, v: setattr(m.slotted, "scale", v), "scale"),
    "array": Kind(lambda m, v: m.array.__setitem__(0, v), "array"),
    "tensor replaced": Kind(lambda m, v: setattr(m, "tensor", torch.full((WIDTH,), v)), "tensor"),
    "tensor written": Kind(lambda m, v: m.tensor.fill_(v), "tensor"),
    "buffer replaced": Kind(lambda m, v: setattr(m, "buffer", torch.full((WIDTH,), v)), "buffer"),
    "buffer written": Kind(lambda m, v: m.buffer.fill_(v), "buffer"),
    "function": Kind(lambda m, v: setattr(m, "function", twice), "function"),
    "partial": Kind(lambda m, v: setattr(m, "function", partial(torch.mul, other=torch.tensor(v))), "function"),
    "method": Kind(own_method, "method"),
    "method of the class": Kind(lambda m, v: setattr(type(m), "method", lambda self, x: x * v), "method"),
    "attribute of the class": Kind(lambda m, v: setattr(type(m), "kind", v), "kind"),
    "closure": Kind(lambda m, v: m.set_factor(v), "factor"),
    "global": Kind(set_global, "SCALE"),
    "global object": Kind(lambda m, v: setattr(SETTINGS, "scale", v), "scale"),
    "global list": Kind(lambda m, v: SETTINGS.weights.__setitem__(1, v), "weights"),
    "late attribute": Kind(lambda m, v: setattr(m, "late", v), "late"),
    "late module": Kind(lambda m, v: setattr(m, "head", nn.Tanh()), "head"),
    "late module with weights": Kind(lambda m, v: setattr(m, "head", nn.Linear(WIDTH, WIDTH)), "head", followed=False),
    "block off": Kind(lambda m, v: setattr(m.blocks[1], "active", False), "active"),
    "block on": Kind(lambda m, v: setattr(m.blocks[1], "active", True), "active"),
    "blocks off": Kind(
        lambda m, v: [setattr(block, "active", False) for block in m.blocks[2:4]], "active", followed=False
    ),
    "gain of a block": Kind(lambda m, v: setattr(m.blocks[2], "gain", v), "gain"),
    "rate in a block": Kind(lambda m, v: setattr(m.blocks[3].drop, "rate", v), "rate"),
    "inside of a block": Kind(lambda m, v: setattr(m.blocks[0], "inner", v), "inner"),
    "shared config": Kind(lambda m, v: setattr(m.config, "inner", v), "inner"),
    "a new block": Kind(lambda m, v: m.blocks.append(nn.Tanh()), "blocks"),
    "a block with weights": Kind(lambda m, v: m.blocks.append(nn.Linear(WIDTH, WIDTH)), "blocks", followed=False),
    "a block replaced": Kind(lambda m, v: m.blocks.__setitem__(1, Rate()), "blocks", followed=False),
    "a block removed": Kind(lambda m, v: m.blocks.__delitem__(3), "blocks", followed=False),
    "blocks in another order": Kind(lambda m, v: m.blocks.insert(0, m.blocks.pop(3)), "blocks", followed=False),
    "a module in a block": Kind(lambda m, v: setattr(m.blocks[1], "more", nn.Tanh()), "more"),
    "a module with weights in a block": Kind(
        lambda m, v: setattr(m.blocks[1], "more", nn.Linear(WIDTH, WIDTH)), "more", followed=False
    ),
    "a parameter replaced": Kind(
        lambda m, v: setattr(m.blocks[1].first, "weight", nn.Parameter(torch.full((WIDTH, WIDTH), v))),
        "weight",
        followed=False,
    ),
    "a parameter written": Kind(lambda m, v: m.blocks[1].first.weight.data.fill_(v), "weight"),
    "the data of a parameter": Kind(
        lambda m, v: setattr(m.blocks[1].first.weight, "data", torch.full((WIDTH, WIDTH), v)), "weight", followed=False
    ),
    "frozen": Kind(lambda m, v: m.blocks[1].first.requires_grad_(False), "first", followed=False),
    "parametrized": Kind(lambda m, v: parametrizations.weight_norm(m.blocks[0].first), "weight", followed=False),
    "pruned": Kind(
        lambda m, v: prune.l1_unstructured(m.blocks[0].first, "weight", amount=0.5), "weight", followed=False
    ),
    "a hook on the root": Kind(lambda m, v: hooked(m), "hook", followed=False),
    "a hook on a list": Kind(lambda m, v: hooked(m.blocks), "hooks", followed=False),
    "a hook on a block": Kind(lambda m, v: hooked(m.blocks[2]), "hooks"),
    "a hook in a block": Kind(lambda m, v: hooked(m.blocks[2].drop), "hooks"),
    "a hook on a parameter": Kind(
        lambda m, v: m.blocks[2].first.weight.register_hook(lambda gradient: gradient * v) and None,
        "hook",
        followed=False,
    ),
    "mode of the root": Kind(lambda m, v: m.eval(), "training", followed=False),
    "mode of a block": Kind(lambda m, v: m.blocks[1].eval(), "training"),
    "type of a block": Kind(lambda m, v: m.blocks[1].float(), "Float", followed=False),
    "type of the model": Kind(lambda m, v: m.float(), "Float", followed=False),
    "not read": Kind(lambda m, v: m.note.append(v), "note"),
}


@contextmanager
def restored() -> Iterator[None]:
    """Gives back what changes write outside of models."""
    torch.set_default_dtype(torch.float64)
    kept = SCALE, SETTINGS.scale, [*SETTINGS.weights], Root.kind, Root.method
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        set_global(nn.Module(), kept[0])
        SETTINGS.scale, SETTINGS.weights[:], Root.kind = kept[1], kept[2], kept[3]
        Root.method = kept[4]  # type: ignore[method-assign]


Planned = tuple[int, str, float]
"""Before which step, which of `KINDS`, and a number."""


def train_both(changes: list[Planned], schedule: str, stages: int | None, evaluates: bool, **options: Any) -> str:
    """Trains a plain loop and a pipeline with `changes`. Returns the refusal; empty if all numbers are equal."""
    with restored():
        torch.manual_seed(0)
        plain, model = Root(), Root()
        model.load_state_dict(plain.state_dict())
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        # So small that no sum overflows.
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.5)
        pipe = penstock.Pipeline(
            model,
            sample=(x[:2],),
            loss_fn=mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.5),
            microbatches=MICROBATCHES,
            schedule=schedule,
            check="off",
            stages=stages,
            **options,
        )
        with pipe:
            for step in range(STEPS):
                for due, name, value in changes:
                    if due == step:
                        for each in (plain, model):
                            KINDS[name].apply(each, value)
                optimizer.zero_grad()
                losses = []
                try:
                    for part, target in zip(x.split(2), y.split(2), strict=True):
                        losses.append(mse_loss(plain(part), target) / MICROBATCHES)
                        losses[-1].backward()
                    optimizer.step()
                except RuntimeError as error:
                    # The plain loop cannot go on, and so the pipeline must not.
                    with pytest.raises((RuntimeError, penstock.PenstockError)):
                        pipe.step(x, y)
                    return f"{error}"
                try:
                    found = float(pipe.step(x, y).loss)
                    if evaluates:
                        evaluated = float(pipe.evaluate(x[:2], y[:2]).loss)
                except penstock.PenstockError as error:
                    return str(error)
                assert found == sum(loss.item() for loss in losses), (step, found)
                if evaluates:
                    modes = {module: module.training for module in plain.modules()}
                    with torch.no_grad():
                        assert evaluated == mse_loss(plain.eval()(x[:2]), y[:2]).item()
                    for module, mode in modes.items():
                        module.training = mode
            own = plain.state_dict()
            whole = pipe.full_state_dict(rank=None)
            assert set(whole) == set(own)
            assert all(torch.equal(tensor, own[name]) for name, tensor in whole.items())
    return ""


def judge(changes: list[Planned], schedule: str = "1f1b-flush", stages: int = 2, *, evaluates: bool = False) -> str:
    refusal = train_both(changes, schedule, stages, evaluates)
    assert not refusal or any(KINDS[name].named in refusal for _, name, _ in changes), refusal
    return refusal


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sampled(16)
def test_a_change_counts_as_in_a_plain_loop_or_is_refused_by_its_name(name: str) -> None:
    refusal = judge([(1, name, 0.5)])

    assert not (refusal and KINDS[name].followed), refusal


changes = st.lists(
    st.tuples(st.integers(0, STEPS - 1), st.sampled_from(sorted(KINDS)), st.sampled_from([0.25, 0.5, 1.0, 2.0])),
    min_size=1,
    max_size=3,
)


@settings(max_examples=5)
@given(changes, st.sampled_from(["1f1b-flush", "gpipe", "zb-h1", "interleaved"]), st.booleans())
def test_random_changes_count_as_in_a_plain_loop_or_are_refused(
    drawn: list[Planned], schedule: str, evaluates: bool
) -> None:
    judge(drawn, schedule, evaluates=evaluates)


OF_ONE_PROCESS = {
    *("a hook on a parameter", "a parameter replaced", "a parameter written", "the data of a parameter", "frozen"),
    *("parametrized", "pruned", "type of a block", "type of the model"),
}
"""Changes of a weight, which the processes that do not hold it refuse at once."""


def train_here(seed: int) -> list[str]:
    """Several drawn cases on this process, which are the same on all."""
    draw = random.Random(seed)
    refusals = []
    for _ in range(6):
        names = draw.sample(sorted(KINDS.keys() - OF_ONE_PROCESS), 2)
        drawn = [(draw.randrange(STEPS), name, draw.choice([0.25, 0.5, 2.0])) for name in names]
        refusals.append(train_both(drawn, "1f1b-flush", None, False, timeout_seconds=60))
        if refusals[-1]:
            assert any(KINDS[name].named in refusals[-1] for name in names), (names, refusals[-1])
    return refusals


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sampled(1)
def test_two_processes_follow_changes_together(pool: Pool, seed: int) -> None:
    first, second = pool.run(2, train_here, seed)

    assert [bool(each) for each in first] == [bool(each) for each in second]


def test_a_change_of_a_model_whose_weights_were_made_in_parts_is_refused() -> None:
    with torch.device("meta"):
        model: Any = Root()
    model.tensor = 1.0
    with penstock.Pipeline(
        model,
        sample=(torch.randn(2, WIDTH),),
        loss_fn=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        init_fn=lambda name, tensor: tensor.fill_(0.1),
        stages=2,
        check="off",
    ) as pipe:
        x = torch.randn(2, WIDTH)
        pipe.step(x, x)
        model.blocks[1].active = False
        with pytest.raises(penstock.PenstockError, match=r"blocks.1.active was True and is False .* init_fn="):
            pipe.step(x, x)
        model.blocks[1].active = True
        pipe.step(x, x)
