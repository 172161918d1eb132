"""Wrong uses of the public interface are refused at the door, in four parts, and nothing has changed after it.

A row has the call and what the error says: where, what was expected, what was found, and what to do. The rows are those
of a hostile reading, which found calls that were accepted in silence or ended in a foreign error. Each argument with a
rule has one row, or one for each bound: `tests/test_arguments.py` has what a rule accepts.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import penstock
from penstock import CaptureError, PenstockError, PlanError, ProfileError
from support.models import sgd
from support.refusals import COUNT, Refusal, assert_says, refused

NAN, INF = math.nan, math.inf


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))


X, Y = torch.randn(4, 6), torch.randn(4, 3)


OPTIONS: dict[str, Any] = {
    "sample": (X[:2],),
    "loss_fn": functional.mse_loss,
    "optimizer": sgd,
    "schedule": "gpipe",
    "stages": 2,
    "microbatches": 2,
}


def make(**changes: Any) -> penstock.Pipeline:
    return penstock.Pipeline(**{**OPTIONS, "model": build(), **changes})


def option(error: type[PenstockError] = PenstockError, **wrong: Any) -> Callable[..., Any]:
    """A row for `Pipeline` with the one option `wrong`; it can be called with other options."""
    ((name, value),) = wrong.items()
    # An address in a name would be another one in every process.
    shown = " ".join(re.sub(r"<(\w+) .* at 0x\w+>", r"a \1", repr(value)).split())[:40]

    def row(*says: str) -> Any:
        wrongly = partial(make, **wrong)
        return refused(f"Pipeline({name}={shown})", wrongly, error, name, "expected", "found", *says)

    return row


def modelled(name: str, model: Callable[[], object], *says: str) -> Any:
    """A row for `Pipeline` with a model that is made when the test runs."""
    return refused(f"Pipeline({name})", lambda: make(model=model()), CaptureError, "Pipeline(model=)", *says)


class Unfit(torch.optim.SGD):
    """An optimizer whose step needs an argument."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Named like the one of PyTorch, which needs a process group."""


def parts(optimizer: torch.optim.Optimizer) -> Any:
    return StepLR(optimizer, 1)


