"""Objects of Python that blocks of two stages hold: those that code can write make one layer, those that are only read
cost none.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.capturing.shared_writes import find_writes
from penstock.errors import PlanError
from support.blocks import Block, assert_trains, batches, build, sgd, squares

LIMIT = 1000.0
"""No number on a sample reaches it: what stands behind it is run in no capture."""


class Holding(Block):
    """Holds what all blocks of a model do."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared


class Writing(Holding):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.write(x)
        return super().forward(x)

    def write(self, x: Tensor) -> None:
        """What a kind of block does with what it shares."""


@dataclass
class Options:
    scale: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    table: dict[str, float] = field(default_factory=lambda: {"first": 1.0})

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def rescaled(self, by: float) -> float:
        return self.scale * by

    def shrink(self) -> None:
        self.scale *= 0.9

    @cached_property
    def lazily(self) -> "Options":
        return Options()


def options() -> SimpleNamespace:
    return SimpleNamespace(scale=1.0, sizes=[1, 2], inner=SimpleNamespace(scale=1.0), table={"first": 1.0})


class Assigns(Holding):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.shared.scale = 0.5
        return super().forward(x)


class Multiplies(Writing):
    def write(self, x: Tensor) -> None:
        self.shared.inner.scale *= 0.5


class Fills(Writing):
    def write(self, x: Tensor) -> None:
        self.shared.table["second"] = x.mean().item()


class Appends(Holding):
    def forward(self, x: Tensor) -> Tensor:
        sizes = self.shared.sizes
        if x.abs().max() > LIMIT:
            sizes.append(3)
        return super().forward(x)


class Deletes(Writing):
    def write(self, x: Tensor) -> None:
        del self.shared.scale


class Renames(Holding):
    def forward(self, x: Tensor) -> Tensor:
        found = mine = self.shared
        if x.abs().max() > LIMIT:
            (mine if x.mean() > 0 else found).scale = 0.5
        return super().forward(x)


def halve(x: Tensor, box: Any, *, by: float = 0.5) -> None:
    box.scale *= by


def look(x: Tensor, box: Any) -> float:
    return float(box.scale)


class HandsOn(Writing):
    def write(self, x: Tensor) -> None:
        halve(x, self.shared)


class HandsOnByName(Writing):
    def write(self, x: Tensor) -> None:
        self.halve(x, box=self.shared)

    def halve(self, x: Tensor, box: Any) -> None:
        box.scale *= 0.5


class SetsByName(Writing):
    def write(self, x: Tensor) -> None:
        setattr(self.shared, "scale", 0.5)  # noqa: B010


class GetsByName(Writing):
    def write(self, x: Tensor) -> None:
        getattr(self, "shared").scale = 0.5  # noqa: B009


class WritesItsDict(Writing):
    def write(self, x: Tensor) -> None:
        self.shared.__dict__["scale"] = 0.5
        vars(self.shared).update(scale=0.5)


class HandsToUnknown(Writing):
    def write(self, x: Tensor) -> None:
        {"halve": halve}["halve"](x, self.shared)


class CallsItsMethod(Writing):
    def write(self, x: Tensor) -> None:
        self.shared.shrink()


class InAHelper(Writing):
    def write(self, x: Tensor) -> None:
        def inner() -> None:
            self.shared.scale = 0.5

        inner()


class Draws(Holding):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            x = x + torch.randn(1, generator=self.shared)
        return super().forward(x)


class Advances(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + (next(self.shared) if x.abs().max() > LIMIT else 0))


class ScalesATensor(Holding):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.shared.view(-1).mul_(0.5)
        return super().forward(x) + self.shared.sum()


class AddsToATensor(Holding):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.shared += 1
        return super().forward(x) + self.shared.sum()


class WritesItsClass(Block):
    seen: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.seen.append(1)
        return super().forward(x) * (1 + len(self.seen))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.calls += 1
        return x


class CallsAModule(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(x))


class WritesAModule(Writing):
    def write(self, x: Tensor) -> None:
        self.shared.scale = 1


