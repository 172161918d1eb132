"""Wrong arguments of values and functions are refused at the door, in four parts.

The rows are those of a hostile reading, which found calls that were accepted in silence or ended in a foreign error.
`test_arguments.py` has what each rule accepts: here is one row, or one for each bound, for every argument that has one.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import CaptureError, PenstockError, PlanError, ProfileError, ScheduleError
from penstock.arguments import explained
from penstock.values.plans import Prediction
from support.refusals import COUNT, Refusal, assert_says
from support.refusals import refused as call

NAN, INF = math.nan, math.inf


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))


X, Y = torch.randn(4, 6), torch.randn(4, 3)
PLAN = penstock.Plan.uniform(4, 2)
PROFILE = penstock.Profile(tuple(penstock.LayerProfile(f"l{n}", 1, 2, 3, 4, 5) for n in range(4)), 2)
CLUSTER = penstock.Cluster.uniform(2, 1e9)
OPTIONS: dict[str, Any] = {
    "sample": (X[:2],),
    "loss_fn": functional.mse_loss,
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def make(**changes: Any) -> penstock.Pipeline:
    return penstock.Pipeline(build(), **{**OPTIONS, **changes})


def reference(**changes: Any) -> Callable[[], object]:
    return lambda: penstock.reference_train(build(), [(X, Y)], **{**OPTIONS, **changes})


class Counted(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index


def stage(*given: Any) -> Callable[[], object]:
    return lambda: penstock.Stage(*given)


def with_metric(value: object) -> Callable[[Tensor, Tensor], Any]:
    return lambda output, target: (functional.mse_loss(output, target), {"m": value})


# Without types, so that wrong arguments can be passed.
A: Any = penstock
PREDICTION: Any = Prediction
VALUES = [
    call("Stage(0, 1, 0)", stage(0, 1, 0), PlanError, "ranks: expected a list or a tuple, found 0"),
    call("Stage('0', 1, (0,))", stage("0", 1, (0,)), PlanError, "start: expected the index of a layer", "found '0'"),
    call("Stage(0, nan, (0,))", stage(0, NAN, (0,)), PlanError, "stop: expected", "found nan"),
    call("Stage(0, 1, ('a',))", stage(0, 1, ("a",)), PlanError, "ranks[0]: expected a rank", "found 'a'"),
    call("Plan(None)", lambda: A.Plan(None), PlanError, "stages: expected a list or a tuple, found nothing"),
    call("Plan((1, 2))", lambda: A.Plan((1, 2)), PlanError, "stages[0]: expected a penstock.Stage, found 1: build it"),
    call("Plan(microbatches='a')", lambda: A.Plan(PLAN.stages, microbatches="a"), PlanError, "microbatches", "'a'"),
    call("Plan(predicted=5)", lambda: A.Plan(PLAN.stages, predicted=5), PlanError, "predicted: expected a Prediction"),
    call("Plan(planner=5)", lambda: A.Plan(PLAN.stages, planner=5), PlanError, "planner: expected text, found 5"),
    call("Plan(routing=5)", lambda: A.Plan(PLAN.stages, routing=5), PlanError, "routing: expected one of", "found 5"),
    call("Plan.uniform('4', 2)", lambda: A.Plan.uniform("4", 2), PlanError, "'4'"),
    call("Plan.balanced(5, 2)", lambda: A.Plan.balanced(5, 2), PlanError, "weights: expected a list", "found 5"),
    call("Plan.load('')", lambda: A.Plan.load(""), PlanError, "path: expected a path, found ''"),
    call("Plan.save(5)", lambda: A.Plan.save(PLAN, 5), PlanError, "path: expected a path, found 5"),
    call("Prediction('a')", lambda: PREDICTION("a", 1, 1, (1,), 1), PlanError, "minibatch_seconds", "'a'"),
    call("Prediction(peak_bytes=5)", lambda: PREDICTION(1, 1, 1, 5, 1), PlanError, "peak_bytes"),
    call("Profile((), 1)", lambda: A.Profile((), 1), ProfileError, "layers: expected one layer or more"),
    call("Profile(5, 1)", lambda: A.Profile(5, 1), ProfileError, "layers: expected a list", "found 5"),
    call("Profile(size '1')", lambda: A.Profile(PROFILE.layers, "1"), ProfileError, "microbatch_size", "found '1'"),
    call("Profile(name=5)", lambda: A.Profile(PROFILE.layers, 1, name=5), ProfileError, "name: expected text, found 5"),
    call("LayerProfile(nan)", lambda: A.LayerProfile("a", NAN, 0, 0, 0, 0), ProfileError, "forward_seconds", "nan"),
    call("Profile.load(5)", lambda: A.Profile.load(5), ProfileError, "path: expected a path, found 5"),
    call("Cluster.uniform('2')", lambda: A.Cluster.uniform("2", 1e9), PlanError, "levels[0].count", "found '2'"),
    call("Cluster.uniform(2, '1')", lambda: A.Cluster.uniform(2, "1"), PlanError, "bytes_per_second", "found '1'"),
    call("Cluster.hierarchical(5)", lambda: A.Cluster.hierarchical(5), PlanError, "levels: expected a list", "found 5"),
    call("Cluster.hierarchical([4])", lambda: A.Cluster.hierarchical([4]), PlanError, "levels[0]: expected a list"),
    call("Cluster.hierarchical([(1,)])", lambda: A.Cluster.hierarchical([(1,)]), PlanError, "(count, bytes per sec"),
    call("Cluster.from_matrix(5)", lambda: A.Cluster.from_matrix(5), PlanError, "bandwidth: expected a list", "5"),
    call("Cluster.from_matrix([['a']])", lambda: A.Cluster.from_matrix([["a"]]), PlanError, "bandwidth[0]", "'a'"),
    call("Cluster(5)", lambda: A.Cluster(5), PlanError, "links: expected LinkLevels or a LinkMatrix, found 5"),
    call("Cluster(memory 'a')", lambda: A.Cluster.uniform(2, 1, "a"), PlanError, "memory_bytes", "found 'a'"),
    call("Cluster.latency('a', 0)", lambda: A.Cluster.latency(CLUSTER, "a", 0), PlanError, "'a'"),
    call("Transformer('a')", lambda: A.Transformer("a", 1, 1), PlanError, "layers", "found 'a'"),
    call("schedule(None)", lambda: A.schedule(None), PlanError, "schedule(plan=)", "nothing", "Plan.uniform"),
    call("schedule('gpipe')", lambda: A.schedule("gpipe"), PlanError, "a penstock.Plan, found 'gpipe'"),
    call("Schedule('gpipe', '2', 2)", lambda: A.Schedule("gpipe", "2", 2), ScheduleError, "ranks", "found '2'"),
    call("Schedule('gpipe', 2, nan)", lambda: A.Schedule("gpipe", 2, NAN), ScheduleError, "microbatches", "nan"),
    call("Schedule(5, 2, 2)", lambda: A.Schedule(5, 2, 2), ScheduleError, "schedule", "5"),
    call("Schedule(vertical_sync=1)", lambda: A.Schedule("pipedream", 2, 2, vertical_sync=1), ScheduleError, "found 1"),
    call("Schedule.step('a')", lambda: A.Schedule("gpipe", 2, 2).step("a"), ScheduleError, "minibatch", "found 'a'"),
    call("Schedule.program('a')", lambda: A.Schedule("gpipe", 2, 2).program("a"), ScheduleError, "found 'a'"),
    call(
        "ScheduleDefinition('a', 5, 5)", lambda: A.ScheduleDefinition("a", 5, 5), ScheduleError,
        "order: expected a function that takes (shape, rank, segment), found 5",
    ),
    call("verify(None)", lambda: A.verify(None), ScheduleError, "verify(schedule=)", "nothing", "schedule(plan)"),
    call(
        "verify(minibatches='a')", lambda: A.verify(penstock.schedule(PLAN), "a"), ScheduleError,
        "verify(minibatches=)", COUNT, "found 'a'",
    ),
    call("render(None)", lambda: A.render(None), ScheduleError, "render(schedule_or_timeline=)", "nothing"),
    call("render(width='a')", lambda: A.render(A.schedule(PLAN), width="a"), ScheduleError, "width", "found 'a'"),
    call("simulate(None)", lambda: A.simulate(None, PROFILE, CLUSTER), PlanError, "schedule_or_plan", "nothing"),
    call("simulate(profile 5)", lambda: A.simulate(PLAN, 5, CLUSTER), PlanError, "profile", "found 5", "Profile.load"),
    call("simulate(cluster 5)", lambda: A.simulate(PLAN, PROFILE, 5), PlanError, "cluster", "found 5", "Cluster.load"),
    call(
        "simulate(minibatches='a')", lambda: A.simulate(PLAN, PROFILE, CLUSTER, "a"), ScheduleError,
        "minibatches", "found 'a'",
    ),
    call(
        "simulate(slowdowns=5)", lambda: A.simulate(PLAN, PROFILE, CLUSTER, slowdowns=5), PlanError,
        "slowdowns: expected a list", "found 5",
    ),
    call("plan(None, None)", lambda: A.plan(None, None), PlanError, "plan(cluster=)", "nothing", "Cluster.uniform"),
    call("plan(5, cluster)", lambda: A.plan(5, CLUSTER), PlanError, "plan(profile=)", "found 5", "Profile.load"),
    call("plan([], cluster)", lambda: A.plan([], CLUSTER), PlanError, "profile", "found none"),
    call("plan(straight=1)", lambda: A.plan(PROFILE, CLUSTER, straight=1), PlanError, "straight", "found 1"),
    call(
        "plan(optimizer_copies=nan)", lambda: A.plan(PROFILE, CLUSTER, optimizer_copies=NAN), PlanError,
        "optimizer_copies", "found nan",
    ),
    call("plan(progress=5)", lambda: A.plan(PROFILE, CLUSTER, progress=5), PlanError, "progress", "True or False"),
    call("plan(planner=5)", lambda: A.plan(PROFILE, CLUSTER, planner=5), PlanError, "planner", "found 5"),
    call("plan(schedule='')", lambda: A.plan(PROFILE, CLUSTER, schedule=""), PlanError, "schedule", "found ''"),
    call("plan(allreduce=5)", lambda: A.plan(PROFILE, CLUSTER, allreduce=5), PlanError, "allreduce", "found 5"),
]  # fmt: skip
TRAINING = [
    call("profile(5, x)", lambda: A.profile(5, X), CaptureError, "profile(model=)", "found 5", "pass the module"),
    call("profile(sample None)", lambda: A.profile(build(), None), CaptureError, "sample"),
    call("profile(warmup=0)", lambda: A.profile(build(), X, warmup=0), ProfileError, "profile(warmup=)", COUNT),
    call("profile(loss_fn=5)", lambda: A.profile(build(), X, loss_fn=5), ProfileError, "(output, target)", "found 5"),
    call("profile(device='gpu')", lambda: A.profile(build(), X, device="gpu"), ProfileError, "cpu, cuda", "'gpu'"),
    call("capture(None)", lambda: A.capture(None, X), CaptureError, "capture(model=)", "nothing"),
    call("capture(size 0)", lambda: A.capture(build(), X, microbatch_size=0), CaptureError, "microbatch_size", COUNT),
    call("loader(5, 2)", lambda: A.loader(5, 2), PenstockError, "loader(dataset=)", "len() and indices", "found 5"),
    call("loader(batch '2')", lambda: A.loader(Counted(), "2"), PenstockError, "(batch_size=)", COUNT, "found '2'"),
    call("loader(seed='a')", lambda: A.loader(Counted(), 2, seed="a"), PenstockError, "loader(seed=)", "found 'a'"),
    call("loader(shuffle=2)", lambda: A.loader(Counted(), 2, shuffle=2), PenstockError, "loader(shuffle=)", "found 2"),
    call(
        "loader(unknown option)", lambda: A.loader(Counted(), 2, num_worker=1), PenstockError,
        "loader(num_worker=)", "found num_worker=1", "Did you mean 'num_workers'?",
    ),
    call("loader(sampler=)", lambda: A.loader(Counted(), 2, sampler=[1]), PenstockError, "loader(sampler=)"),
    call("loader of nothing", lambda: A.loader([], 2), PenstockError, "enough samples", "found 0", "batch_size="),
    call("loader(drop_last)", lambda: A.loader(Counted(), 10, drop_last=True), PenstockError, "found 9", "drop_last"),
    call(
        "loader(ragged)", lambda: A.loader(Counted(), 4, microbatches=2), PenstockError,
        "at least 2 samples", "found 1 in the last one", "drop_last=True",
    ),
    call("prefetch(5)", lambda: A.prefetch(5, "cpu"), PenstockError, "prefetch(batches=)", "found 5", "loader"),
    call("prefetch('gpu')", lambda: A.prefetch([X], "gpu"), PenstockError, "prefetch(device=)", "cpu, cuda", "'gpu'"),
    call("LossScale(inf)", lambda: A.LossScale(INF), PenstockError, "initial", "found inf"),
    call("LossScale(growth=inf)", lambda: A.LossScale(growth=INF), PenstockError, "growth", "1 or more", "found inf"),
    call("LossScale(backoff=0)", lambda: A.LossScale(backoff=0), PenstockError, "backoff", "found 0"),
    call("LossScale(interval=1.5)", lambda: A.LossScale(interval=1.5), PenstockError, "interval", "found 1.5"),
    call("WeightAverage(-1)", lambda: A.WeightAverage(-1), PenstockError, "decay", "found -1", "0.999"),
    call("WeightAverage(1.5)", lambda: A.WeightAverage(1.5), PenstockError, "decay", "found 1.5"),
    call("WeightPrediction('a')", lambda: A.WeightPrediction("a"), PenstockError, "strength", "found 'a'"),
    call("WeightPrediction(inf)", lambda: A.WeightPrediction(INF), PenstockError, "strength", "found inf"),
    call("NamedParameters(3)", lambda: A.NamedParameters(3), PenstockError, "NamedParameters(named=)", "found 3"),
    call("token_count(5)", lambda: A.token_count(5, shifted=True), PenstockError, "token_count(labels=)", "found 5"),
    call("token_count(shifted=1)", lambda: A.token_count(shifted=1), PenstockError, "token_count(shifted=)", "found 1"),
    call("initialize(None)", lambda: A.initialize(None, print), CaptureError, "initialize(model=)", "nothing"),
    call(
        "initialize(a whole model)", lambda: A.initialize(build(), penstock.reset_parameters(build())), PenstockError,
        "expected a model on the meta device",
    ),
    call("Subject(None)", lambda: A.Subject(None, None), PenstockError, "Subject(model=): expected one"),
    call("Subject(model, None)", lambda: A.Subject(build(), None), PenstockError, "Subject(sample=): expected one"),
    call("initialize(init_fn=5)", lambda: A.initialize(build(), 5), PenstockError, "initialize(init_fn=)", "found 5"),
    call("initialize(seed='a')", lambda: A.initialize(build(), print, seed="a"), PenstockError, "seed", "found 'a'"),
    call("initialize(device='gpu')", lambda: A.initialize(build(), print, device="gpu"), PenstockError, "'gpu'"),
    call("reset_parameters(None)", lambda: A.reset_parameters(None), CaptureError, "reset_parameters(model=)"),
    call("load_weights(5)", lambda: A.load_weights(5), penstock.CheckpointError, "load_weights(path=)", "found 5"),
    call("load_weights(rename=5)", lambda: A.load_weights("w", rename=5), PenstockError, "rename", "found 5"),
    call("reference_train(None)", lambda: A.reference_train(None, [], **OPTIONS), CaptureError, "nothing"),
    call("reference_train(seed='a')", reference(seed="a"), PenstockError, "reference_train(seed=)", "found 'a'"),
    call("reference_train(stages=0)", reference(stages=0), PenstockError, "reference_train(stages=)", COUNT),
    call("reference_train(microbatches=0)", reference(microbatches=0), PenstockError, "(microbatches=)", "found 0"),
    call("reference_train(balance='wrk')", reference(balance="wrk"), PenstockError, "(balance=)", "work, layers"),
    call("reference_train(schedule='')", reference(schedule=""), PlanError, "schedule: expected one of", "found ''"),
    call("reference_train(plan={})", reference(plan={}), PlanError, "reference_train(plan=)", "found {}"),
    call("reference_train(loss_fn=None)", reference(loss_fn=None), PenstockError, "loss_fn", "nothing"),
    call("reference_train(optimizer=None)", reference(optimizer=None), PenstockError, "optimizer", "nothing"),
    call("reference_train(drain_after=['a'])", reference(drain_after=["a"]), PenstockError, "drain_after", "'a'"),
    call(
        "reference_train(batches=5)", lambda: A.reference_train(build(), 5, **OPTIONS), PenstockError,
        "batches", "found 5",
    ),
    call(
        "reference_train(batches=[x])", lambda: A.reference_train(build(), [X], **OPTIONS), PenstockError,
        "batches[0]", "(inputs, target)",
    ),
    call(
        "loss_fn metric a str", lambda: make(loss_fn=with_metric("a")).step(X, Y), PenstockError,
        "metric 'm'", "one number", "'a'",
    ),
    call(
        "loss_fn returns None", lambda: make(loss_fn=lambda output, target: None).step(X, Y), PenstockError,
        "one number as a tensor", "None", ".mean()",
    ),
    call(
        "loss_weight(target) a str", lambda: make(loss_weight=lambda target: "a").step(X, Y), PenstockError,
        "loss_weight(target)", "'a'", "one number",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", [*VALUES, *TRAINING])
def test_a_wrong_argument_is_refused(row: Refusal) -> None:
    with pytest.raises(row.error) as caught:
        row.call()

    assert_says(caught.value, row.says)


def public_calls() -> list[str]:
    """The names of Penstock that can be called with keywords."""
    calls = []
    for name in penstock.__all__:
        value = getattr(penstock, name)
        own = not isinstance(value, type) or ("__init__" in vars(value) and not issubclass(value, Exception))
        if own and name not in penstock._VALUES and inspect.signature(value).parameters:
            calls.append(name)
    return calls


@pytest.mark.parametrize("name", public_calls())
def test_a_keyword_that_is_unknown_or_missing_is_named(name: str) -> None:
    parameters = inspect.signature(getattr(penstock, name)).parameters.values()
    keyword = next(each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD))
    needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]

    with pytest.raises(TypeError, match=rf"^{name}\({keyword}_=\): .* Did you mean '{keyword}'\?"):
        getattr(A, name)(**{f"{keyword}_": 1})
    if needed:
        with pytest.raises(TypeError, match=rf"^{name}: expected {', '.join(needed)}, found no {', '.join(needed)}: "):
            getattr(A, name)()


def test_a_type_error_of_the_user_is_his_own() -> None:
    def fails(one: int) -> None:
        len(one)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len"):
        explained(fails)(1)
