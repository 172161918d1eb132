"""What a stage computes by recordings: each microbatch in flight in memory of its own, and gradients that stay."""

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing.chain import StageModule
from penstock.runtime.devices.graph_capture import GRAPH_CAPTURERS
from penstock.runtime.execution.cuda_graphs import WARM_UPS, CudaGraphStage
from support.simulated.simulated_graph_capturer import GRAPHED, SimulatedGraphCapturer, simulated_graph_capture

SAMPLES = torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(2)).unbind()


class Scaled(nn.Module):
    """Says how often each sample was scaled, and by what on average: in a tensor that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(torch.tanh(self.linear(x)))
        return y, (y > 0).sum(1)


class Last(nn.Module):
    """Reads all there is."""

    def forward(self, y: Tensor, *others: Tensor) -> Tensor:
        return y.float() * sum(other.sum() for other in others) if others else y.float()


def stage_of(layers: Sequence[nn.Module]) -> StageModule:
    """All but the last of `layers`, as a stage that receives what it reads."""
    chain = penstock.capture(list(layers), (SAMPLES[0],))
    return chain.stage(1, len(layers) - 1)


def make(layers: Sequence[nn.Module] = ()) -> tuple[StageModule, SimulatedGraphCapturer, CudaGraphStage]:
    torch.manual_seed(1)
    stage, recorder = stage_of([nn.Tanh(), *(layers or [Scaled()]), Last()]), SimulatedGraphCapturer()
    return stage, recorder, CudaGraphStage(stage, recorder, 1, torch.device("cpu"))


def leaf(sample: Tensor) -> Tensor:
    return sample.clone().requires_grad_()


def test_a_microbatch_in_flight_keeps_its_numbers_and_its_place_is_taken_again() -> None:
    stage, recorder, replays = make()
    x, y, z = (leaf(sample) for sample in SAMPLES[:3])

    (first, count), (second, _) = replays.run(0, [x], {}), replays.run(1, [y], {})
    held = first.detach().clone()

    assert torch.equal(first, stage([x], {})[0])
    assert not count.requires_grad
    assert recorder.captures == 4, "forward and backward of two places"

    replays.release(0)
    (third, _) = replays.run(2, [z], {})

    assert recorder.captures == 4
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert torch.equal(third, stage([z], {})[0])
    assert not torch.equal(first, held), "nothing may read it any more"


def test_gradients_are_those_of_autograd_and_outlive_the_next_backward() -> None:
    stage, _, replays = make()
    plain, _, _ = make()
    found, expected = [], []
    for number, sample in enumerate(SAMPLES[:3]):
        one, other = leaf(sample), leaf(sample)
        (y, _), (z, _) = replays.run(number, [one], {}), plain([other], {})
        y.backward(sample)
        z.backward(sample)
        replays.release(number)
        found.append(one.grad)
        expected.append(other.grad)

    for one, other in zip(found, expected, strict=True):  # type: ignore[assignment]
        assert torch.equal(one, other)
    for one, other in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_backwards_in_another_order_than_the_forwards() -> None:
    stage, recorder, replays = make()
    plain, _, _ = make()
    leaves = [leaf(sample) for sample in SAMPLES]
    outputs = [replays.run(number, [x], {})[0] for number, x in enumerate(leaves)]
    others = [plain([x], {})[0] for x in leaves]
    for number in (3, 0, 5, 1, 4, 2):
        outputs[number].backward(SAMPLES[number])
        others[number].backward(SAMPLES[number])
        replays.release(number)

    assert recorder.captures == 2 * len(SAMPLES)
    for one, other in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_a_backward_may_read_again_must_not_be_written() -> None:
    _, _, replays = make([Twice()])
    first, second = replays.run(0, [leaf(SAMPLES[0])], {})
    first.add_(1.0)

    with pytest.raises(penstock.PenstockError, match=r"shape \(4, 6\) that stage 1 made was written in place"):
        torch.autograd.backward([first, second], [first, second])


def test_an_output_that_nothing_depends_on_has_a_gradient_of_zero() -> None:
    _, _, replays = make([Twice()])
    for number, weights in enumerate(((1.0, 2.0), (3.0, None))):
        x = leaf(SAMPLES[0])
        results = replays.run(number, [x], {})
        roots = [result for result, weight in zip(results, weights, strict=True) if weight is not None]
        torch.autograd.backward(roots, [torch.full_like(x, weight) for weight in weights if weight is not None])
        replays.release(number)

        first, second = weights
        assert torch.equal(x.grad, torch.full_like(x, 2 * first + 3 * (second or 0.0)))


class Twice(nn.Module):
    """Two results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x


def test_recording_leaves_no_trace() -> None:
    stage, _, replays = make()
    parameters = list(stage.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    replays.run(0, [leaf(SAMPLES[0])], {})

    (count,) = (buffer for name, buffer in stage.named_buffers() if name.endswith("num_batches_tracked"))
    assert count == 1
    assert all(one is other for one, other in zip(parameters, stage.parameters(), strict=True))
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_shape_runs_without_a_recording() -> None:
    stage, recorder, replays = make()
    replays.run(0, [leaf(SAMPLES[0])], {})
    replays.release(0)
    done = recorder.replays
    x = leaf(SAMPLES[0][:3])
    (y, _) = replays.run(1, [x], {})
    replays.release(1)

    assert recorder.replays == done
    assert torch.equal(y, stage([x], {})[0])


def test_weights_that_are_cast_are_cast_again_every_time() -> None:
    """Autocast keeps casts of weights for a while, and those of before an update are no good after it."""
    stage, _, replays = make([nn.Linear(6, 6)])
    for number in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (y,) = replays.run(number, [SAMPLES[0]], {})
            (z,) = stage([SAMPLES[0]], {})
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, z)
        replays.release(number)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.mul_(2.0)


