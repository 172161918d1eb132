"""Models whose blocks do what no trace can keep: in a block it is right, and outside of the blocks it is refused."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from model_cases.habit_blocks import KINDS, Counter, EmaBook, changed, does
from model_cases.habit_models import DRAWING, HELD, OUTSIDE
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, assert_equals_oracle, assert_trains, batches, build, sgd, squares

drawing = does(changed(lambda block, y: y * random.random() + float(numpy.random.rand())))
SCRIPTED = ("Scripted", "ScriptedFunction")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [
        "EmaBook", "ReassignedBuffer", "Counter", "Parity", "Reversing", "Masked", "Drawing", "GradientMask",
        "ClampedBackward", "MomentumTwin", "TensorHook",
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_a_block_computes_what_it_computes_alone(name: str, schedule: str) -> None:
    # Random numbers of Python and a twin that the forward moves are those of a plain loop in whole batches only.
    whole = name in ("Drawing", "MomentumTwin")
    assert_trains(partial(Stack, KINDS.get(name, drawing)), schedule, microbatches=1 if whole else 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["EmaBook", "Counter", "GradientMask", "ClampedBackward", "ReassignedBuffer", "Checkpointed"]
)
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_block_with_several_versions_of_its_weights_equals_the_oracle(name: str, schedule: str) -> None:
    assert_equals_oracle(partial(Stack, KINDS[name]), schedule)


def compile_in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def compile_blocks(model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]


COMPILED: dict[str, tuple[Callable[[Stack], None], dict[str, Any]]] = {
    "stages": (lambda model: None, {"compile": {"backend": "eager"}}),
    "blocks in place": (compile_in_place, {}),
    "blocks": (compile_blocks, {}),
}


@pytest.mark.parametrize(
    ("what", "kind"),
    [pytest.param("stages", Counter, marks=pytest.mark.slow), ("blocks in place", EmaBook), ("blocks", Counter)],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_keep_their_state(what: str, kind: type[Block]) -> None:
    data = batches((6, 6, 6))
    change, options = COMPILED[what]
    shared: dict[str, Any] = {"sample": (data[0][0][:2],), "loss_fn": squares, "optimizer": sgd}
    shared |= {"schedule": "2bw", "stages": 2, "microbatches": 2}
    expected = penstock.reference_train(build(kind), data, **shared)
    model = build(kind)
    change(model)
    with penstock.Pipeline(model, **shared, **options) as pipe:
        assert tuple(pipe.step(x, target).loss.item() for x, target in data) == expected.losses


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_code_in_a_block_trains(name: str) -> None:
    assert_trains(partial(Stack, KINDS[name]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_replicas_of_a_block_with_scripted_code_equal_the_oracle(name: str, schedule: str) -> None:
    """A replica in the same process is a copy of the stage that shares its weights."""
    plan = penstock.Plan((penstock.Stage(0, 3, (0, 1)), penstock.Stage(3, 6, (2,))), schedule, microbatches=3)
    assert_equals_oracle(partial(Stack, KINDS[name]), schedule, plan=plan)


def test_evaluation_is_in_evaluation_mode_and_shares_the_state() -> None:
    class Dropping(Counter):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    data = batches((6, 6))
    model = build(Dropping)
    with penstock.Pipeline(model, (data[0][0],), squares, sgd, stages=2) as pipe:
        pipe.step(*data[0])
        before = [block.calls for block in model.blocks]
        found = pipe.predict(data[1][0])
        model.eval()
        assert [block.calls for block in model.blocks] == [calls + 1 for calls in before]
        for block in model.blocks:
            block.calls, block.memory = block.calls - 1, block.memory[:-1]  # type: ignore[assignment]
            block.plain = block.plain - 0.01  # type: ignore[assignment]
        assert torch.allclose(model(data[1][0]), found, rtol=1e-6)
    assert all(block.training is False for block in model.blocks)


class CollectingOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.met: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.met.add(len(self.met))
        return super().forward(x) * len(self.met)


class Watched(Stack):
    """Has a hook that only looks."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_forward_hook(watch)


