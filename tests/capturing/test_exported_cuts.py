"""The cuts of a plan for torchtitan and Megatron-LM."""

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Plan, PlanError
from penstock.capturing import LayerChain, megatron_layout, module_names
from penstock.values import Stage


class Blocks(nn.Module):
    def __init__(self, *, tied: bool = False, bare: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.positions = nn.Embedding(3, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)) for _ in range(4)])
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(4)) if bare else None
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(3))
        if self.scale is not None:
            hidden = hidden * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        output: Tensor = self.output(self.norm(hidden))
        return output


def captured(**options: bool) -> tuple[Blocks, LayerChain]:
    model = Blocks(**options)
    return model, penstock.capture(model, (torch.zeros(2, 3, dtype=torch.long),))


def cut(*cuts: int, ranks: tuple[tuple[int, ...], ...] = (), schedule: str = "1f1b-flush") -> Plan:
    places = ranks or tuple((stage,) for stage in range(len(cuts)))
    return Plan(tuple(map(Stage, (0, *cuts[:-1]), cuts, places)), schedule, 4)


def test_torchtitan_reads_the_modules_of_each_stage() -> None:
    model, chain = captured()
    count = len(chain.layers)
    embedding, head = ["tokens", "positions"], ["norm", "output"]

    assert module_names(cut(3, count), chain, model) == [
        [*embedding, "layers.0", "layers.1"],
        ["layers.2", "layers.3", *head],
    ]
    assert module_names(cut(1, 5, count), chain, model) == [embedding, [f"layers.{n}" for n in range(4)], head]
    assert module_names(cut(count), chain, model) == [[*embedding, *(f"layers.{n}" for n in range(4)), *head]]


@pytest.mark.parametrize(
    ("options", "found"),
    [({"tied": True}, r"weight: .* found it in stages \[0, 1\]"), ({"bare": True}, "scale: .* found it in the model")],
)
def test_a_weight_that_is_in_no_module_of_one_stage_is_refused(options: dict[str, bool], found: str) -> None:
    model, chain = captured(**options)
    with pytest.raises(PlanError, match=found):
        module_names(cut(3, len(chain.layers)), chain, model)
    with pytest.raises(PlanError, match="expected a plan of 6 layers, found one of 9"):
        module_names(cut(3, 9), chain, model)


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        (cut(3, 6), "Ett|ttL"),
        (cut(1, 5, 6), "E|tttt|L"),
        (cut(3, 6, ranks=((0, 1), (2, 3))), "Ett|ttL"),
        (cut(2, 3, 4, 6, ranks=((0,), (1,), (0,), (1,)), schedule="interleaved"), "Et|t|t|tL"),
    ],
)
def test_megatron_reads_a_layout(plan: Plan, layout: str) -> None:
    names = ("tokens", "layers.0", "layers.1", "layers.2", "layers.3", "output")
    assert [layer.name for layer in captured()[1].layers][1:5] == list(names[1:5])
    assert megatron_layout(plan, names) == layout


def test_megatron_has_no_layout_for_other_plans() -> None:
    names = ("tokens", "positions", "layers.0", "layers.1", "norm", "output")
    folded = cut(3, 4, 5, 6, ranks=((0,), (1,), (1,), (0,)), schedule="zb-v")
    unequal = cut(3, 6, ranks=((0, 1), (2,)), schedule="pipedream")
    for plan in (folded, unequal):
        with pytest.raises(PlanError, match="expected stages with the same number of replicas that go round the ranks"):
            megatron_layout(plan, names)
    for plan in (cut(1, 6), cut(3, 5, 6)):
        with pytest.raises(PlanError, match="found a cut among them"):
            megatron_layout(plan, names)
    for wrong in (("0", "1", "2"), ("a", "b", "c"), ("in", "out", "h.0"), ("a.0", "b", "a.1")):
        with pytest.raises(PlanError, match="expected an embedding, blocks with numbers and a head"):
            megatron_layout(cut(1, len(wrong)), wrong)
    with pytest.raises(PlanError, match="expected a plan of 2 layers, found one of 6"):
        megatron_layout(cut(3, 6), ("a", "b"))
