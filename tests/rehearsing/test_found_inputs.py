"""Trainings that look usual: each trains as the user's own loop does, or is refused, or a rehearsal finds it."""

from typing import Any

import pytest
import torch

import penstock
from penstock.errors import PenstockError, RehearsalError
from support.found_inputs import FOUND, Found
from support.training import train_by_loop

OWN = ("model", "batches", "accumulation")


def train_by_hand(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The final weights of a loop over the whole batch, or over its microbatches."""
    model, loss_fn, optimizer = (arguments[name] for name in ("model", "loss_fn", "optimizer"))
    parts = arguments["microbatches"] if arguments.get("accumulation") else 1
    train_by_loop(model, arguments["batches"], loss_fn, optimizer, parts)
    return [parameter.detach() for parameter in model.parameters()]


def train_in_a_pipeline(arguments: dict[str, Any]) -> list[torch.Tensor]:
    model = arguments["model"]
    options = {name: value for name, value in arguments.items() if name not in OWN}
    with penstock.Pipeline(model, **options) as pipe:
        for inputs, target in arguments["batches"]:
            pipe.step(inputs, target)
    return [parameter.detach() for parameter in model.parameters()]


def made(found: Found) -> dict[str, Any]:
    torch.manual_seed(0)
    return found.make()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_wrong_numbers_are_found(found: Found) -> None:
    expected = train_by_hand(made(found))
    try:
        trained: list[torch.Tensor] | None = train_in_a_pipeline(made(found))
    except Exception:
        trained = None
    equal = trained is not None and all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(expected, trained, strict=True)
    )

    def make() -> dict[str, Any]:
        return {name: value for name, value in found.make().items() if name != "accumulation"}

    try:
        penstock.rehearse(make, accumulation=found.make().get("accumulation", False))
    except RehearsalError as error:
        assert not equal
        assert "likely cause: " in str(error)
    except PenstockError:
        # It is refused by the pipeline, fails in it, or trains what no optimizer has.
        assert trained is None or "no optimizer steps it" in str(found) or "learned" in found.name
    else:
        assert equal
