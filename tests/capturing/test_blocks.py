"""Models whose blocks do what no trace can keep: in a block it is right, and outside of the blocks it is refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from model_cases.habit_blocks import KINDS, Counter, EmaBook, ReassignedBuffer, gate
from model_cases.habit_models import DRAWING, OUTSIDE
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, batches, build, sgd, squares, train_plainly


class Drawing(Block):
    """Draws random numbers of Python's and of NumPy's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random() + float(numpy.random.rand())


class Clamped(Block):
    """Has hooks on a parameter and on its backward, which only large gradients show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.register_full_backward_hook(lambda _, inputs, __: tuple(each.clamp(-0.5, 0.5) for each in inputs))  # type: ignore[attr-defined]


class Frozen(Block):
    """A scripted module and a scripted function in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.script(nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
        self.gate = torch.jit.script(gate)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.gate(super().forward(x))
        return gated


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: KINDS[name] for name in ("EmaBook", "ReassignedBuffer", "Counter", "Parity", "Reversing", "Masked")},
    "Drawing": Drawing,
    "Clamped": Clamped,
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_a_block_computes_what_it_computes_alone(name: str, schedule: str) -> None:
    data = batches((6, 5, 8, 7) if name == "Parity" else (6, 6, 6, 6))
    plain, staged = build(BLOCKS[name]), build(BLOCKS[name])
    random.seed(3)
    numpy.random.seed(3)
    expected = train_plainly(plain, data)
    with penstock.Pipeline(staged, (data[0][0],), squares, sgd, schedule=schedule, stages=3) as pipe:
        random.seed(3)
        numpy.random.seed(3)
        losses = [pipe.step(x, target).loss.item() for x, target in data]
        state = pipe.state_dict()["model"]

    assert losses == expected
    found = plain.state_dict()
    assert {name: torch.equal(tensor, found[name]) for name, tensor in state.items()} == dict.fromkeys(found, True)
    assert all(torch.equal(tensor, found[name]) for name, tensor in staged.state_dict().items())


@pytest.mark.parametrize("kind", [EmaBook, Counter, Clamped, ReassignedBuffer])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_block_with_several_versions_of_its_weights_equals_the_oracle(kind: type[Block], schedule: str) -> None:
    data = batches((6, 6, 6, 6, 6))
    pieces = {"microbatches": 2} if schedule == "2bw" else {}
    sample = (data[0][0][:2],)
    expected = penstock.reference_train(
        build(kind), data, sample=sample, loss_fn=squares, optimizer=sgd, stages=2, schedule=schedule, **pieces
    )
    with penstock.Pipeline(build(kind), sample, squares, sgd, schedule=schedule, stages=2, **pieces) as pipe:
        losses = tuple(pipe.step(x, target).loss.item() for x, target in data)
        pipe.drain()
        state = pipe.state_dict()["model"]

    assert losses == expected.losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state.items())


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
def test_a_scripted_module_in_a_block_trains() -> None:
    data = batches((6, 6))
    expected = train_plainly(build(Frozen), data)
    with penstock.Pipeline(build(Frozen), (data[0][0],), squares, sgd, stages=3) as pipe:
        assert [pipe.step(x, target).loss.item() for x, target in data] == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_replicas_of_a_block_with_scripted_code_equal_the_oracle(schedule: str) -> None:
    """A replica in the same process is a copy of the stage that shares its weights."""
    data = batches((6, 6, 6))
    plan = penstock.Plan((penstock.Stage(0, 3, (0, 1)), penstock.Stage(3, 6, (2,))), schedule, microbatches=3)
    shared: dict[str, Any] = {"sample": (data[0][0][:2],), "loss_fn": squares, "optimizer": sgd, "plan": plan}
    expected = penstock.reference_train(build(Frozen), data, **shared)
    with penstock.Pipeline(build(Frozen), **shared) as pipe:
        losses = tuple(pipe.step(x, target).loss.item() for x, target in data)
        pipe.drain()
        state = pipe.state_dict()["model"]

    assert losses == expected.losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state.items())


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


def test_capture_leaves_blocks_as_they_were() -> None:
    model = build(Counter)
    model.blocks[0].calls = 3  # type: ignore[assignment]
    capture(model, (batches((6,))[0][0],))

    assert [block.calls for block in model.blocks] == [3, 0, 0, 0]
    assert all(block.memory == [0.0] and block.plain.item() == 0 for block in model.blocks)


class CollectingOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.met: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.met.add(len(self.met))
        return super().forward(x) * len(self.met)


class HookedOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.register_forward_hook(watch)