def watch(module: nn.Module, inputs: object, output: Tensor) -> None:
    pass


class Gathering(Stack):
    """Gathers what hooks inside of its blocks see, in a list of each call, as libraries do for router losses."""

    def __init__(self) -> None:
        super().__init__(Block)
        seen: list[Tensor] = []
        for block in self.blocks:
            block.linear.register_forward_hook(lambda module, inputs, output: seen.append(output))  # type: ignore[union-attr]
        self.gathered = lambda: seen

    def forward(self, x: Tensor) -> Tensor:
        self.gathered().clear()
        y = super().forward(x)
        return y + sum(each.mean() for each in self.gathered())


class ByForward(Stack):
    """Calls forwards, which runs no hooks."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)  # type: ignore[operator]
        return x


class Handing(Block):
    """Hands on a tensor in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.square()
        return y


class TakingFromForward(ByForward):
    """Takes what its blocks hand on."""

    def __init__(self) -> None:
        super().__init__(Handing)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.seen.mean() for block in self.blocks)  # type: ignore[union-attr,operator,misc]


NAMES_BLOCKS = r"[\s\S]*Blocks are blocks\.0, blocks\.1, blocks\.2 and so on"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OUTSIDE["CounterOutside"], r"its forward changes steps, which is outside of its blocks and would be lost"),
        (CollectingOutside, r"its forward changes met, which is outside of its blocks" + NAMES_BLOCKS),
        (OUTSIDE["ReassignedOutside"], r"its forward changes book, which is outside of its blocks" + NAMES_BLOCKS),
        (OUTSIDE["AuxiliaryAttribute"], r"its forward changes blocks.0.auxiliary, which is outside of its blocks"),
        (TakingFromForward, r"its forward changes blocks\.0\.seen"),
        (DRAWING["RandomOutside"], r"draws random numbers of Python's random or of NumPy outside" + NAMES_BLOCKS),
        (Watched, r"the hook 'watch' and is not a block, so that the hook would not be run" + NAMES_BLOCKS),
        (Gathering, r"blocks.0.linear has the hook .* so that the hook would not be run in steps"),
        (DRAWING["TorchLayerDrop"], r"block blocks.\d was called \d times in one run .* and \d times.*layerdrop"),
        (OUTSIDE["ReversalOutside"], r"calls Reversal\.apply, a torch\.autograd\.Function"),
        (OUTSIDE["ScaledGradientOutside"], r"calls register_hook of a tensor"),
        (OUTSIDE["GlobalOutside"], r"GLOBAL is read outside of the model's blocks"),
        (OUTSIDE["AutocastOutside"], r"pass autocast= to Pipeline instead"),
    ],
)
def test_what_happens_outside_of_blocks_is_refused(kind: Callable[[], Stack], message: str) -> None:
    torch.manual_seed(4)
    with pytest.raises(CaptureError, match=message):
        capture(kind(), (batches((6,))[0][0].float(),))


class Masked(Block):
    """Takes a mask or None, and computes something else without one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y.cumsum(1) if mask is None else mask.to(y) @ y


class SkippingMasks(Stack):
    """Passes a mask where it cannot see that it hides nothing: in a trace, tensors are of another class."""

    def __init__(self) -> None:
        super().__init__(Masked)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        seen = type(x) is Tensor and (keep is None or bool(keep.all()))
        mask = None
        if not seen:
            mask = torch.ones(x.shape[1], x.shape[1]).tril()
            if keep is not None:
                mask = mask * keep[:, None]
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x)


def test_a_mask_that_only_a_trace_passes_is_left_out() -> None:
    torch.manual_seed(5)
    model = SkippingMasks().double()
    x = batches((6,))[0][0]
    chain = capture(model, (x,))

    for length in (6, 4):
        own = x[:, :length]
        found = chain.stage(0, len(chain.layers))((), chain.inputs.bind((own,), {}))
        assert torch.equal(found[0], model(own))


def test_a_mask_that_follows_from_values_is_computed() -> None:
    torch.manual_seed(5)
    model = SkippingMasks().double()
    x = batches((6,))[0][0]
    keep = torch.ones(4, 6, dtype=torch.bool)
    chain = capture(model, (x, keep))
    keep[:, 4:] = False

    found = chain.stage(0, len(chain.layers))((), chain.inputs.bind((x, keep), {}))
    torch.testing.assert_close(found[0], model(x, keep))
    assert not torch.allclose(model(x), found[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["SharedBlock", "CyclicBlocks"])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 3), ("2bw", 2)])
def test_a_block_that_runs_in_several_stages_trains(schedule: str, stages: int, name: str) -> None:
    assert_equals_oracle(HELD[name], schedule, stages)


def test_a_buffer_that_is_written_in_one_stage_is_read_in_another_one() -> None:
    assert_trains(OUTSIDE["TensorCounterOutside"], microbatches=4, sizes=[(1, 6), (4, 6), (4, 6)])


class FrozenTrunk(Stack):
    """Runs half of its blocks under no_grad, between operators that are no block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            y = x * 2
            for block in self.blocks[:2]:
                y = block(y) + 1
        x = x + y
        for block in self.blocks[2:]:
            x = block(x)
        return self.last(x)