FOREIGN = nn.Parameter(torch.zeros(3))
OTHERS = build()
TWO_PREDICTIONS = [penstock.WeightPrediction(), penstock.WeightPrediction(0.5)]
PIPELINES = [
    option(CaptureError, model=None)("Pipeline(model=)", "nothing", "pass the module itself"),
    option(CaptureError, model=5)("found 5"),
    option(CaptureError, model=nn.Linear)("the class Linear", "Linear(...)"),
    option(CaptureError, model={"weight": 1})("load a state dict"),
    option(CaptureError, model=[nn.Linear(6, 3), 5])("found 5", "make it a layer"),
    modelled("a lazy Linear", lambda: nn.LazyLinear(3), "weights with shapes", "weight", "call the model once"),
    modelled("DataParallel", lambda: nn.DataParallel(build()), "the module itself", "DataParallel", "model.module"),
    modelled("a compiled model", lambda: torch.compile(build()), "torch.compile made of Sequential", "compile=True"),
    modelled("a scripted model", lambda: torch.jit.script(build()), "a module of Python", "before torch.jit.script"),
    option(CaptureError, sample=None)("sample", "a tuple of positional arguments"),
    option(CaptureError, sample=5)("sample", "write sample=(value,)"),
    option(schedule="gpip", error=PlanError)("Did you mean 'gpipe'?"),
    option(schedule=5, error=PlanError)("found 5", "1f1b-flush"),
    option(microbatches=0, error=PlanError)("Pipeline(microbatches=)", "from 1 to 65536", "found 0", "give one"),
    option(microbatches=10**9, error=PlanError)("from 1 to 65536", "found 1000000000"),
    option(stages=0, error=PlanError)(COUNT),
    refused("Pipeline(stages=99)", partial(make, stages=99), PlanError, "4 layers into 99", "expected", "Use fewer"),
    option(plan={}, error=PlanError)("found {}", "penstock.Plan.load(path)"),
    option(plan=Path("plan.yaml"), error=PlanError)("plan.yaml", "penstock.Plan.load(path)"),
    option(plan="plan.yaml", error=PlanError)("'plan.yaml'", "penstock.Plan.load('plan.yaml')"),
    option(tensor_parallel=0, error=PlanError)(COUNT),
    option(vertical_sync=1, error=PlanError)("True or False", "found 1"),
    option(balance="wrk", error=PlanError)("Did you mean 'work'?"),
    option(recompute=2, error=PlanError)("found 2", "{1}"),
    option(recompute="layer", error=PlanError)("found 'layer'"),
    option(recompute={7}, error=PlanError)("from 0 to 1", "found 7"),
    option(recompute={True}, error=PlanError)("found True"),
    option(recompute=["a"], error=PlanError)("found 'a'"),
    option(compile=5, error=PlanError)("True, False or the arguments"),
    option(seed="a")("a whole number", "found 'a'", "give one such as 0"),
    option(seed=2**63)("found 9223372036854775808"),
    option(init_fn=5)("takes (name, tensor)", "penstock.reset_parameters(model)"),
    option(init_fn=lambda name: None)("takes (name, tensor)"),
    option(parallelize=5)("takes (stage_module, mesh)", "docs/composition.md"),
    option(loss_fn=None)("takes (output, target)", "nothing", "cross_entropy"),
    option(loss_fn=lambda output: output.sum())("takes (output, target)", "cross_entropy"),
    option(loss_fn=nn.CrossEntropyLoss)("make one of the class: CrossEntropyLoss()"),
    option(loss_weight=lambda: 1)("takes (target)"),
    option(optimizer=None)("takes (parameters)", "nothing", "torch.optim.SGD(params, lr=0.1)"),
    option(optimizer=sgd(build().parameters()))("SGD", "not the optimizer itself"),
    option(optimizer=lambda: None)("takes (parameters)"),
    option(optimizer=lambda parameters: None)("returned nothing", "a torch.optim.Optimizer"),
    option(optimizer=lambda parameters: sgd(OTHERS.parameters()))("other(s) in SGD", "Build it from"),
    option(optimizer=lambda parameters: sgd([*parameters, FOREIGN]))("1 other(s) in SGD", "shape (3,)"),
    option(optimizer=lambda parameters: torch.optim.LBFGS(parameters))("LBFGS", "Use another"),
    option(optimizer=lambda parameters: [parameters])("a torch.optim.Optimizer, or several"),
    option(optimizer=lambda parameters: [sgd(parameters), sgd(parameters[:1])])("found 0.weight in two"),
    option(optimizer=lambda parameters: Unfit(parameters, lr=0.1))("Unfit", "closure"),
    option(optimizer=lambda parameters: ZeroRedundancyOptimizer(parameters))(
        "of this process alone", "shard_optimizer=True"
    ),
    option(lr_scheduler=StepLR(sgd(build().parameters()), 1))("takes (optimizer)", "StepLR"),
    option(lr_scheduler=StepLR)("takes (optimizer)", "StepLR"),
    option(lr_scheduler=lambda optimizer: None)("nothing", "StepLR"),
    option(lr_scheduler=lambda optimizer: parts(sgd(build().parameters())))("of another one", "Build it"),
    option(lr_scheduler=ReduceLROnPlateau)("ReduceLROnPlateau", "after an evaluation"),
    option(autocast=torch.float32)("torch.bfloat16 or torch.float16", "found torch.float32"),
    option(version_dtype=torch.bfloat16)("version_dtype", "the same type"),
    option(wire_dtype="bfloat16")("wire_dtype", "give torch.bfloat16"),
    option(loss_scale=INF)("a finite number above 0", "found inf"),
    option(loss_scale=0)("found 0"),
    option(loss_scale="static")("'static'"),
    option(clip_grad_norm=0)("found 0"),
    option(clip_grad_norm=NAN)("found nan"),
    option(update_hooks=5)("a list or a tuple", "found 5"),
    option(update_hooks=[5])("update_hooks[0]", "found 5", "penstock.WeightPrediction()"),
    option(update_hooks=[penstock.WeightAverage])("update_hooks[0]"),
    option(update_hooks=[lambda update: None])("objects of a class derived from penstock.UpdateHook"),
    refused("two hooks predict", partial(make, update_hooks=TWO_PREDICTIONS), PenstockError, "both predict weights"),
    *(
        refused(f"Pipeline({wrong} seconds)", partial(make, timeout_seconds=wrong), PenstockError, "of seconds above 0")
        for wrong in (0, -5.0, NAN, INF, None, "60", True)
    ),
]


def method(call: Callable[[Any], object], name: str, *says: str, error: type[PenstockError] = PenstockError) -> Any:
    return refused(name, call, error, *says)


def batch(x: Any, y: Any = Y) -> Callable[[Any], object]:
    return lambda pipe: pipe.step(x, y)


def stats(pipe: Any, **given: Any) -> object:
    return pipe.stats(**given)