def watch(module: nn.Module, inputs: object, output: Tensor) -> None:
    """A hook that only looks."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OUTSIDE["CounterOutside"], r"its forward changes steps, which is outside of its blocks and would be lost"),
        (CollectingOutside, r"its forward changes met, which is outside of its blocks"),
        (OUTSIDE["ReassignedOutside"], r"its forward changes book, which is outside of its blocks"),
        (
            DRAWING["RandomOutside"],
            r"the forward of the model draws random numbers of Python's random or of NumPy outside",
        ),
        (HookedOutside, r"the model has the hook 'watch' and is not a block, so that the hook would not be run"),
    ],
)
def test_what_happens_outside_of_blocks_is_refused(kind: Callable[[], Stack], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(kind().double(), (batches((6,))[0][0],))

    assert "Blocks are blocks.0, blocks.1, blocks.2 and so on" in str(caught.value)


def test_a_parameter_that_is_frozen_or_replaced_after_the_build_is_refused() -> None:
    (data,) = batches((6,))
    model = build(Block)
    with penstock.Pipeline(model, (data[0],), squares, sgd, stages=2) as pipe:
        pipe.step(*data)
        model.first.weight.requires_grad_(False)
        with pytest.raises(
            penstock.PenstockError, match=r"parameter first.weight: requires_grad is False and was True"
        ):
            pipe.step(*data)


def test_a_change_of_a_block_between_steps_counts() -> None:
    """As in a plain loop: the block is the user's own module."""
    data = batches((6, 6))
    plain, staged = build(Counter), build(Counter)
    expected = train_plainly(plain, data[:1])
    plain.blocks[1].calls = 6  # type: ignore[assignment]
    expected += train_plainly(plain, data[1:])
    with penstock.Pipeline(staged, (data[0][0],), squares, sgd, stages=3) as pipe:
        losses = [pipe.step(*data[0]).loss.item()]
        staged.blocks[1].calls = 6  # type: ignore[assignment]
        losses.append(pipe.step(*data[1]).loss.item())

    assert losses == expected


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


class Checkpointed(Block):
    """Computes its forward again in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "zb-h1"])
def test_a_forward_that_a_block_repeats_in_its_backward_reads_the_same_weights(schedule: str) -> None:
    data = batches((6, 6, 6, 6, 6))
    pieces = {} if schedule == "pipedream" else {"microbatches": 2}
    sample = (data[0][0][:2],)

    def losses(kind: type[Block]) -> list[float]:
        with penstock.Pipeline(build(kind), sample, squares, sgd, schedule=schedule, stages=2, **pieces) as pipe:
            return [pipe.step(x, target).loss.item() for x, target in data]

    expected = penstock.reference_train(
        build(Checkpointed), data, sample=sample, loss_fn=squares, optimizer=sgd, stages=2, schedule=schedule, **pieces
    )
    assert losses(Checkpointed) == losses(Block) == list(expected.losses)


class Repeated(Stack):
    """Calls its blocks in turn, twice or more, as models with shared layers do."""

    def __init__(self, blocks: int) -> None:
        super().__init__(Block, blocks)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        for block in list(self.blocks) * (4 // len(self.blocks)):
            x = block(x)
        return self.last(x + early)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 3), ("2bw", 2)])
def test_a_block_that_runs_in_several_stages_trains(schedule: str, stages: int, blocks: int) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return Repeated(blocks).double()

    data = batches((6, 6, 6, 6))
    sample = (data[0][0][:2],)
    options: Any = {"stages": stages, "schedule": schedule, "microbatches": 2}
    expected = penstock.reference_train(made(), data, sample=sample, loss_fn=squares, optimizer=sgd, **options)
    with penstock.Pipeline(made(), sample, squares, sgd, **options) as pipe:
        assert tuple(pipe.step(x, target).loss.item() for x, target in data) == expected.losses


def test_a_buffer_that_is_written_in_one_stage_is_read_in_another_one() -> None:
    def made() -> nn.Module:
        torch.manual_seed(5)
        return OUTSIDE["TensorCounterOutside"]().double()

    data = batches((6, 6))
    plain, expected = made(), []
    optimizer = sgd(list(plain.parameters()))
    for x, _ in data:
        losses = [squares(plain(part), part) for part in x.split(1)]
        (sum(losses) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses) / 4)
    with penstock.Pipeline(made(), (data[0][0][:1],), squares, sgd, microbatches=4, stages=3) as pipe:
        found = [pipe.step(x, target).loss.item() for x, target in data]

    assert found == pytest.approx(expected, rel=1e-12)


class FrozenTrunk(Stack):
    """Runs half of its blocks under no_grad, between operators that are no block."""

    def __init__(self) -> None:
        super().__init__(Block)

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


class Twin(Block):
    """Follows its weights by an average of them, in a frozen parameter that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return super().forward(x) + x @ self.average


class Replacing(Twin):
    """Assigns new memory to the average."""

    def forward(self, x: Tensor) -> Tensor:
        self.average.data = 0.9 * self.average.data + 0.1 * self.linear.weight.data
        return Block.forward(self, x) + x @ self.average


class TwinModel(Stack):
    def __init__(self) -> None:
        super().__init__(Twin)


