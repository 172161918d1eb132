"""What a trace needs of torch.export's private names, and what stands in where they are gone."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.torch_internals.export import hidden_from_the_model, shape_guards, traced_constant


def export(model: nn.Module, *tensors: Tensor) -> Any:
    rows = ({0: torch.export.Dim.DYNAMIC},) + (None,) * (len(tensors) - 1)
    return torch.export.export(model, tensors, dynamic_shapes=rows, strict=False)


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_exporting() else x - 1


def targets(model: nn.Module) -> list[str]:
    program = export(model, torch.zeros(3, 2))
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_a_model_does_not_see_that_it_is_exported() -> None:
    truth = torch.compiler.is_exporting
    with hidden_from_the_model() as asked:
        hidden = targets(Asking())

    assert (hidden, asked) == (["aten.sub.Tensor"], [__name__])
    assert torch.compiler.is_exporting is truth
    assert targets(Asking()) == ["aten.add.Tensor"]


def test_torch_itself_sees_it() -> None:
    asker: dict[str, Any] = {"__name__": "torch.somewhere", "torch": torch}
    exec(inspect.cleandoc("def ask(): return torch.compiler.is_exporting()"), asker)
    ask: Callable[[], bool] = asker["ask"]

    class Recording(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            answers.append((ask(), torch.compiler.is_exporting()))
            return x + 1

    answers: list[tuple[bool, bool]] = []
    with hidden_from_the_model() as asked:
        export(Recording(), torch.zeros(3, 2))

    assert set(answers) == {(True, False)}
    assert asked == [__name__] * len(answers)


def test_guards_are_those_of_the_code() -> None:
    class Parity(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[0] % 2 == 0 else 2 * x

    dynamic = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(Parity(), (torch.ones(6, 2),), dynamic_shapes=dynamic, strict=False)

    assert shape_guards(program) == ["(L['x'].size()[0] % 2) == 0"]


@pytest.mark.parametrize("private", [True, False])
def test_a_number_of_a_trace_is_known_as_long_as_it_is_one(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            number = torch.tensor(8)
            found.append(traced_constant(number))
            number += 1
            found.extend(map(traced_constant, (number, x, x.sum())))
            return x + number

    if not private:
        monkeypatch.setitem(sys.modules, "torch.utils._mode_utils", None)
    program = export(Numbers(), torch.zeros(3))

    numbers = [None if each is None else each.item() for each in found]
    assert numbers == [*([8, 9] if private else [None, None]), None, None]
    # To read them is no part of the trace.
    assert not any("clone" in str(node.target) for node in program.graph.nodes)