# Without types, so that wrong arguments can be passed.
Microbatches: Any = penstock.Microbatches
log_stats: Any = penstock.log_stats
WIDTH = ("args[0]: expected torch.float32 of shape (samples, 6), as in sample=", "The model or its loss failed on that")
METHODS = [
    method(batch(torch.randn(4, 7)), "step(x wrong width)", "step:", *WIDTH, "found torch.float32", "(samples, 7)"),
    method(batch(torch.randn(4)), "step(x wrong ndim)", *WIDTH, "of shape (samples)", "pass inputs of that shape"),
    method(batch(X.double()), "step(x float64)", *WIDTH, "found torch.float64", ".to(torch.float32)"),
    method(batch(X.long()), "step(x int)", *WIDTH, "found torch.int64"),
    method(batch(X.half()), "step(x half)", *WIDTH, "found torch.float16"),
    method(batch(X, None), "step(y None)", "target: expected a tensor", "nothing", "second argument of loss_fn"),
    method(batch(X, {"a": [1]}), "step(y dict of lists)", "target: expected a tensor", "{'a': [1]}"),
    method(batch(X, "abc"), "step(y str)", "target: expected a tensor", "found 'abc'"),
    method(batch(X.to_sparse()), "step(x sparse)", "args[0]", "dense", "sparse", ".to_dense()", error=CaptureError),
    method(
        lambda pipe: pipe.step(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), Y),
        "step(x quantized)", "args[0]", "dense", "quantized", ".dequantize()", error=CaptureError,
    ),
    method(
        lambda pipe: pipe.step(torch.nested.nested_tensor(list(X)), Y),
        "step(x nested)", "args[0]", "dense", "nested", ".to_padded_tensor", error=CaptureError,
    ),
    method(batch(X, Y.to_sparse()), "step(y sparse)", "the target", "sparse", ".to_dense()", error=CaptureError),
    method(batch(X.numpy()), "step(x numpy)", "args[0]", error=CaptureError),
    method(batch(X.tolist()), "step(x list)", "captured with", error=CaptureError),
    method(batch(X, Y.numpy()), "step(y numpy)", "the target", "torch.from_numpy", error=CaptureError),
    method(batch(None), "step(None)", "args[0]", "None", error=CaptureError),
    method(batch(OTHERS[0](X)), "step(x of another module)", "args[0]: expected values", "AddmmBackward", ".detach()"),
    method(batch(X, OTHERS(X)), "step(y of another module)", "the target: expected values", ".detach()"),
    method(batch(X[:1], Y[:1]), "step(too few samples)", "cannot be cut into 2", "at least 2"),
    method(batch(X[:0], Y[:0]), "step(empty)", "empty", "at least one sample"),
    method(batch(X, Y[:3]), "step(y of other samples)", "one target for every sample"),
    method(batch(Microbatches(5)), "step(Microbatches(5))", "inputs", "found 5"),
    method(batch(Microbatches([X, X], 5), None), "step(Microbatches([x], 5))", "targets", "found 5"),
    method(lambda pipe: pipe.evaluate(torch.randn(4, 7), Y), "evaluate(wrong width)", "evaluate:", *WIDTH),
    method(lambda pipe: pipe.predict(torch.randn(4, 7)), "predict(wrong width)", "predict:", *WIDTH),
    method(lambda pipe: pipe.timeline(0), "timeline(0)", "timeline(minibatches=)", "from 1 to 8", "found 0"),
    method(lambda pipe: pipe.timeline(100), "timeline(100)", "from 1 to 8", "found 100", "not kept"),
    *(
        method(partial(stats, **{name: wrong}), f"stats({name}={wrong})", f"stats({name}=)", "above 0", f"{wrong}")
        for name in ("peak_flops", "tokens_per_sample", "flops_per_sample")
        for wrong in (0, INF)
    ),
    method(lambda pipe: pipe.stats(all_ranks=1), "stats(all_ranks=1)", "True or False"),
    method(lambda pipe: pipe.measure(iterations=0), "measure(iterations=0)", "iterations", COUNT, error=ProfileError),
    method(lambda pipe: pipe.full_state_dict(rank=1), "full_state_dict(rank=1)", "from 0 to 0", "found 1"),
    method(lambda pipe: pipe.save_weights(""), "save_weights('')", "a path", "found ''"),
    method(lambda pipe: pipe.save_weights("w", max_shard_size="5 gig"), "save_weights(max_shard_size=)", "'5 gig'"),
    method(lambda pipe: pipe.save_weights("w", dtype=torch.int8), "save_weights(dtype=)", "floating-point", "int8"),
    method(lambda pipe: pipe.averages(), "averages()", "WeightAverage"),
    method(
        lambda pipe: pipe.step([X, Y]), "step([x, y])", "inputs and target are two arguments: pipe.step(x, y)",
        error=CaptureError,
    ),
    method(
        lambda pipe: pipe.track(pipe=pipe), "track(pipe)", "expected objects of yours, found a pipeline",
        error=penstock.CheckpointError,
    ),
    method(lambda pipe: pipe.save_weights("w", max_shard_size="9" * 400), "save_weights(9...)", "size= is '999"),
    method(lambda pipe: log_stats(pipe, print, 1), "log_stats(writer)", "writer"),
    method(lambda pipe: log_stats(pipe, None, "a"), "log_stats(step='a')", "step", "'a'"),
    method(lambda pipe: log_stats(pipe, None, 1, every=0), "log_stats(every=0)", "every", COUNT),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("row", PIPELINES)
