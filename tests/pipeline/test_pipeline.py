"""What a user of `Pipeline` relies on beyond the numbers of a step: states that are copies, and no leftovers."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.scheduling.actions import Action
from penstock.timelines.timelines import Timeline
from penstock.torch_internals.pytrees import tree_leaves
from support import models
from support.jobs.trust_jobs import open_and_close
from support.processes import Pool


def save_checkpoint(directory: str) -> list[float]:
    """Two steps, a checkpoint, and the losses of the steps after it."""
    pipe = make(stages=None, schedule="2bw", microbatches=4, optimizer=models.adamw)
    for x, y in SUBJECT.batches[:2]:
        pipe.step(x, y)
    pipe.save(directory)
    return finish(pipe)


def load_checkpoint(directory: str) -> list[float]:
    pipe = make(stages=None, schedule="2bw", microbatches=4, optimizer=models.adamw, seed=5)
    pipe.load(directory)
    return finish(pipe)


def finish(pipe: penstock.Pipeline) -> list[float]:
    losses = [float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[2:]]
    pipe.drain()
    pipe.close()
    return losses


def refusal_of(**options: Any) -> str:
    try:
        make(**{"stages": None, **options})
    except penstock.PlanError as error:
        return str(error)
    return "built"


def build_with_other_weights() -> str:
    """Each rank seeds differently."""
    torch.manual_seed(dist.get_rank())
    model = models.Perceptron().double()
    try:
        penstock.Pipeline(model, sample=SUBJECT.sample, loss_fn=F.cross_entropy, optimizer=models.momentum)
    except penstock.PlanError as error:
        return str(error)
    return "built"


def build_with_other_plans() -> str:
    """Each rank plans differently."""
    cut = 1 + dist.get_rank()
    return refusal_of(plan=penstock.Plan((penstock.Stage(0, cut, (0,)), penstock.Stage(cut, 8, (1,)))))


def build_for_others() -> tuple[str, str]:
    return refusal_of(stages=4), refusal_of(plan=penstock.Plan.uniform(8, 3))


SUBJECT = models.SUBJECTS["normalized"]


def make(model: nn.Module | None = None, **options: Any) -> penstock.Pipeline:
    """A pipeline of two stages over the subject."""
    arguments = {"sample": SUBJECT.sample, "loss_fn": F.cross_entropy, "optimizer": models.momentum, "stages": 2}
    return penstock.Pipeline(model or SUBJECT.build(), **{**arguments, **options})


def train(pipe: penstock.Pipeline, start: int = 0, stop: int = 5) -> list[float]:
    return [float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[start:stop]]


def test_the_loss_is_a_handle_that_prints_as_a_number() -> None:
    loss = make().step(*SUBJECT.batches[0]).loss

    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert loss.item() == float(loss)
    assert str(loss) == str(float(loss))
    assert repr(loss) == f"Loss({float(loss)})"


def test_evaluation_before_training_with_any_batch_size() -> None:
    pipe, model = make(microbatches=4), SUBJECT.build().eval()
    x, y = SUBJECT.batches[0]
    for samples in (1, 2, 3, 5, 16):
        whole = model(x[:samples])

        torch.testing.assert_close(pipe.predict(x[:samples]), whole, rtol=0, atol=1e-12)
        loss = F.cross_entropy(whole, y[:samples]).item()
        assert float(pipe.evaluate(x[:samples], y[:samples]).loss) == pytest.approx(loss, rel=1e-12)


def test_evaluation_between_steps_changes_no_flushing_run() -> None:
    plain, evaluated = make(microbatches=4), make(microbatches=4)
    losses = []
    for x, y in SUBJECT.batches:
        losses.append(float(evaluated.step(x, y).loss))
        evaluated.evaluate(x[:5], y[:5])

    assert losses == train(plain)
    for name, tensor in plain.state_dict()["model"].items():
        assert torch.equal(tensor, evaluated.state_dict()["model"][name]), name


def test_the_model_is_trained_in_place() -> None:
    model = SUBJECT.build()
    pipe = make(model, schedule="2bw", microbatches=2)
    train(pipe)
    state = pipe.state_dict()["model"]

    assert set(state) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    named = dict(pipe.named_parameters())
    assert dict(model.named_parameters()).keys() == named.keys()
    assert all(p is named[name] for name, p in model.named_parameters())


def test_parameters_are_iterated_as_those_of_a_module() -> None:
    model = SUBJECT.build()
    pipe = make(model)

    assert [(name, id(p)) for name, p in pipe.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
    assert next(pipe.parameters()) is next(model.parameters())
    assert [n for n, _ in pipe.named_parameters("net")] == [n for n, _ in model.named_parameters("net")]


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_a_state_dict_continues_a_run_on_other_stages(schedule: str) -> None:
    pipe = make(schedule=schedule, microbatches=4, optimizer=models.adamw)
    train(pipe, stop=2)
    state = copy.deepcopy(pipe.state_dict())
    expected = train(pipe, start=2)

    torch.manual_seed(99)
    same = make(schedule=schedule, microbatches=4, optimizer=models.adamw, seed=42)
    same.load_state_dict(state)
    assert train(same, start=2) == expected
    if schedule != "pipedream":
        # Under pipedream the staleness, and so the numbers, depend on the number of stages.
        other = make(schedule=schedule, microbatches=4, optimizer=models.adamw, stages=3)
        other.load_state_dict(state)
        assert train(other, start=2) == expected


def test_a_checkpoint_of_three_processes_continues_on_two_and_one(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(3, save_checkpoint, str(tmp_path / "saved"))

    assert pool.run(2, load_checkpoint, str(tmp_path / "saved"))[0] == expected[0]
    pipe = make(schedule="2bw", microbatches=4, optimizer=models.adamw, stages=1)
    pipe.load(tmp_path / "saved")
    assert train(pipe, start=2) == expected[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_state_that_does_not_fit() -> None:
    pipe = make()
    state = pipe.state_dict()
    whole = {name: tensor.clone() for name, tensor in state["model"].items()}
    with pytest.raises(penstock.CheckpointError, match="the state dict has no part 'model'"):
        pipe.load_state_dict({})
    lacking = {name: tensor for name, tensor in whole.items() if name != "head.bias"}
    with pytest.raises(penstock.CheckpointError, match=r"the state dict has no 'head\.bias', which this rank holds"):
        pipe.load_state_dict({**state, "model": lacking})
    wrong = r"head\.bias has shape and type \(4,\) .* in the state dict and \(3,\)"
    with pytest.raises(penstock.CheckpointError, match=wrong):
        pipe.load_state_dict({**state, "model": {**whole, "head.bias": torch.zeros(4)}})
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with pytest.raises(penstock.CheckpointError, match=r"the optimizer's state has no 'blocks\.0\.linear\.weight'"):
        pipe.load_state_dict({**state, "model": zeros, "optimizer": {}})
    with pytest.raises(penstock.CheckpointError, match="the state dict has no part 'pipeline'"):
        pipe.load_state_dict({"model": zeros, "optimizer": state["optimizer"]})
    for name, tensor in pipe.state_dict()["model"].items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": "2bw", "stages": 3, "microbatches": 2}, penstock.ScheduleError, "need at least 3 microbatches"),
        ({"plan": penstock.Plan.uniform(7, 2), "stages": None}, penstock.PlanError, "the plan is for 7 layers and"),
        ({"plan": penstock.Plan.uniform(8, 3)}, penstock.PlanError, "stages=2 contradicts the plan"),
        ({"vertical_sync": True}, penstock.ScheduleError, "vertical_sync=True belongs to 'pipedream' only"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make(**options)

    assert message in str(caught.value)


def test_a_loss_that_is_no_number() -> None:
    pipe = make(loss_fn=lambda output, target: output)
    with pytest.raises(penstock.PenstockError, match="must return one number as a tensor") as caught:
        pipe.step(*SUBJECT.batches[0])

    assert "penstock: this was action 1F0@0 of rank 1" in caught.value.__notes__[0]
    assert "penstock: the pipeline has failed" in caught.value.__notes__[1]


def look_back(minibatches: int) -> tuple[Timeline, tuple[tuple[Action, ...], ...]]:
    """The last steps of a run, and the programs of the last one."""
    pipe = make(stages=None if dist.is_initialized() else 2, schedule="1f1b-flush", microbatches=4)
    train(pipe)
    found = pipe.timeline(minibatches), pipe.schedule.step(len(SUBJECT.batches) - 1)
    pipe.close()
    return found


def test_the_timeline_holds_what_was_run_in_every_process(pool: Pool) -> None:
    number = len(SUBJECT.batches)
    for timeline, programs in (look_back(1), *pool.run(3, look_back, 1)):
        for rank, program in enumerate(programs):
            assert [span.action for span in timeline.spans if span.rank == rank] == [str(action) for action in program]
        assert 0 <= timeline.bubble < 1
        assert timeline.title == f"{type(SUBJECT.build()).__name__}, 1f1b-flush, steps {number} to {number}"
    timeline, programs = look_back(3)
    assert timeline.title.endswith(f", steps {number - 2} to {number}")
    assert len(timeline.spans) == 3 * sum(map(len, programs))


def test_the_profile_is_of_the_models_layers() -> None:
    pipe = make()
    before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    profile = pipe.measure(iterations=2)

    assert [layer.name for layer in profile.layers] == [*(f"blocks.{index}" for index in range(7)), "head"]
    assert profile.layers[-1].parameter_bytes == 8 * (6 * 3 + 3)
    assert all(layer.update_seconds > 0 for layer in profile.layers)
    for name, tensor in pipe.state_dict()["model"].items():
        assert torch.equal(tensor, before[name]), name
    assert pipe.auto_plan is None


def test_an_exception_passes_a_with_block_as_it_is() -> None:
    with pytest.raises(OSError, match="the data set is gone") as caught, make(schedule="pipedream") as pipe:
        train(pipe)
        raise OSError("the data set is gone")

    assert caught.value.__context__ is None


def test_a_failure_that_was_caught_in_a_with_block_is_no_new_one() -> None:
    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("the loss is broken")

    with make(loss_fn=fail) as pipe:
        for error, words in ((ValueError, "the loss is broken"), (penstock.PenstockError, "failed before")):
            with pytest.raises(error, match=words):
                train(pipe)


def test_a_timeline_before_the_first_step() -> None:
    timeline = make().timeline()

    assert timeline.spans == ()
    assert timeline.seconds == 0


def test_processes_must_agree(pool: Pool) -> None:
    for message in pool.run(2, build_with_other_weights):
        assert re.search(r"rank \d has weights .* and sum .* and rank \d has weights", message)
        assert "call torch.manual_seed(...) with one seed before building the model" in message
    for message in pool.run(2, build_with_other_plans):
        assert re.search(r"(?s)rank \d has plan .* and rank \d has plan .*: expected the same on all ranks", message)


def test_stages_and_plans_for_another_number_of_processes(pool: Pool) -> None:
    for stages, plan in pool.run(2, build_for_others):
        assert "stages=4 needs 4 processes, 2 were started" in stages
        assert "the plan is for 3 rank(s) and 2 process(es) were started" in plan


def equal(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(torch.equal(one, two) if isinstance(one, Tensor) else one == two for one, two in pairs)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_later_steps_leave_a_state_dict_as_it_is(schedule: str) -> None:
    """Under pipedream and 2bw, updates write later versions of the weights to other memory, in turn."""
    pipe = penstock.Pipeline(
        SUBJECT.build(),
        sample=SUBJECT.sample,
        loss_fn=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        update_hooks=penstock.WeightAverage(0.9),
        schedule=schedule,
        stages=2,
        microbatches=2,
    )
    pipe.step(*SUBJECT.batches[0])
    state = pipe.state_dict()
    expected = copy.deepcopy(state)
    losses = []
    for _ in range(2):
        losses.append([float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[1:4]])
        pipe.drain()
        assert equal(state, expected)
        pipe.load_state_dict(state)

    assert losses[0] == losses[1]


def test_weights_that_are_tied_share_memory_in_a_state_dict() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = torch.ones(2, 4)
    pipe = penstock.Pipeline(model, (x,), F.mse_loss, models.plain, stages=2)
    state = pipe.state_dict()["model"]

    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != model[0].weight.data_ptr()


PIPELINES = int(os.environ.get("PENSTOCK_TEST_PIPELINES", "10"))
"""How many are opened. Two hundred take two minutes."""
BOTH = pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])


@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("end", ["closed", "in flight", "failed", "dropped"])
def test_pipelines_leave_nothing_behind(pool: Pool, shared: bool, end: str) -> None:
    for before, after in pool.run(2, open_and_close, PIPELINES // (2 if end == "failed" else 1), shared, end, False):
        assert after.is_within(before), (before, after)


def test_replicas_leave_nothing_behind(pool: Pool) -> None:
    for before, after in pool.run(2, open_and_close, PIPELINES, False, "closed", True):
        assert after.is_within(before), (before, after)


@pytest.mark.parametrize("end", ["closed", "in flight", "dropped"])
def test_pipelines_of_one_process_leave_nothing_behind(end: str) -> None:
    before, after = open_and_close(PIPELINES, True, end, False)

    assert after.is_within(before), (before, after)
