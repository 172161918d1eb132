"""What composition refuses: each with its reason and the way out, on all processes alike, and without a hang.

The rows of the table in docs/composition.md are the keys of `ROWS`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import penstock
from penstock.capturing.chain import StageModule
from penstock.runtime.assembly.pipeline_options import Parallelize
from penstock.runtime.transport.tensor_parallel_transport import TensorParallelTransport, connect_tensor_parallel
from penstock.runtime.transport.transport import Channel, Edge
from penstock.runtime.transport.worlds import Processes
from support import models
from support.jobs.composition_jobs import BATCHES, Run, build_model, split_columns_and_rows
from support.optimizers import GlobalNorm
from support.paths import ROOT
from support.processes import Pool


def nothing(stage: StageModule, mesh: DeviceMesh) -> None:
    """A hook that is content."""


def wrap(stage: StageModule, mesh: DeviceMesh) -> nn.Module:
    """Returns another module."""
    return nn.Sequential(stage)


def add(stage: StageModule, mesh: DeviceMesh) -> None:
    """Has a parameter more."""
    stage.layers[-1].body.register_parameter("more", nn.Parameter(torch.zeros(1)))


def slice_by_hand(stage: StageModule, mesh: DeviceMesh) -> None:
    """Keeps half of a weight."""
    body = stage.layers[-1].body
    weight = next(module for module in body.modules() if isinstance(module, nn.Linear)).weight
    weight.data = weight.data[: len(weight) // 2]


def compile_layers(stage: StageModule, mesh: DeviceMesh) -> None:
    """In place."""
    stage.layers[-1].body.compile()


def spread_over_replicas(stage: StageModule, mesh: DeviceMesh) -> None:
    """A DTensor where replicas compute different things."""
    linear = next(module for module in stage.modules() if isinstance(module, nn.Linear))
    parallelize_module(linear, mesh["dp"], ColwiseParallel())


def shard(stage: StageModule, mesh: DeviceMesh) -> None:
    """As it should be."""
    fully_shard(stage, mesh=mesh["dp"])


def shard_over_tp_ranks(stage: StageModule, mesh: DeviceMesh) -> None:
    """Over processes that do the same."""
    fully_shard(stage, mesh=mesh["tp"])


def shard_over_all(stage: StageModule, mesh: DeviceMesh) -> None:
    """Over processes that hold other stages."""
    fully_shard(stage)


def fail_on_one(stage: StageModule, mesh: DeviceMesh) -> None:
    """An error of one process."""
    if torch.distributed.get_rank() == 1:
        raise ValueError("this hook is broken here")


def split_shared(stage: StageModule, mesh: DeviceMesh) -> None:
    """One of two modules that share a weight."""
    if stage.first > 0:
        parallelize_module(stage.layers[-1].body, mesh["tp"], ColwiseParallel())


HOOKS: dict[str, Parallelize] = {
    hook.__name__: hook
    for hook in (
        *(nothing, wrap, add, slice_by_hand, compile_layers, spread_over_replicas),
        *(shard, shard_over_tp_ranks, shard_over_all, fail_on_one, split_shared, split_columns_and_rows),
    )
}


def _tied(shared: int) -> list[nn.Module]:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[3].weight = layers[shared].weight
    return layers


class Row(nn.Module):
    """Blocks in a list, and what is done with them."""

    def __init__(self, run: Callable[[Any, Any], Any], *blocks: nn.Module) -> None:
        super().__init__()
        self.run, self.blocks = run, nn.ModuleList(blocks or [nn.Linear(6, 6) for _ in range(8)])

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def drop_out(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.1, model.training)


def noisy(model: Any, x: Tensor) -> Tensor:
    """Drops out between its blocks."""
    for block in model.blocks:
        x = drop_out(model, block(x))
    return x


def noisy_within(model: Any, x: Tensor) -> Tensor:
    """Drops out between two uses of a module that writes a buffer, and that one layer must hold for this reason."""
    first, norm, *others = model.blocks
    x = norm(drop_out(model, norm(first(x))))
    for block in others:
        x = block(x)
    return x


def doubled(model: Any, x: Tensor) -> Tensor:
    """Has code between its blocks in evaluation only."""
    for block in model.blocks:
        x = block(x) if model.training else 2 * block(x)
    return x


class Scale(nn.Linear):
    """A block that takes a number."""

    def forward(self, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return factor * super().forward(x)


def scaled(model: Any, x: Tensor) -> Tensor:
    """Passes its blocks another number in evaluation."""
    for block in model.blocks:
        x = block(x, 1.0 if model.training else 0.5)
    return x


def exchanged(model: Any, x: Tensor) -> Tensor:
    """Passes a block its arguments in another order in evaluation."""
    *blocks, last = model.blocks
    for block in blocks:
        x, before = block(x), x
    return last(x, before) if model.training else last(before, x)  # type: ignore[no-any-return]


def auxiliary(model: Any, x: Tensor) -> Any:
    """Returns more in training."""
    for block in model.blocks:
        x = block(x)
    return (x, {"hidden": x}) if model.training else x


def shared_statistics() -> nn.Sequential:
    """Two layers are one module, which only the training has to keep together."""
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, *(nn.Linear(6, 6) for _ in range(6)))


MODELS: dict[str, Callable[[], Any]] = {
    "tied in a stage": lambda: _tied(2),
    "tied over a cut": lambda: _tied(0),
    "another trace in evaluation": lambda: Row(noisy),
    "another trace in evaluation within a layer": lambda: Row(
        noisy_within, nn.Linear(6, 6), nn.BatchNorm1d(6), *(nn.Linear(6, 6) for _ in range(6))
    ),
    "a trace in evaluation only": lambda: Row(doubled),
    "other numbers for blocks in evaluation": lambda: Row(scaled, *(Scale(6, 6) for _ in range(8))),
    "another order in evaluation": lambda: Row(exchanged, *(nn.Linear(6, 6) for _ in range(7)), nn.Bilinear(6, 6, 6)),
    "another result in evaluation": lambda: Row(auxiliary),
    "shared statistics": shared_statistics,
}


def said_by(build: Callable[[], object]) -> str:
    """The type and text of the error of `build`."""
    try:
        build()
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def said_of(run: Run, hook: str | None, model: str = "", counts: tuple[int, ...] = (), **options: Any) -> str:
    """What is said of `run` with `hook`; `counts`: replicas of the stages, if they differ."""
    plan = run.plan
    if counts:
        starts = [sum(counts[:index]) for index in range(len(counts))]
        stages = [
            replace(stage, ranks=tuple(range(start, start + count)))
            for stage, start, count in zip(plan.stages, starts, counts, strict=True)
        ]
        plan = replace(plan, stages=tuple(stages))
    chosen = {**run.options, "plan": plan, "parallelize": hook and HOOKS[hook], **options}
    if model:
        module = MODELS[model]()
        width, layers = (4, 4) if model.startswith("tied") else (6, 8)
        parts = penstock.Plan.uniform(layers, 2).stages
        stages = [replace(part, ranks=stage.ranks) for part, stage in zip(parts, plan.stages, strict=True)]
        chosen |= {"plan": replace(plan, stages=tuple(stages)), "sample": (torch.zeros(2, width),)}
    else:
        module = build_model(Run("").blocks)
    return said_by(lambda: penstock.Pipeline(module, **chosen))


def said_in_a_step(kind: str) -> str:
    """What is said of a first stage whose output is another one on each tensor-parallel rank, or a DTensor."""

    def spoil(stage: StageModule, mesh: DeviceMesh) -> None:
        def change(layer: nn.Module, arguments: object, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (result,) = results
            if kind == "DTensor":
                return (DTensor.from_local(result, mesh["tp"], [Shard(0)]),)
            return (result + mesh.get_local_rank("tp"),)

        if stage.first == 0:
            stage.layers[-1].register_forward_hook(change)

    with Run("", tp=2).make(parallelize=spoil) as pipe:
        return said_by(lambda: float(pipe.step(*BATCHES[0]).loss))


def said_when_a_tp_rank_fails() -> str:
    """What is said when a layer raises an error on tensor-parallel rank 1 of the first stage, in the second step."""

    def break_down(stage: StageModule, mesh: DeviceMesh) -> None:
        def fail(*_: object) -> None:
            if len(calls) > 1 and torch.distributed.get_rank() == 1:
                raise ValueError("this layer is broken here")

        split_columns_and_rows(stage, mesh)
        stage.layers[1].body.down.register_forward_pre_hook(fail)

    calls: list[int] = []
    pipe = Run("", tp=2, blocks=4).make(parallelize=break_down, timeout_seconds=12.0)
    try:
        for x, y in BATCHES:
            calls.append(1)
            float(pipe.step(x, y).loss)
    except (ValueError, penstock.PenstockError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def evaluate_one_sample() -> str:
    """An evaluation of one sample by two replicas that must gather weights together."""
    x, y = BATCHES[0]
    with Run("", replicas=2).make(parallelize=shard) as pipe:
        pipe.evaluate(x[:3], y[:3])
        return said_by(lambda: pipe.evaluate(x[:1], y[:1]))


def measure_late() -> str:
    """A profile of layers that are spread already."""
    with Run("", tp=2).make(parallelize=split_columns_and_rows) as pipe:
        return said_by(pipe.measure)


SHAPES = ((3, 5), (7,), (1,), (), (0, 4), (2, 3, 4))
TYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def messages_over_tp_ranks() -> tuple[list[str], int]:
    """Sends messages of every shape and dtype between two ranks of two processes each. Returns what arrived changed,
    and the bytes that this process sent.
    """
    world = Processes(60.0)
    groups = [torch.distributed.new_group(members, backend="gloo") for members in ([0, 1], [2, 3])]
    rank = world.rank // 2
    cut, report = Edge(0, 1), Edge(0, 1, Channel.REPORTS)
    transport = connect_tensor_parallel(world, (cut, report), torch.device("cpu"), 60.0, (), groups[rank])
    assert isinstance(transport, TensorParallelTransport)
    torch.manual_seed(0)
    wrong = []
    for kind in TYPES:
        for again in range(2):
            message = tuple((torch.randn(shape) * 9).to(kind) for shape in SHAPES)
            if kind.is_floating_point:
                message[0].requires_grad_()
            sent = (*message, None)
            if rank == 0:
                transport.send(cut, kind, sent)
                transport.send(report, kind, message)
                continue
            receives = transport.post(cut, kind), transport.post(report, kind)
            for receive, expected in zip(receives, (sent, message), strict=True):
                found = receive.wait()
                same = [
                    one is None if other is None else one is not None and _same(one, other)
                    for one, other in zip(found, expected, strict=True)
                ]
                wrong += [f"{kind} {again} {index}" for index, good in enumerate(same) if not good]
    transport.flush()
    transport.close()
    world.leave()
    return wrong, transport.sent_bytes


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)


class Foreseeing(penstock.UpdateHook):
    """Predicts weights also where no gradient is late."""

    def predicts(self, delay: int) -> bool:
        return True


ANOTHER_IN_EVALUATION = (
    "another trace in evaluation",
    "another trace in evaluation within a layer",
    "a trace in evaluation only",
    "other numbers for blocks in evaluation",
    "another order in evaluation",
)
TWO_TP_RANKS, TWO_REPLICAS = Run("", tp=2), Run("", replicas=2)

REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "no hook": ("there is no hook", (TWO_TP_RANKS, None), {}),
    "too few processes": ("the plan is for 6 rank", (Run("", stages=3, tp=2), "nothing"), {}),
    "another tensor-parallel size": (
        "tensor_parallel=4 contradicts",
        (TWO_TP_RANKS, "nothing"),
        {"tensor_parallel": 4},
    ),
    "another module": ("returned Sequential", (TWO_TP_RANKS, "wrap"), {}),
    "more parameters": ("other parameters", (TWO_TP_RANKS, "add"), {}),
    "half a weight": ("expected a DTensor", (TWO_TP_RANKS, "slice_by_hand"), {}),
    "compiled": ("Leave torch.compile out", (TWO_TP_RANKS, "compile_layers"), {}),
    "stepped at once": (
        "Make two groups of the parameters",
        (TWO_TP_RANKS, "split_columns_and_rows"),
        {"optimizer": partial(torch.optim.AdamW, foreach=True)},
    ),
    "an error on one process": ("this hook is broken here", (TWO_TP_RANKS, "fail_on_one"), {}),
    **{case: ("something else in evaluation", (TWO_TP_RANKS, "nothing", case), {}) for case in ANOTHER_IN_EVALUATION},
    "another result in evaluation": (
        "Return the same in both modes",
        (TWO_TP_RANKS, "nothing", "another result in evaluation"),
        {},
    ),
    "tied over a cut": ("Untie the weights", (TWO_TP_RANKS, "nothing", "tied over a cut"), {}),
    "tied in a stage": ("is shared by several modules", (TWO_TP_RANKS, "split_shared", "tied in a stage"), {}),
    "DTensor over replicas": ("is a DTensor over dp", (TWO_REPLICAS, "spread_over_replicas"), {}),
    "sharded over tensor-parallel ranks": (
        "over other processes than its replicas",
        (TWO_TP_RANKS, "shard_over_tp_ranks"),
        {},
    ),
    "sharded over all": ("expected dp or tp", (TWO_REPLICAS, "shard_over_all"), {}),
    "sharded with versions": ("keeps several versions", (Run("", "2bw", replicas=2), "shard"), {}),
    "sharded, divided backwards": ("expected whole backwards", (Run("", "zb-h1", replicas=2), "shard"), {}),
    "sharded twice": ("Leave shard_optimizer= out", (TWO_REPLICAS, "shard"), {"shard_optimizer": True}),
    "sharded, in low precision": (
        "MixedPrecisionPolicy",
        (TWO_REPLICAS, "shard"),
        {"autocast": torch.bfloat16, "version_dtype": torch.bfloat16},
    ),
    "sharded and predicted": ("MixedPrecisionPolicy", (TWO_REPLICAS, "shard"), {"update_hooks": [Foreseeing()]}),
    "sharded, odd microbatches": ("expected a multiple", (Run("", replicas=2, microbatches=3), "shard"), {}),
    "sharded, unequal replicas": ("of a pipeline with 3-1 replicas", (Run(""), "shard"), {"counts": (3, 1)}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_composed_is_refused(pool: Pool, case: str) -> None:
    text, arguments, options = REFUSED[case]
    for said in pool.run(4, _say, arguments, options):
        # Another process's error is reported with its traceback.
        assert said.startswith(("PlanError", "TransportError") if "one process" in case else "PlanError")
        assert text in said


def _say(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        return said_of(*arguments, **options)
    except ValueError as error:
        return f"TransportError: {error}"


def test_a_list_with_shared_statistics_takes_a_hook(pool: Pool) -> None:
    assert pool.run(4, _say, (TWO_TP_RANKS, "nothing", "shared statistics"), {}) == ["nothing"] * 4


def test_a_single_process_has_no_mesh() -> None:
    message = said_of(TWO_TP_RANKS, "nothing")
    hook = said_of(Run(""), "nothing")

    assert "this is a single process: expected 4 processes" in message
    assert "start it with torchrun" in hook


@pytest.mark.parametrize(
    ("kind", "text"), [("other", "is not the same on tensor-parallel ranks 0 and 1"), ("DTensor", "a DTensor (")]
)
def test_what_crosses_a_cut_must_be_the_same_on_all_tp_ranks(pool: Pool, kind: str, text: str) -> None:
    said = pool.run(4, said_in_a_step, kind)

    assert all(text in one for one in said)
    assert [one.partition(":")[0] for one in said] == ["PenstockError"] * 2 + ["TransportError"] * 2


def test_a_tp_rank_that_fails_ends_all(pool: Pool) -> None:
    """Also the one that waits for it in a sum inside of the stage, which PyTorch takes."""
    first, failed, *others = pool.run(4, said_when_a_tp_rank_fails)

    assert failed == "ValueError: this layer is broken here"
    assert first.startswith("TransportError: the connection to another process of stage 0 broke")
    assert all(said.startswith("TransportError") and "this layer is broken here" in said for said in others)


def test_fully_sharded_replicas_evaluate_in_step(pool: Pool) -> None:
    """Three samples of two a microbatch go to both replicas; one sample cannot."""
    said = pool.run(4, evaluate_one_sample)

    assert all("1 sample" in one for one in said)


def test_spread_layers_are_not_measured(pool: Pool) -> None:
    assert all("expected one stage without replicas. Measure with stages=1" in one for one in pool.run(4, measure_late))


def test_tp_ranks_put_any_message_together(pool: Pool) -> None:
    """Sizes that do not divide, types of all kinds, absent tensors; and whether each requires a gradient."""
    found = pool.run(4, messages_over_tp_ranks)

    assert [wrong for wrong, _ in found] == [[]] * 4
    sizes = [8 + 4 + 1 + 1 + 0 + 12] * len(TYPES)
    expected = 2 * sum(size * kind.itemsize for size, kind in zip(sizes, TYPES, strict=True))
    assert [sent for _, sent in found] == [expected, expected, 0, 0]


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "compiled and spread": ("Leave compile= out", {"compile": True, "parallelize": nothing}),
    "layers of zb-h1": ("would hardly hold less", {"schedule": "zb-h1", "recompute": "layers"}),
    "state of all parameters": ("steps each parameter by itself", {"shard_optimizer": True, "optimizer": GlobalNorm}),
    "compiled with graphs": ("expected a mode without graphs", {"compile": {"mode": "max-autotune"}}),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_needs_one_process_is_refused(case: str) -> None:
    words, options = ALONE[case]
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": models.plain, "stages": 2, "microbatches": 2, **options}
    with pytest.raises(penstock.PenstockError, match=words):
        penstock.Pipeline(layers, (torch.zeros(2, 4),), **given)


ROWS: dict[str, tuple[str | Callable[..., None], ...]] = {
    "`parallelize=` or `tensor_parallel` > 1 in a single process": (test_a_single_process_has_no_mesh,),
    "`tensor_parallel` > 1 without `parallelize=`": ("no hook",),
    "processes that are not ranks x `tensor_parallel`": ("too few processes",),
    "`tensor_parallel=` that differs from the plan's": ("another tensor-parallel size",),
    "a traced model whose code between blocks differs in evaluation, with a hook": ANOTHER_IN_EVALUATION,
    "a model that returns something else in evaluation, with a hook": ("another result in evaluation",),
    "a hook that returns another module": ("another module",),
    "a hook that adds, removes or renames parameters, or changes their whole shape": (
        "more parameters",
        "half a weight",
    ),
    "`torch.compile` in the hook, or `compile=` with a hook": ("compiled", "compiled and spread"),
    "a weight shared by two modules of a stage, replaced in one": ("tied in a stage",),
    "weights shared by stages, with any hook": ("tied over a cut",),
    "a `DTensor` over `dp` that `fully_shard` did not make": ("DTensor over replicas",),
    '`fully_shard` over other processes than `mesh["dp"]`': ("sharded over tensor-parallel ranks", "sharded over all"),
    "`fully_shard` with `pipedream` or `2bw`": ("sharded with versions",),
    "`fully_shard` with split backwards": ("sharded, divided backwards",),
    "`fully_shard` with `version_dtype`, or with update hooks that predict under a flush": (
        "sharded, in low precision",
        "sharded and predicted",
    ),
    "`fully_shard` with `shard_optimizer=`": ("sharded twice",),
    "`shard_optimizer=` and an optimizer that sums over parameters": ("state of all parameters",),
    "`fully_shard` where stages have different numbers of replicas": ("sharded, unequal replicas",),
    "`fully_shard` with microbatches that the replicas do not share equally": (
        "sharded, odd microbatches",
        test_fully_sharded_replicas_evaluate_in_step,
    ),
    "a group of an optimizer with `DTensor`s and plain tensors, on a GPU or with `foreach=True` or `fused=True`": (
        "stepped at once",
    ),
    "a boundary tensor that is a `DTensor`, or differs between tensor-parallel ranks (*first step*)": (
        test_what_crosses_a_cut_must_be_the_same_on_all_tp_ranks,
    ),
    "`Pipeline.measure` after a hook, with several stages or replicas": (test_spread_layers_are_not_measured,),
    '`recompute="layers"` with split backwards': ("layers of zb-h1",),
    '`compile=` with CUDA graphs (`"reduce-overhead"`, `"max-autotune"`)': ("compiled with graphs",),
}


def test_the_table_in_the_docs_has_what_is_tested_here() -> None:
    page = (ROOT / "docs" / "composition.md").read_text()
    table = page[page.index("| combination | why | instead |") :]
    rows = re.findall(r"^\| (.*?) \| .+? \| .+? \|$", table, flags=re.MULTILINE)
    cases = [case for tested in ROWS.values() for case in tested if isinstance(case, str)]

    assert rows[1:] == list(ROWS)
    assert sorted(cases) == sorted([*REFUSED.keys() - {"an error on one process"}, *ALONE])