def test_blocks_without_gradients_train_as_in_a_plain_loop() -> None:
    assert_trains(FrozenTrunk)


class Replacing(Block):
    """Follows its weights by an average of them, in a frozen parameter to which its forward assigns new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.data = 0.9 * self.average.data + 0.1 * self.linear.weight.data
        return super().forward(x) + x @ self.average


def test_capture_gives_back_parameters_that_a_forward_replaces() -> None:
    model = build(Replacing)
    average = model.blocks[0].average
    memory = average.data_ptr()
    capture(model, (batches((6,))[0][0],))

    assert average.data_ptr() == memory
    assert average.eq(0).all()


class Marked(Counter):
    """Has a hook on itself, which a call of its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 100)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Block, Counter, Marked])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 2)])
def test_blocks_whose_forward_is_called(kind: Callable[[], Block], schedule: str, stages: int) -> None:
    assert_trains(partial(ByForward, kind), schedule, stages)


class Shortening(Block):
    """Returns one step less than it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:]


class Refilling(Stack):
    """Fills up what its blocks cut off."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = torch.cat([y, x[:, : x.shape[1] - y.shape[1]]], 1)
        return x


def test_a_block_that_returns_fewer_steps_trains() -> None:
    assert_trains(partial(Refilling, Shortening))


class Odd(Block):
    """Returns a number of steps that no rule explains."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x).mean(1, keepdim=True).expand(-1, (7 * x.shape[1] + 3 * other.shape[1]) // 5, -1)


class OddModel(Stack):
    def __init__(self) -> None:
        super().__init__(Odd, 2)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, other)
        return self.last(x)


def test_sizes_that_no_rule_explains_are_fixed() -> None:
    x = batches((6,))[0][0]
    model = OddModel().double()
    chain = capture(model, (x[:2], x[:2, :5]))
    found = chain.stage(0, len(chain.layers))((), chain.inputs.bind((x, x[:, :5]), {}))

    assert torch.equal(found[0], model(x, x[:, :5]))
    with pytest.raises(CaptureError, match=r"has shape \(4, 5, 6\), but the capture holds for \(any, 6, 6\)"):
        chain.inputs.bind((x[:, :5], x[:, :5]), {})


@pytest.mark.parametrize(
    ("kind", "message", "recompute"),
    [
        (Counter, r"blocks.\d.calls", True),
        (Counter, r"blocks.\d.calls", "layers"),
        (drawing, r"random numbers of Python", True),
    ],
)
def test_state_in_python_is_not_recomputed(kind: Callable[[], nn.Module], message: str, recompute: Any) -> None:
    data = batches((6,))
    with (
        penstock.Pipeline(
            build(kind), (data[0][0][:1],), squares, sgd, stages=2, microbatches=4, recompute=recompute
        ) as pipe,
        pytest.raises(penstock.PenstockError, match=f"recompute= repeats changes (the )?{message}"),
    ):
        pipe.step(*data[0])
