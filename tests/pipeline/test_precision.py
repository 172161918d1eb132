"""Autocast: the same numbers as a plain loop under autocast, for every schedule, recomputed or not."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.parameters.version_slots import ComputeWeights
from penstock.runtime.parameters.weight_versions import VersionedWeights
from support import models
from support.jobs.precision_jobs import CAST, CAST_BATCHES, cast_options, run_cast
from support.training import assert_equal

SCHEDULES = ("gpipe", "1f1b-flush", "pipedream", "vertical", "2bw")


def plain_losses(model: nn.Module, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[float]:
    optimizer = models.momentum(list(model.parameters()))
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


run_once = cache(run_cast)
"""Nothing changes what it returns."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("subject", CAST)
def test_one_microbatch_equals_a_plain_loop_under_autocast(subject: str, dtype: torch.dtype) -> None:
    pipe = penstock.Pipeline(CAST[subject](), **cast_options("gpipe", 3, 1, dtype))

    assert [float(pipe.step(x, y).loss) for x, y in CAST_BATCHES] == plain_losses(CAST[subject](), CAST_BATCHES, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_that_autocast_would_cast_anyway_change_nothing(schedule: str) -> None:
    low = {subject: run_once(subject, schedule, 3, 4, None, version_dtype=torch.bfloat16) for subject in CAST}

    assert_equal(run_once("linear", schedule, 3, 4, None), low["linear"])
    assert run_once("embedded", schedule, 3, 4, None).losses != low["embedded"].losses


def test_versions_take_half_of_the_bytes() -> None:
    for versions in (1, 2, 4):
        plain, low = _slots(versions, None), _slots(versions, torch.bfloat16)

        assert plain == versions * 4 * (100 + 10)
        # One float32 master of the matrix; the bias is as it was.
        assert low == 4 * 100 + versions * (2 * 100 + 4 * 10)


def _slots(versions: int, dtype: torch.dtype | None) -> int:
    """The bytes of the weights of a layer in this number of versions, and of what the optimizer steps."""
    layer = nn.Linear(10, 10)
    chain = penstock.capture(layer, (torch.randn(2, 10),))
    weights = VersionedWeights(
        chain.stage(0, 1), dict(layer.named_parameters()), versions, compute_weights=ComputeWeights(dtype)
    )
    slots = [tensor for slot in weights._slots.tensors for tensor in slot.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*slots, *layer.parameters()]}
    return sum(storages.values())


def test_half_of_the_bytes_cross_a_cut() -> None:
    pipe = penstock.Pipeline(CAST["linear"](), **cast_options("gpipe", 3, 4, torch.bfloat16))
    plain = penstock.Pipeline(CAST["linear"](), **{**cast_options("gpipe", 3, 4, torch.bfloat16), "autocast": None})

    low, full = pipe.measure().layers, plain.measure().layers
    assert low[0].cut_bytes * 2 == full[0].cut_bytes
    # A linear layer saves its input, and the weights that it has cast.
    assert low[2].saved_bytes == full[2].saved_bytes / 2 + 6 * 6 * 2


def test_a_plan_is_made_from_layers_under_autocast() -> None:
    options = {**cast_options("1f1b-flush", 2, 4, torch.bfloat16), "plan": "auto"}
    cast, whole = (
        penstock.Pipeline(CAST["linear"](), **{**options, "autocast": dtype}) for dtype in (torch.bfloat16, None)
    )

    assert cast.auto_plan.profile.layers[0].cut_bytes * 2 == whole.auto_plan.profile.layers[0].cut_bytes


def test_an_autocast_around_the_training_loop_casts_each_version_anew() -> None:
    options = cast_options("pipedream", 3, 4, torch.bfloat16)
    pipe = penstock.Pipeline(CAST["linear"](), **{**options, "autocast": None})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = tuple(float(pipe.step(x, y).loss) for x, y in CAST_BATCHES)

    assert losses == run_once("linear", "pipedream", 3, 4, None).losses


def test_weights_and_gradients_keep_their_type() -> None:
    pipe = penstock.Pipeline(CAST["linear"](), **cast_options("2bw", 3, 4, torch.bfloat16))
    x, y = models.LAYERED.batches[0]
    pipe.step(x.float(), y)

    assert {p.dtype for p in pipe.parameters()} == {torch.float32}
    assert pipe.optimizer is not None
    assert {state["momentum_buffer"].dtype for state in pipe.optimizer.state.values()} == {torch.float32}
