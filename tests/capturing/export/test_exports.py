"""A trace is used again for a model in the same state, and for no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing import capture
from support import exports, models

SUBJECT = models.SUBJECTS["skipping"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are traced from now on; none has been before."""
    models, export = [], exports.export  # type: ignore[attr-defined]

    def watched(flat: nn.Module, *arguments: Any, **options: Any) -> Any:
        models.append(flat.model)
        return export(flat, *arguments, **options)

    monkeypatch.setattr(exports, "export", watched)
    monkeypatch.setattr(exports, "_programs", {})
    return models  # type: ignore[return-value]


def test_models_of_one_build_share_a_trace_and_nothing_else(traced: list[nn.Module]) -> None:
    built = [SUBJECT.build() for _ in range(3)]
    chains = [capture(model, SUBJECT.sample) for model in built]

    assert len(traced) == 1
    for model, chain in zip(built, chains, strict=True):
        held = {id(parameter) for layer in chain.layers for parameter in layer.module.parameters()}
        assert held == {id(parameter) for parameter in model.parameters()}
    assert len({id(layer.module) for chain in chains for layer in chain.layers}) == 3 * len(chains[0].layers)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda model: next(model.parameters()).requires_grad_(False),
    "an attribute": lambda model: setattr(model.head, "out_features", 4),
    "another type": lambda model: model.float(),
    "another module": lambda model: setattr(model, "first", nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()),
    "another mode": lambda model: model.first.eval(),
    "a tie": lambda model: setattr(model.second[0], "weight", model.third[0].weight),
    "no mark": lambda model: delattr(model, "built_as"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_traced_anew(change: str, traced: list[nn.Module]) -> None:
    capture(SUBJECT.build(), SUBJECT.sample)
    model = SUBJECT.build()
    CHANGES[change](model)
    capture(model, tuple(tensor.to(next(model.parameters()).dtype) for tensor in SUBJECT.sample))

    assert len(traced) == 2


def test_other_arguments_and_other_types_within_are_traced_anew(traced: list[nn.Module]) -> None:
    def pairs() -> list[Tensor]:
        return [torch.randn(size, 6, dtype=torch.float64) for size in (3, 5)]

    for x in (*pairs(), *pairs()):
        capture(SUBJECT.build(), (x,))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        capture(SUBJECT.build(), SUBJECT.sample)
    capture(SUBJECT.build(), {"x": SUBJECT.sample[0]})

    assert len(traced) == 4
