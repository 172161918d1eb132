"""Weights that several stages share: one gradient, the sum over the stages, and one value everywhere."""

import pytest
import torch

import penstock
from support.jobs.transformer_jobs import (
    SUBJECTS,
    Run,
    make_pipeline,
    run_in_pipeline,
    run_plainly,
    run_reference,
    run_these,
)
from support.processes import Pool
from support.training import assert_equal, assert_ranks_equal

# On two ranks of two stages each, "every-second" shares a weight between stages of one rank (0 and 2), "three-sharing"
# between stages of one rank and one of the other (0, 2 and 3).
RUNS = [
    *(Run(subject, "1f1b-flush", 2) for subject in ("gpt2-tied", "bert-tied")),
    Run("gpt2-tied", "gpipe", 3),
    Run("gpt2-tied", "interleaved", 4, stages_per_rank=2),
    *(Run("three-sharing", schedule, 3, cuts=(2, 4)) for schedule in ("1f1b-flush", "zb-h1")),
    Run("gpt2-tied", "zb-h1", 2),
    # Which gradients there are depends on the data.
    Run("shared-experts", "1f1b-flush", 3, cuts=(2, 4)),
    Run("shared-experts", "gpipe", 2, cuts=(3,)),
    Run("three-sharing", "zb-v", 4, stages_per_rank=2, cuts=(2, 3, 4)),
    *(
        Run(subject, "interleaved", 4, stages_per_rank=2, cuts=(2, 3, 4))
        for subject in ("every-second", "three-sharing")
    ),
]

REPLICATED = [
    Run("gpt2-tied", "1f1b-flush", 2, replicas=(2, 2)),
    Run("bert-tied", "1f1b-flush", 2, replicas=(2, 2), split=True),
    Run("three-sharing", "gpipe", 2, cuts=(4,), replicas=(2, 2)),
    Run("shared-experts", "1f1b-flush", 2, cuts=(3,), replicas=(2, 2)),
    *(
        Run(subject, "interleaved", 4, stages_per_rank=2, cuts=(2, 3, 4), replicas=(2, 2), split=split)
        for subject, split in (("three-sharing", False), ("every-second", False), ("three-sharing", True))
    ),
    Run("every-second", "zb-v", 4, stages_per_rank=2, cuts=(2, 3, 4), replicas=(2, 2)),
]
"""Two parallel pipelines of two ranks."""


def ident(run: Run) -> str:
    replicas = "-".join(map(str, run.replicas)) + ("-split" if run.split else "")
    return f"{run.subject}-{run.schedule}-{run.stages}{replicas and f'-on-{replicas}'}"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("run", RUNS + REPLICATED, ids=ident)
def test_one_process(run: Run) -> None:
    actual, plain = run_in_pipeline(run), run_plainly(run.subject)

    assert_equal(run_reference(run), actual)
    assert set(actual.state) == set(SUBJECTS[run.subject].build().state_dict())
    # A tolerance: the unsplit model sums the uses of a weight microbatch by microbatch, the stages each sum their own
    # use over the microbatches first.
    assert actual.losses == pytest.approx(plain.losses, rel=1e-12)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(actual.state[name], tensor, rtol=1e-12, atol=1e-12)


def test_parallel_pipelines_in_several_processes(pool: Pool) -> None:
    runs = [REPLICATED[0], *(run for run in REPLICATED if run.subject in ("three-sharing", "shared-experts"))]
    assert_ranks_equal(pool.run(4, run_these, runs), [run_reference(run) for run in runs])


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes(pool: Pool, ranks: int) -> None:
    runs = [run for run in RUNS if run.stages == ranks * run.stages_per_rank]
    outcomes = pool.run(ranks, run_these, runs)
    assert_ranks_equal(outcomes, [run_reference(run) for run in runs])
    for run, parts in zip(runs, zip(*outcomes, strict=True), strict=True):
        # Each rank has its copies of the shared weights under all their names, and they are equal.
        shared = {name for part in parts for name in part.state if sum(name in other.state for other in parts) > 1}
        assert shared or run.subject == "every-second"


def test_stages_that_update_behind_every_microbatch_may_not_share() -> None:
    with pytest.raises(penstock.PlanError) as caught:
        make_pipeline(Run("gpt2-tied", "pipedream", 3))

    assert str(caught.value) == (
        "weights are shared across stages: transformer.wte.weight (stages 0, 2). Under 'pipedream' every stage updates "
        "at its own time, so the copies would drift apart. Use a flushing schedule (gpipe, 1f1b-flush, interleaved, "
        "spp, zb-h1, zb-v, v-half, v-min) or 2bw, untie the weights, or plan the layers that share them into one stage"
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
