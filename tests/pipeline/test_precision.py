"""Autocast: the same numbers as a plain loop under autocast, for every schedule, recomputed or not."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.oracle.references import Reference
from penstock.runtime.parameters.weight_versions import ComputeWeights, VersionedWeights
from support import models
from support.jobs.precision_jobs import CAST, cast_options, run_cast, run_low
from support.processes import Pool

SCHEDULES = ("gpipe", "1f1b-flush", "pipedream", "vertical", "2bw")


def plain_losses(model: nn.Module, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[float]:
    """The losses of a loop in one process."""
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


@cache
def reference(subject: str, schedule: str, **more: Any) -> Reference:
    """The oracle's run of three stages under bfloat16."""
    batches = [(x.float(), y) for x, y in models.LAYERED.batches]
    return penstock.reference_train(CAST[subject](), batches, **cast_options(schedule, 3, 4, torch.bfloat16), **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("subject", CAST)
def test_one_microbatch_equals_a_plain_loop_under_autocast(subject: str, dtype: torch.dtype) -> None:
    pipe = penstock.Pipeline(CAST[subject](), **cast_options("gpipe", 3, 1, dtype))

    batches = [(x.float(), y) for x, y in models.LAYERED.batches]
    assert [float(pipe.step(x, y).loss) for x, y in batches] == plain_losses(CAST[subject](), batches, dtype)


@pytest.mark.parametrize("subject", CAST)
@pytest.mark.parametrize("recompute", [None, True, "layers"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_equals_the_oracle(schedule: str, recompute: object, subject: str) -> None:
    losses, state = run_once(subject, schedule, 3, 4, recompute)
    expected = reference(subject, schedule)

    assert tuple(losses) == expected.losses
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())


@pytest.mark.parametrize("subject", CAST)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_of_low_precision_equal_the_oracle(schedule: str, subject: str) -> None:
    expected = reference(subject, schedule, version_dtype=torch.bfloat16)
    for recompute in (None, "layers"):
        losses, state = run_once(subject, schedule, 3, 4, recompute, version_dtype=torch.bfloat16)

        assert tuple(losses) == expected.losses
        assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_that_autocast_would_cast_anyway_change_nothing(schedule: str) -> None:
    losses, state = run_once("linear", schedule, 3, 4, None, version_dtype=torch.bfloat16)
    expected, weights = run_once("linear", schedule, 3, 4, None)

    assert losses == expected
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
    assert (
        run_once("embedded", schedule, 3, 4, None)[0]
        != (run_once("embedded", schedule, 3, 4, None, version_dtype=torch.bfloat16)[0])
    )


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


def test_a_precision_that_nothing_computes_in_is_refused() -> None:
    options = {**cast_options("2bw", 3, 4, torch.bfloat16), "autocast": None, "version_dtype": torch.bfloat16}
    with pytest.raises(penstock.PenstockError, match=r"found torch.bfloat16.*: pass both"):
        penstock.Pipeline(CAST["linear"](), **options)


def test_low_precision_and_hooks_together() -> None:
    batches = [(x.float(), y) for x, y in models.LAYERED.batches]
    options = {
        **cast_options("2bw", 3, 4, torch.bfloat16),
        "version_dtype": torch.bfloat16,
        "update_hooks": [penstock.WeightPrediction()],
        "clip_grad_norm": 0.5,
    }
    expected = penstock.reference_train(CAST["typed"](), batches, **options)
    pipe = penstock.Pipeline(CAST["typed"](), **options)

    assert tuple(float(pipe.step(x, y).loss) for x, y in batches) == expected.losses
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in pipe.state_dict()["model"].items())


def test_low_precision_in_several_processes(pool: Pool) -> None:
    for schedule in ("pipedream", "2bw"):
        expected, _ = run_once("embedded", schedule, 3, 4, None, version_dtype=torch.bfloat16)
        for losses, _ in pool.run(3, run_low, schedule):
            assert losses == expected


def test_autocast_in_several_processes(pool: Pool) -> None:
    expected, _ = run_once("linear", "2bw", 3, 4, None)
    for losses, _ in pool.run(3, run_cast, "linear", "2bw", 3, 4, None):
        assert losses == expected


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
    batches = [(x.float(), y) for x, y in models.LAYERED.batches]
    options = cast_options("pipedream", 3, 4, torch.bfloat16)
    pipe = penstock.Pipeline(CAST["linear"](), **{**options, "autocast": None})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [float(pipe.step(x, y).loss) for x, y in batches]

    assert losses == run_once("linear", "pipedream", 3, 4, None)[0]


def test_weights_and_gradients_keep_their_type() -> None:
    pipe = penstock.Pipeline(CAST["linear"](), **cast_options("2bw", 3, 4, torch.bfloat16))
    x, y = models.LAYERED.batches[0]
    pipe.step(x.float(), y)

    assert {p.dtype for p in pipe.parameters()} == {torch.float32}
    assert pipe.optimizer is not None
    assert {state["momentum_buffer"].dtype for state in pipe.optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("autocast", [torch.float32, "bf16", True])
def test_a_wrong_type_is_explained(autocast: object) -> None:
    options = {**cast_options("gpipe", 3, 4, torch.bfloat16), "autocast": autocast}
    with pytest.raises(penstock.PenstockError, match=r"autocast: expected torch.bfloat16 or torch.float16"):
        penstock.Pipeline(CAST["linear"](), **options)