class Noting(nn.Module):
    """Notes in its class whether autocast would keep what it casts: what a module holds is put back after warm-ups."""

    kept: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(torch.is_autocast_cache_enabled())
        return 2 * x


def test_nothing_is_recorded_with_casts_of_before() -> None:
    layer = Noting()
    _, _, replays = make([layer])
    layer.kept.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replays.run(0, [leaf(SAMPLES[0])], {})

    assert layer.kept == [False] * (WARM_UPS + 2), "to warm up, to record, and to do it again as the CPU does"


class Counted(torch.autograd.Function):
    """The identity, which notes when it goes forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, done: list[str]) -> Tensor:
        ctx.done = done
        done.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.done.append("backward")
        return gradient, None


class Counting(nn.Module):
    """A linear layer that notes in its class what is done with it."""

    done: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Counted.apply(self.linear(x), self.done)


def test_a_stage_warms_up_before_its_first_recording_only() -> None:
    """Another place costs one run that is recorded; and the run itself, which the CPU does again."""
    layer = Counting()
    stage, recorder, replays = make([layer])
    plain = Counting()
    plain.load_state_dict(layer.state_dict())
    for place in range(4):
        layer.done.clear()
        (y,) = replays.run(place, [leaf(SAMPLES[place])], {})
        y.backward(SAMPLES[place])
        done = list(layer.done)
        plain(SAMPLES[place]).backward(SAMPLES[place])
        assert done == ["forward", "backward"] * (2 if place else WARM_UPS + 2)

    assert (recorder.warm_ups, recorder.captures, recorder.replays) == (1, 8, 8)
    for one, other in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Replacing(nn.Module):
    """Has another tensor for its buffer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return 2 * x


class Failing(nn.Module):
    """Fails as a layer that reads numbers on the host does when it is recorded, and not before."""

    calls: ClassVar[int | None] = None

    def forward(self, x: Tensor) -> Tensor:
        if Failing.calls is not None:
            Failing.calls += 1
            if Failing.calls > WARM_UPS:
                raise RuntimeError("operation not permitted when stream is capturing")
        return 2 * x


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x[:, 0] > 0).long())


class Remembering(nn.Module):
    """Warms up over its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return x * min(len(self.seen), 9)


class Drawing(nn.Module):
    """Draws numbers of Python's and NumPy's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (random.random() + float(numpy.random.rand()))


class Caching(nn.Module):
    """Makes something in its first call, and writes a tensor that is not registered in place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Tensor | None = None
        self.sum = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        if self.factor is None:
            self.factor = torch.full((6,), 2.0)
        with torch.no_grad():
            self.sum += x.sum(0)
        return x * self.factor


def test_caches_and_tensors_that_are_written_in_place_are_captured() -> None:
    _, _, replays = make([Caching()])
    ((result,),) = (replays.run(0, [leaf(SAMPLES[0])], {}),)

    assert torch.equal(result, 2 * SAMPLES[0])


def break_off(layer: nn.Module) -> nn.Module:
    Failing.calls = 0 if isinstance(layer, Failing) else None
    return layer


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Replacing, r"stage 1 \(.*\) puts a new tensor in the place of a buffer"),
        (Failing, r"stage 1 \(.*\) cannot be captured as a CUDA graph: .* stream is capturing"),
        (Sparse, "sparse gradients"),
        (Remembering, r"a layer of stage 1 \(1\) changes 1.seen in its forward or backward"),
        (Drawing, r"a layer of stage 1 \(1\) changes the random numbers of Python"),
    ],
)
def test_what_cannot_be_done_again_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    layer = build()
    _, _, replays = make([layer])
    break_off(layer)

    with pytest.raises(penstock.PenstockError, match=words):
        replays.run(0, [leaf(SAMPLES[0])], {})


LINEAR = (nn.Linear(6, 6), nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("layers", "options", "words"),
    [
        (LINEAR, {"schedule": "pipedream"}, "'pipedream' keeps several versions of weights"),
        (LINEAR, {"schedule": "2bw"}, "'2bw' keeps several versions of weights"),
        (LINEAR, {"schedule": "zb-h1"}, "compile= makes one function of a stage's backward"),
        (LINEAR, {"recompute": True}, r"stages recompute \(0, 1\)"),
        ((nn.Dropout(0.5), nn.Linear(6, 6)), {}, "layers draw random numbers"),
    ],
)
def test_what_does_not_go_with_recordings_is_refused(
    layers: Sequence[nn.Module], options: dict[str, Any], words: str
) -> None:
    with simulated_graph_capture(), pytest.raises(penstock.PlanError, match=words):
        build(layers, **options)


def test_a_cpu_has_no_graphs() -> None:
    assert set(GRAPH_CAPTURERS) == {"cuda"}
    with pytest.raises(penstock.PlanError, match="asks for CUDA graphs, and the model is on cpu"):
        build(LINEAR)


def build(layers: Sequence[nn.Module], **options: Any) -> penstock.Pipeline:
    arguments = {"stages": 2, "microbatches": 2, "compile": GRAPHED, **options}
    return penstock.Pipeline(
        list(layers), (SAMPLES[0],), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), **arguments
    )