@pytest.mark.parametrize("kind", [FrozenTrunk, TwinModel])
def test_blocks_without_gradients_train_as_in_a_plain_loop(kind: Callable[[], Stack]) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return kind().double()

    data = batches((6, 5, 6))
    plain, staged = made(), made()
    before = {name: tensor.clone() for name, tensor in staged.state_dict().items()}
    expected = train_plainly(plain, data)
    with penstock.Pipeline(staged, (data[0][0],), squares, sgd, stages=3) as pipe:
        assert all(torch.equal(tensor, before[name]) for name, tensor in staged.state_dict().items())
        assert [pipe.step(x, target).loss.item() for x, target in data] == expected
    assert all(torch.equal(tensor, staged.state_dict()[name]) for name, tensor in plain.state_dict().items())


def test_capture_gives_back_parameters_that_a_forward_replaces() -> None:
    model = build(Replacing)
    average = model.blocks[0].average
    memory = average.data_ptr()
    capture(model, (batches((6,))[0][0],))

    assert average.data_ptr() == memory
    assert average.eq(0).all()


class Skipping(Stack):
    """Skips a block at random."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand([]) < 0.5:
                x = block(x)
        return self.last(x)


class ByForward(Stack):
    """Calls forwards, which runs no hooks."""

    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__(kind)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        for block in self.blocks:
            x = block.forward(x)  # type: ignore[operator]
        return self.last(x + early)


class Marked(Counter):
    """Has a hook on itself, which a call of its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 100)


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


@pytest.mark.parametrize("kind", [Block, Counter, Marked])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 2)])
def test_blocks_whose_forward_is_called(kind: Callable[[], Block], schedule: str, stages: int) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return ByForward(kind).double()

    data = batches((6, 5, 8, 7))
    plain = made()
    expected = train_plainly(plain, data)
    with penstock.Pipeline(made(), (data[0][0],), squares, sgd, schedule=schedule, stages=stages) as pipe:
        assert pipe.plan.layers == 6
        losses = [pipe.step(x, target).loss.item() for x, target in data]
        state = pipe.state_dict()["model"]
        found = pipe.predict(data[0][0])

    assert losses == expected
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name
    with torch.no_grad():
        assert torch.equal(plain.eval()(data[0][0]), found)


def test_what_a_block_hands_on_in_an_attribute_is_seen_where_its_forward_is_called() -> None:
    with pytest.raises(CaptureError, match=r"its forward changes blocks\.0\.seen"):
        capture(TakingFromForward(), (batches((6,))[0][0].float(),))


class Autocast(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Skipping, r"block blocks.\d was called \d times in one run on the sample and \d times.*layerdrop"),
        (Autocast, r"pass autocast= to Pipeline instead"),
    ],
)
def test_calls_of_blocks_that_no_trace_keeps_are_refused(kind: Callable[[], Stack], message: str) -> None:
    torch.manual_seed(4)
    with pytest.raises(CaptureError, match=message):
        capture(kind(), (batches((6,))[0][0].float(),))


class Shortening(Block):
    """Returns one step less than it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:]


class Refilling(Stack):
    """Fills up what its blocks cut off."""

    def __init__(self) -> None:
        super().__init__(Shortening)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            x = torch.cat([y, x[:, : x.shape[1] - y.shape[1]]], 1)
        return self.last(x)


def test_a_block_that_returns_fewer_steps_trains() -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return Refilling().double()

    data = batches((7, 6, 9))
    expected = train_plainly(made(), data)
    with penstock.Pipeline(made(), (data[0][0],), squares, sgd, stages=3) as pipe:
        assert [pipe.step(x, target).loss.item() for x, target in data] == expected


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


def test_what_leaves_a_block_by_a_hook_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"blocks.0.linear has the hook .* so that the hook would not be run in steps"
    ):
        capture(Gathering().double(), (batches((6,))[0][0],))


def test_what_leaves_a_block_in_an_attribute_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"its forward changes blocks.0.auxiliary, which is outside of its blocks"):
        capture(OUTSIDE["AuxiliaryAttribute"]().double(), (batches((6,))[0][0],))


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
        (Drawing, r"random numbers of Python", True),
    ],
)
def test_state_in_python_is_not_recomputed(kind: type[Block], message: str, recompute: Any) -> None:
    data = batches((6,))
    with (
        penstock.Pipeline(
            build(kind), (data[0][0][:1],), squares, sgd, stages=2, microbatches=4, recompute=recompute
        ) as pipe,
        pytest.raises(penstock.PenstockError, match=f"recompute= repeats changes (the )?{message}"),
    ):
        pipe.step(*data[0])


@pytest.mark.parametrize("kind", [EmaBook, ReassignedBuffer])
def test_state_in_buffers_is_recomputed(kind: type[Block]) -> None:
    data = batches((6, 6))

    def losses(recompute: bool) -> list[float]:
        options: Any = {"stages": 2, "microbatches": 4, "recompute": recompute}
        with penstock.Pipeline(build(kind), (data[0][0][:1],), squares, sgd, **options) as pipe:
            return [pipe.step(x, target).loss.item() for x, target in data]

    assert losses(True) == losses(False)
