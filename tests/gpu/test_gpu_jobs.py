"""What the tests of a GPU have computed, tried on a CPU: that it runs at all is known before there is a card."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock
from support.fork_server import ForkServer
from support.jobs.gpu_jobs import answers_over_nccl, run_compiled_aside, run_deterministically, run_without_waiting
from support.outcome_comparisons import assert_close, assert_same, on_host
from support.processes import Pool
from support.training import Case, Outcome, assert_equal, run_reference, stages_on_a_rank

CASE = Case("normalized", "1f1b-flush", 2, 4, "adamw")
OUTCOME = Outcome(
    (2.0, 1.5), {"linear.weight": torch.tensor([1.0, 0.1], dtype=torch.float64), "linear.bias": torch.zeros(2)}
)


def changed(name: str, by: float) -> Outcome:
    """The outcome with another first number in one of its tensors."""
    state = {key: tensor.clone() for key, tensor in OUTCOME.state.items()}
    state[name][0] += by
    return replace(OUTCOME, state=state)


def test_outcomes_that_are_equal() -> None:
    assert_same(OUTCOME, on_host(OUTCOME))


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (
            changed("linear.weight", 2.0**-52),
            r"not to the bit: 1 of 2 losses and 2 tensors differ.*linear.weight 2.2e-16",
        ),
        (replace(OUTCOME, losses=(2.0, 1.5 + 2.0**-51)), r"not to the bit: 1 of .* differ.* loss 1 4.4e-16"),
        (changed("linear.bias", 1e-8), r"not to the bit: 1 of .*linear.bias 1.0e-08"),
        (changed("linear.weight", 1e-11), "linear.weight: Tensor-likes are not close"),
        (changed("linear.bias", 1e-5), "linear.bias: Tensor-likes are not close"),
        (replace(OUTCOME, losses=(2.0, 1.5 + 1e-11)), "not close"),
        (replace(OUTCOME, losses=(2.0,)), "assert 1 == 2"),
    ],
)
def test_outcomes_that_differ(actual: Outcome, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_same(OUTCOME, actual)


def test_what_rounding_becomes_in_a_training_is_close() -> None:
    """Weights that differ in the last bit, as products on a GPU may."""
    expected, model = run_reference(CASE), CASE.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(1 + 2.0**-52)
    found = penstock.reference_train(model, CASE.batches, **CASE.options)
    assert_close(expected, Outcome(found.losses, found.state))
    with pytest.raises(AssertionError, match="not to the bit"):
        assert_same(expected, Outcome(found.losses, found.state))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"autocast": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "gpipe", "2bw"])
def test_steps_of_one_process(schedule: str, options: dict[str, Any]) -> None:
    run_without_waiting(replace(CASE, schedule=schedule, stages_per_rank=stages_on_a_rank(schedule)), options)


@pytest.mark.slow
def test_jobs_of_the_pool(pool: Pool) -> None:
    replicated = replace(CASE, replicas=(2, 1))
    pool.run(3, run_without_waiting, replicated, {})
    expected = run_reference(replicated)
    for part in pool.run(3, run_deterministically, replicated):
        assert_equal(expected, part)
    skipping = replace(CASE, subject="skipping")
    expected = run_reference(skipping)
    for part in pool.run(2, run_compiled_aside, skipping, {"backend": "eager"}):
        assert_equal(expected, part)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b-flush", "1-1"), ("2bw", "2-1")])
def test_the_script_that_trains_over_nccl(fork_server: ForkServer, schedule: str, replicas: str) -> None:
    for code, errors in answers_over_nccl(fork_server, schedule, replicas, "none", 60):
        assert (code, errors) == (0, "")


def test_the_script_ends_by_itself_and_says_where_it_was(fork_server: ForkServer) -> None:
    for code, errors in answers_over_nccl(fork_server, "2bw", "1-1", "none", 10.01):
        assert code == 1
        assert "Timeout" in errors and "nccl_script.py" in errors
