"""Weights that several stages share: one gradient, the sum over the stages, and one value everywhere."""

import pytest
import torch
import torch.nn.functional as F

import penstock
from support.jobs.transformer_jobs import Run, make_pipeline, run_in_pipeline, run_plainly, run_reference
from support.training import assert_equal
from support.trainings import Training, run_training


@pytest.mark.parametrize(("subject", "cuts"), [("gpt2-tied", ()), ("bert-tied", ()), ("shared-experts", (3,))])
def test_the_numbers_are_those_of_a_plain_loop(subject: str, cuts: tuple[int, ...]) -> None:
    run = Run(subject, "1f1b-flush", 2, cuts=cuts)
    actual, plain = run_in_pipeline(run), run_plainly(subject)

    assert_equal(run_reference(run), actual)
    # A tolerance: the unsplit model sums the uses of a weight microbatch by microbatch, the stages each sum their own
    # use over the microbatches first.
    assert actual.losses == pytest.approx(plain.losses, rel=1e-12)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(actual.state[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["in turn", "split"])
def test_stages_with_different_numbers_of_replicas_may_not_share(replicas: tuple[int, int], split: bool) -> None:
    with pytest.raises(penstock.PlanError) as caught:
        make_pipeline(Run("gpt2-tied", "gpipe", 2, replicas=replicas, split=split))

    assert str(caught.value) == (
        "transformer.wte.weight is shared by stages with different numbers of replicas "
        f"(stage 0: {replicas[0]}, stage 1: {replicas[1]}): expected equal numbers, since replica q of one exchanges "
        "its gradients with replica q of the other. Give them equally many ranks, or plan the layers that share the "
        "weight into one stage"
    )


def test_stages_that_update_behind_every_microbatch_may_not_share() -> None:
    with pytest.raises(penstock.PlanError) as caught:
        make_pipeline(Run("gpt2-tied", "pipedream", 3))

    assert str(caught.value) == (
        "weights are shared across stages: transformer.wte.weight (stages 0, 2). Under 'pipedream' every stage updates "
        "at its own time, so the copies would drift apart. Use a flushing schedule (gpipe, 1f1b-flush, interleaved, "
        "spp, zb-h1, zb-v, v-half, v-min, breadth-first) or 2bw, untie the weights, or plan the layers that share "
        "them into one stage"
    )


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_layers_of_one_stage_may_share_under_every_schedule(schedule: str) -> None:
    run = Run("neighbours", schedule, 3, cuts=(2, 5))

    assert make_pipeline(run).schedule.ties == ()
    assert_equal(run_reference(run), run_in_pipeline(run))


@pytest.mark.parametrize("transposed", [False, True])
def test_two_parameters_in_one_memory_are_refused_in_two_stages_only(transposed: bool) -> None:
    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    last.weight.data = first.weight.data.T if transposed else first.weight.data
    x = torch.ones(2, 4)

    def step(stages: int) -> None:
        model = torch.nn.Sequential(first, torch.nn.Tanh(), last)
        with penstock.Pipeline(
            model, (x,), torch.nn.MSELoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), stages=stages
        ) as pipe:
            pipe.step(x, x)

    with pytest.raises(penstock.PlanError, match=r"0.weight and 2.weight: .* two of stages 0 and 1 in one"):
        step(2)
    step(1)


def test_the_oracle_is_delayed_training() -> None:
    """W(t+1) = W(t) - update of the gradient at W(t-1), written out for the whole model, in which layers share."""
    training = Training("2bw", 2, 2, "tied ends", optimizer="adamw")
    model = training.build()
    weights = list(model.parameters())
    optimizer = training.options["optimizer"](weights)
    older = newer = [weight.detach().clone() for weight in weights]
    for x, y in training.batches:
        for weight, value in zip(weights, older, strict=True):
            weight.data = value.clone()
        for part, target in zip(x.split(8), y.split(8), strict=True):
            (F.cross_entropy(model(part), target) * 0.5).backward()
        for weight, value in zip(weights, newer, strict=True):
            weight.data = value.clone()
        optimizer.step()
        optimizer.zero_grad()
        older, newer = newer, [weight.detach().clone() for weight in weights]
    (outcome,) = run_training(training, "")

    for name, weight in model.named_parameters(remove_duplicate=False):
        # A tolerance: stages sum their own uses of a weight over the microbatches first.
        torch.testing.assert_close(outcome.state[name], weight, rtol=1e-12, atol=1e-12)