def test_a_wrong_option_is_refused(row: Refusal) -> None:
    with pytest.raises(row.error) as caught:
        row.call()

    assert_says(caught.value, row.says)


@pytest.mark.filterwarnings("ignore:.*(quantized|nested):UserWarning")
@pytest.mark.parametrize("row", METHODS)
def test_a_wrong_call_of_a_pipeline_is_refused(row: Refusal) -> None:
    pipe = make()
    before = {name: tensor.clone() for name, tensor in pipe.named_parameters()}

    with pytest.raises(row.error) as caught:
        row.call(pipe)

    assert_says(caught.value, row.says)
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.named_parameters())


@pytest.mark.filterwarnings("ignore:.*(quantized|nested):UserWarning")
def test_refusals_change_nothing_and_the_pipeline_goes_on() -> None:
    """A pipeline that was called wrongly between its steps has the losses of one that was not."""
    rows: list[Refusal] = [param.values[0] for param in METHODS]
    # An error of the model itself is noticed in a forward.
    harmless = [row for row in rows if not {WIDTH[0], "target: expected a tensor"}.intersection(row.says)]
    losses = []
    with make() as pipe:
        for row in harmless:
            with pytest.raises(PenstockError):
                row.call(pipe)
            losses.append(float(pipe.step(X, Y).loss))
    with make() as other:
        assert losses == [float(other.step(X, Y).loss) for _ in harmless]
    assert len(harmless) > 20


def test_a_refused_pipeline_leaves_the_model_as_it_was() -> None:
    """Every option is refused with the same model, which then trains like a new one."""
    model = build()
    for param in PIPELINES:
        if isinstance(param.values[0].call, partial) and "model" not in param.values[0].call.keywords:
            with pytest.raises(PenstockError):
                param.values[0].call(model=model)

    with make(model=model) as pipe, make() as other:
        assert float(pipe.step(X, Y).loss) == float(other.step(X, Y).loss)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    two: Any = kind(2)
    cluster: Any = penstock.Cluster
    plan = penstock.Plan.uniform(4, two, microbatches=two, microbatch_size=two)

    assert repr(plan) == repr(penstock.Plan.uniform(4, 2, microbatches=2, microbatch_size=2))
    assert penstock.Schedule("gpipe", two, two) == penstock.Schedule("gpipe", 2, 2)
    assert repr(cluster.uniform(two, np.float32(4))) == repr(cluster.uniform(2, 4.0))
    assert cluster.from_matrix(np.ones((2, 2))) == cluster.from_matrix([[1.0] * 2] * 2)
    assert len(list(penstock.loader([1, 2, 3], two, seed=two))) == 2  # type: ignore[arg-type]
    with make(microbatches=two, stages=two, seed=two) as pipe, make(seed=2) as other:
        assert float(pipe.step(X, Y).loss) == float(other.step(X, Y).loss)


def test_one_hook_need_not_be_in_a_list() -> None:
    with make(update_hooks=penstock.WeightAverage()) as pipe:
        pipe.step(X, Y)

        assert len(pipe.averages()) == 8


def test_partial_functions_are_functions() -> None:
    loss_fn = partial(functional.mse_loss, reduction="mean")
    with make(loss_fn=loss_fn, optimizer=partial(torch.optim.SGD, lr=0.1)) as pipe:
        assert math.isfinite(float(pipe.step(X, Y).loss))


def test_a_backward_of_a_loss_is_refused() -> None:
    with make() as pipe, pytest.raises(PenstockError, match=r"step\(x, y\) has computed the gradients"):
        pipe.step(X, Y).loss.backward()


class Handing(penstock.Pipeline):
    """Hands on its arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)


def test_a_class_that_hands_on_its_arguments_is_built() -> None:
    with Handing(**{**OPTIONS, "model": build()}) as pipe:
        pipe.step(X, Y)
