"""Copies of modules: with scripted code in them, and while PyTorch traces."""

from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing.module_copies import Copies, copied
from penstock.capturing.module_state import ModuleState

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def double(x: Tensor) -> Tensor:
    return 2 * x


class Scripted(nn.Module):
    """Scripted modules one inside of the other, and a weight that another module has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(3, 3)
        self.normed = nn.BatchNorm1d(3)
        inner = nn.Linear(3, 3)
        inner.weight = self.plain.weight
        self.scripted = torch.jit.script(nn.Sequential(inner, nn.Sequential(self.normed, nn.Linear(3, 3))))
        self.functions = [torch.jit.script(double)]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.functions[0](self.scripted(self.plain(x)))
        return found


def test_a_copy_has_parameters_and_ties_of_its_own() -> None:
    model = Scripted()
    named(model)["scripted.1.1.weight"].requires_grad = False
    made = copied(model)

    own, new = named(model), named(made)
    assert own.keys() == new.keys()
    assert [type(tensor) for tensor in new.values()] == [type(tensor) for tensor in own.values()]
    assert [tensor.requires_grad for tensor in new.values()] == [tensor.requires_grad for tensor in own.values()]
    assert all(torch.equal(own[name], new[name]) for name in own)
    assert not {tensor.data_ptr() for tensor in own.values()} & {tensor.data_ptr() for tensor in new.values()}
    assert new["scripted.0.weight"] is new["plain.weight"]
    assert new["scripted.1.0.running_mean"] is new["normed.running_mean"]
    assert made.functions[0] is model.functions[0]


def test_a_copy_computes_with_its_own_tensors() -> None:
    model, x = Scripted(), torch.randn(4, 3)
    made = copied(model)
    expected = model(x)
    assert torch.equal(made(x), expected)

    with torch.no_grad():
        made.plain.weight.zero_()
    assert not torch.equal(made(x), expected)
    assert torch.equal(model(x), expected)
    mean, own_mean = model.normed.running_mean, made.normed.running_mean
    assert mean is not None and own_mean is not None and not torch.equal(mean, own_mean)


def test_a_copy_shares_what_is_not_to_be_copied() -> None:
    model = Scripted()
    made = Copies([model]).of(model)

    own, new = named(model), named(made)
    assert all((new[name] is tensor) is isinstance(tensor, nn.Parameter) for name, tensor in own.items())


def test_references_and_default_arguments_of_a_copy_are_its_own() -> None:
    def note(value: int, *, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(value)

    model = nn.Sequential(nn.Linear(2, 2))
    model.first, model.note = ref(model[0]), note  # type: ignore[assignment]
    made = copied(model)
    made.note(1)  # type: ignore[operator]

    assert made.first() is made[0]  # type: ignore[operator]
    assert note.__kwdefaults__ == {"seen": []}


def test_an_entry_under_another_key_is_a_change() -> None:
    module = nn.Module()
    module.table = {"a": 1}  # type: ignore[assignment]
    state = ModuleState([module])
    module.table["b"] = module.table.pop("a")  # type: ignore[operator]

    assert dict(state.changes()) == {"table.a": False, "table.b": False}


def named(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def test_an_object_that_stands_for_a_copy_while_pytorch_traces_is_known() -> None:
    module = nn.Linear(2, 2)
    copies = Copies([module])
    stand_in = object.__new__(type("Linear", (nn.Linear,), {}))
    stand_in.__dict__ = vars(copies.of(module))

    assert copies.own(stand_in) is module
