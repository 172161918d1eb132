"""The runtime on a GPU: ``pytest -m gpu`` where there is one.

PyTorch computes with its deterministic algorithms here, so that float64 has the bits of the oracle, which computes
microbatch by microbatch on the same device. The message says which case is close and not equal to the bit.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import penstock
from support.fork_server import ForkServer
from support.jobs.gpu_jobs import (
    LIMIT_SECONDS,
    allow_waiting,
    answers_over_nccl,
    refusing_to_wait,
    run_deterministically,
    run_without_waiting,
)
from support.jobs.hook_jobs import HOOKED, NORMED, run_hooked
from support.outcome_comparisons import assert_close, assert_same
from support.own_schedules import offloading
from support.processes import Pool
from support.training import Case, run_pipeline, run_reference, stages_on_a_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASE = Case("normalized", "1f1b-flush", 2, 4, "adamw", device="cuda:0")
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "zb-v", "pipedream", "vertical", "2bw")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    allow_waiting()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    allow_waiting()


def case(schedule: str) -> Case:
    """The case under another schedule."""
    return replace(CASE, schedule=schedule, stages_per_rank=stages_on_a_rank(schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_process(schedule: str, ranks: int) -> None:
    """Its ranks compute on a stream each."""
    tried = replace(case(schedule), ranks=ranks)
    if ranks == 1 and schedule in ("interleaved", "zb-v"):
        pytest.skip("has two stages on a rank, of several ranks")
    assert_same(run_reference(tried), run_pipeline(tried))


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b-flush", 1), ("1f1b-flush", 2), ("zb-v", 2), ("pipedream", 2)])
def test_what_is_offloaded_comes_back(schedule: str, ranks: int) -> None:
    """From pinned memory, whose slots the ranks share."""
    tried = replace(case(schedule), ranks=ranks)
    plan: penstock.Plan = tried.options["plan"]
    offloaded = replace(plan, schedule=offloading(plan.definition))
    assert_same(run_reference(tried), run_pipeline(tried, plan=offloaded))


@pytest.mark.parametrize("replicas", [(), (2, 1)], ids=["", "replicas"])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-v", "pipedream", "2bw"])
def test_state_on_the_host_has_the_same_bits(schedule: str, replicas: tuple[int, ...]) -> None:
    tried = replace(case(schedule), replicas=() if schedule == "zb-v" else replicas)
    expected = run_pipeline(tried)
    found = run_pipeline(tried, state_on_host=True)

    assert found.losses == expected.losses
    assert_same(run_reference(tried), found)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
@pytest.mark.parametrize("split", [False, True], ids=["in turn", "split"])
def test_replicas_in_one_process(schedule: str, split: bool) -> None:
    """They share weights, which one of them updates, and sum gradients."""
    tried = replace(case(schedule), replicas=(2, 1), split=split)
    assert_same(run_reference(tried), run_pipeline(tried))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_share_the_device(pool: Pool, schedule: str) -> None:
    expected = run_reference(case(schedule))
    for part in pool.run(2, run_deterministically, case(schedule)):
        assert_same(expected, part)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_replicas_share_the_device(pool: Pool, schedule: str) -> None:
    tried = replace(case(schedule), replicas=(2, 1))
    expected = run_reference(tried)
    for part in pool.run(3, run_deterministically, tried):
        assert_same(expected, part)


@pytest.mark.parametrize(
    ("schedule", "recipe"),
    [*(("2bw", name) for name in HOOKED), *(("pipedream", name) for name in HOOKED if name not in NORMED)],
)
def test_hooks_clipping_and_scaling(schedule: str, recipe: str) -> None:
    """Norms are summed up in another order: absent gradients are left out by the oracle, and zero in the pipeline."""
    assert_close(run_reference(case(schedule), **HOOKED[recipe]), run_hooked(case(schedule), recipe))


def cast_options(schedule: str) -> dict[str, Any]:
    """A perceptron of float32 weights under autocast."""
    tried = replace(case(schedule), subject="perceptron")
    return {**tried.options, "autocast": torch.bfloat16, "sample": (tried.options["sample"][0].float(),)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_is_as_the_oracle_has_it(schedule: str) -> None:
    """To 2 %: products of bfloat16 have 8 bits, and cuBLAS may take another kernel where memory lies differently."""
    tried, options = replace(case(schedule), subject="perceptron"), cast_options(schedule)
    batches = [(x.float(), y) for x, y in tried.batches]
    expected = penstock.reference_train(tried.build().float(), batches, **options)
    pipe = penstock.Pipeline(tried.build().float(), **options)
    losses = [float(pipe.step(x, y).loss) for x, y in batches]
    pipe.close()

    torch.testing.assert_close(losses, list(expected.losses), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_of_low_precision(schedule: str) -> None:
    """What autocast would cast anyway it is given cast: no number changes."""
    tried, options = replace(case(schedule), subject="perceptron"), cast_options(schedule)
    outcomes = []
    for dtype in (None, torch.bfloat16):
        pipe = penstock.Pipeline(tried.build().float(), **{**options, "version_dtype": dtype})
        outcomes.append([float(pipe.step(x.float(), y).loss) for x, y in tried.batches])
        pipe.close()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_what_the_user_computes_between_steps_is_in_order(schedule: str) -> None:
    """Without waiting for the device: weights that are read after a step are the newest, and those that are written
    are what the next step computes with.
    """
    tried = case(schedule)
    pipe = penstock.Pipeline(tried.build(), **tried.options)
    for x, y in tried.batches:
        pipe.step(x, y)
        seen = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        torch.cuda.synchronize()
        for name, p in pipe.named_parameters():
            assert torch.equal(seen[name], p), name
        with torch.no_grad():
            for p in pipe.parameters():
                p.zero_()
    pipe.drain()
    torch.cuda.synchronize()
    pipe.close()


def test_a_wait_for_the_device_is_found_and_allowed_again() -> None:
    there = torch.ones((), device=CASE.device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="synchronizing"), refusing_to_wait(there.device):
            there.item()
        assert torch.cuda.get_sync_debug_mode() == 0
        assert there.item() == 1.0


UNHURRIED: tuple[dict[str, Any], ...] = ({}, {"clip_grad_norm": 1.0}, {"autocast": torch.bfloat16})


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schedule, options)
        for schedule in SCHEDULES
        for options in UNHURRIED
        if "clip_grad_norm" not in options or schedule not in ("pipedream", "vertical")
    ],
    ids=str,
)
def test_a_step_does_not_wait_for_the_device(schedule: str, options: dict[str, Any]) -> None:
    run_without_waiting(case(schedule), options)


@pytest.mark.parametrize("replicas", [(), (2, 1)], ids=["", "replicas"])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_step_of_several_processes_does_not_wait_for_the_device(
    pool: Pool, schedule: str, replicas: tuple[int, ...]
) -> None:
    tried = replace(case(schedule), replicas=replicas)
    pool.run(tried.processes, run_without_waiting, tried, {})


def test_a_timeline_is_of_what_the_device_did() -> None:
    tried = replace(case("2bw"), ranks=4)
    pipe = penstock.Pipeline(tried.build(), **tried.options)
    for x, y in tried.batches * 4:
        pipe.step(x, y)
    timeline = pipe.timeline(2)
    pipe.close()
    kinds = {span.action[1] for span in timeline.spans}

    assert {"F", "B", "U"} <= kinds
    assert all(0 <= span.start_seconds <= span.stop_seconds for span in timeline.spans)
    for rank in range(4):
        forwards = [span for span in timeline.spans if span.rank == rank and span.action[1] == "F"]
        assert all(one.stop_seconds <= other.start_seconds for one, other in pairwise(forwards))


def assert_all_is_well(answers: list[tuple[int | None, str]]) -> None:
    for code, errors in answers:
        assert code == 0, errors


@pytest.mark.parametrize(
    ("schedule", "replicas"), [("1f1b-flush", "1-1"), ("2bw", "1-1"), ("1f1b-flush", "2-1"), ("2bw", "2-1")]
)
def test_nccl_between_processes_that_share_the_device(fork_server: ForkServer, schedule: str, replicas: str) -> None:
    answers = answers_over_nccl(fork_server, schedule, replicas, "one", LIMIT_SECONDS)
    if any("Duplicate GPU detected" in errors for _, errors in answers):
        pytest.skip("NCCL refuses two processes on one GPU, though each says that it is on a host of its own")
    assert_all_is_well(answers)


@pytest.mark.parametrize("replicas", ["1-1", "2-1"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "interleaved", "zb-h1", "pipedream", "2bw"])
def test_nccl_between_gpus(fork_server: ForkServer, schedule: str, replicas: str) -> None:
    needed = sum(int(count) for count in replicas.split("-"))
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    assert_all_is_well(answers_over_nccl(fork_server, schedule, replicas, "own", LIMIT_SECONDS))


def test_nccl_in_a_world_that_is_bound_to_devices(fork_server: ForkServer) -> None:
    """No rank that an edge does not connect has any part in it."""
    if torch.cuda.device_count() < 3:
        pytest.skip("needs 3 CUDA devices")
    assert_all_is_well(answers_over_nccl(fork_server, "1f1b-flush", "2-1", "bound", LIMIT_SECONDS))