def in_closure() -> list[nn.Module]:
    box = SimpleNamespace(calls=0)

    class InClosure(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max() > LIMIT:
                box.calls += 1
            return super().forward(x)

    return [InClosure(), InClosure()]


def hooked() -> list[nn.Module]:
    shared, blocks = options(), [Holding(None), Holding(None)]

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.abs().max() > LIMIT:
            shared.scale *= 0.5

    for block in blocks:
        block.register_forward_hook(hook)
    return [*blocks]


def pair(kind: type[Holding], make: Callable[[], Any] = options) -> Callable[[], list[nn.Module]]:
    def both() -> list[nn.Module]:
        shared = make()
        return [kind(shared), kind(shared)]

    return both


CONTAINED = [Assigns, Multiplies, Fills, Appends, Deletes, Renames, HandsOn, HandsOnByName, SetsByName, GetsByName]
WRITTEN: dict[str, Callable[[], list[nn.Module]]] = {
    **{kind.__name__: pair(kind) for kind in (*CONTAINED, WritesItsDict, HandsToUnknown, InAHelper)},
    "CallsItsMethod": pair(CallsItsMethod, Options),
    "torch generator": pair(Draws, torch.Generator),
    "iterator": pair(Advances, itertools.count),
    "tensor in place": pair(ScalesATensor, lambda: torch.zeros(3)),
    "tensor added to": pair(AddsToATensor, lambda: torch.zeros(3)),
    "parameter": pair(ScalesATensor, lambda: nn.Parameter(torch.zeros(3))),
    "attribute of the class": lambda: [WritesItsClass(), WritesItsClass()],
    "module that counts": pair(CallsAModule, Counting),
    "module that is written": pair(WritesAModule, lambda: nn.Linear(1, 1)),
    "closure": in_closure,
    "hook": hooked,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_code_can_write_is_found_though_no_run_writes_it(name: str) -> None:
    found = find_writes([[block] for block in WRITTEN[name]()])
    assert len(found) == 2, found
    assert found[0], name
    assert found[0] == found[1]


class Reads(Holding):
    """Reads a configuration as blocks of libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        config = self.shared
        scale = config.scale if hasattr(config, "scale") and config is not None else getattr(config, "other", 1.0)
        sizes = [size for size in config.sizes if size in (1, 2)] + list(self.shared.sizes)[:1]
        first, *rest = self.shared.sizes
        if len(config.table) > 1 and config.table.get("first", 0.0) > config.table["first"]:
            raise ValueError(f"{config} {type(config).__name__} {config.sizes}")
        y = x.reshape(*x.shape[:1], -1).reshape(x.shape) * look(x, config) * scale * len(sizes) / (first + len(rest))
        self.calls = getattr(self, "calls", 0) + config.sizes[0]
        out = torch.zeros_like(y)
        out += y
        out[:, 0] = torch.where(out[:, 0] > config.scale, out[:, 0], out[:, 0])
        return super().forward(out.mul_(1.0))


class ReadsMore(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared.doubled * self.shared.rescaled(by=2.0)


class ReadsATensor(Holding):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.shared.to(x.dtype)
        return super().forward(torch.where(mask[0] > 0, x, x + mask.sum())) + torch.einsum("i->", self.shared)


class ReadsANumpyArray(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.shared[0]) + torch.from_numpy(self.shared).sum()


def argument_namespace() -> argparse.Namespace:
    return argparse.Namespace(scale=1.0, sizes=[1, 2], table={"first": 1.0})


def transformers_config() -> Any:
    config: Any = transformers.LlamaConfig()
    config.scale, config.sizes, config.table = 1.0, [1, 2], {"first": 1.0}
    return config


class Mapped(dict):  # type: ignore[type-arg]
    """A dict with attributes, as many configurations are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


READ: dict[str, Callable[[], list[nn.Module]]] = {
    "SimpleNamespace": pair(Reads),
    "dataclass": pair(ReadsMore, Options),
    "argparse": pair(Reads, argument_namespace),
    "transformers": pair(Reads, transformers_config),
    "dict with attributes": pair(Reads, lambda: Mapped(vars(options()))),
    "tensor": pair(ReadsATensor, lambda: torch.ones(3)),
    "NumPy": pair(ReadsANumpyArray, lambda: numpy.ones(3)),
    "module": pair(CallsAModule, lambda: nn.Linear(8, 8)),
    "nothing": pair(Holding, options),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_only_read_is_free(name: str) -> None:
    assert find_writes([[block] for block in READ[name]()]) == [{}, {}]


class Constrained(nn.Linear):
    """Writes a weight of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > LIMIT:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


def test_a_write_of_an_own_attribute_is_none_of_another_object_of_that_name() -> None:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    assert not any(find_writes([[first], [Constrained(6, 6)], [Constrained(6, 6)], [last]]))
    last = Constrained(6, 6)
    last.weight = first.weight
    found = find_writes([[first], [Constrained(6, 6)], [last]])
    assert [list(each) for each in found] == [[id(first.weight)], [], [id(first.weight)]]


def test_a_module_that_is_called_again_and_writes_itself_is_found() -> None:
    counting, plain = Counting(), nn.Linear(6, 6)
    found = find_writes([[counting], [plain], [counting], [plain]])
    assert [list(each) for each in found] == [[id(counting)], [], [id(counting)], []]


class Scaling(Holding):
    """The first block writes the same number in every run on the sample, the last one reads it."""

    def __init__(self, shared: Any, index: int, count: int) -> None:
        super().__init__(shared)
        self.index, self.last = index, count - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 0:
            self.write(x)
        y = super().forward(x)
        return y * self.shared.scale if self.index == self.last else y

    def write(self, x: Tensor) -> None:
        self.shared.scale = 1 / (1 + x.detach().abs().max().item())


class ScalingLater(Scaling):
    """Writes for the data of some batches only."""

    def write(self, x: Tensor) -> None:
        if x.detach().abs().max() > 1.1:
            self.shared.scale *= 0.9


def scaling(kind: type[Scaling], count: int, listed: bool) -> nn.Module:
    shared = SimpleNamespace(scale=1.0)
    numbers = iter(range(count))
    model = build(lambda: kind(shared, next(numbers, count), count))
    for place in range(count, 4):
        model.blocks[place] = Block().double()
    return nn.Sequential(model.first, *model.blocks, model.last) if listed else model


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
@pytest.mark.parametrize("kind", [Scaling, ScalingLater])
def test_blocks_that_share_what_one_writes_train_as_one_layer(kind: type[Scaling], listed: bool) -> None:
    assert_trains(lambda: scaling(kind, 2, listed), microbatches=4, sizes=[(2, 6), (8, 6), (8, 6)], predicts=False)


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
def test_a_refusal_names_the_object_and_the_code(listed: bool) -> None:
    x = batches((6,))[0][0]
    text = r"expected at most 3, found 4.* Shared are shared \('self\.shared\.scale' in Scaling\.write\)"
    with pytest.raises(PlanError, match=text):
        penstock.Pipeline(scaling(Scaling, 4, listed), (x,), squares, sgd, stages=4)


def test_configurations_cost_no_layer() -> None:
    """Blocks of transformers hold one each."""
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
    chain = penstock.capture(transformers.GPT2LMHeadModel(config), {"input_ids": torch.ones(2, 4, dtype=torch.long)})
    assert [layer.name for layer in chain.layers][1:4] == [f"transformer.h.{index}" for index in range(3)]
    experts = transformers.MixtralConfig(
        num_hidden_layers=3, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=11,
        intermediate_size=8, num_local_experts=2,
    )  # fmt: skip
    chain = penstock.capture(
        transformers.MixtralForCausalLM(experts), {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    )
    assert [layer.name for layer in chain.layers][1:4] == [f"model.layers.{index}" for index in range(3)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "VeRA", "LoRA of tied weights"])
def test_adapters_of_peft_cost_no_layer(kind: str) -> None:
    """VeRA has matrices that all blocks share; code of the adapters' layers, which no training runs, writes weights."""
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
    target = ["wte", "c_attn"] if kind == "LoRA of tied weights" else ["c_attn"]
    adapter = (
        peft.VeraConfig(target_modules=target, r=2)
        if kind == "VeRA"
        else peft.LoraConfig(target_modules=target, r=2, use_dora=kind == "DoRA", fan_in_fan_out=True)
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapter)
    names = [layer.name for layer in penstock.capture(model, {"input_ids": torch.ones(2, 4, dtype=torch.long)}).layers]
    blocks = [f"base_model.model.transformer.h.{index}" for index in range(3)]
    assert names[names.index(blocks[0]) :] == [*blocks, "base_model.model.lm_head"]
