"""Recomputation changes what is kept and nothing else: not a bit of any loss, weight or buffer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.capturing.module_state import find_writable
from penstock.profiling.workspaces import recording
from penstock.scheduling.actions import parse_programs
from penstock.scheduling.direct_backwards import find_direct
from support import models
from support.layers import Gathering, InPlace, Several
from support.training import Case, count_tensors, run_reference

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp", "pipedream", "vertical", "2bw")

reference = cache(run_reference)


X, Y = models.SUBJECTS["perceptron"].batches[0]


def pipeline(model: Any, **options: Any) -> penstock.Pipeline:
    """A pipeline that classifies in four microbatches, unless the options say something else."""
    given = {"sample": (X[:3],), "loss_fn": F.cross_entropy, "optimizer": models.momentum, "microbatches": 4}
    return penstock.Pipeline(model, **{**given, **options})


def assert_same(expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Two trainings have the same losses and the same state, and draw the same numbers afterwards."""
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, dict):
            assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
        else:
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class Drawing(nn.Module):
    """Dropout of every second call only: a layer of which capture does not see that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.tanh(F.dropout(self.linear(x), 0.5, training=int(self.calls) % 2 == 0))


class Rebinding(nn.Module):
    """A running mean that is a new tensor each time, and is read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y * self.mean


def tail() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)]


def tied() -> list[nn.Module]:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return [first, nn.Tanh(), last, nn.Tanh(), *tail()]


def frozen() -> list[nn.Module]:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), *tail()]
    for parameter in (*layers[0].parameters(), *layers[2].parameters()):
        parameter.requires_grad_(False)
    return layers


UNUSUAL: dict[str, Callable[[], list[nn.Module]]] = {
    "drawing": lambda: [Drawing(), Drawing(), *tail()],
    "rebinding": lambda: [Rebinding(), nn.Tanh(), *tail()],
    "in place": lambda: [nn.Linear(6, 6), InPlace(), InPlace(), nn.ReLU(inplace=True), *tail()],
    "several": lambda: [Several(), Gathering(), *tail()],
    "tied": tied,
    "frozen": frozen,
    "spectral": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), *tail()],
}


def run_layers(
    build: Callable[[], list[nn.Module]], recompute: object, stages: int = 2, schedule: str = "gpipe"
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Three steps of gpipe, so that every stage but a single one recomputes, and what is drawn afterwards."""
    torch.manual_seed(5)
    pipe = pipeline([layer.double() for layer in build()], schedule=schedule, stages=stages, recompute=recompute)
    torch.manual_seed(6)
    losses = [float(pipe.step(X, Y).loss) for _ in range(3)]
    pipe.drain()
    return losses, pipe.state_dict()["model"], torch.rand(3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("recompute", [True, "layers", {0}])
@pytest.mark.parametrize("stages", [1, 2])
def test_unusual_layers_keep_their_bits(name: str, recompute: object, stages: int) -> None:
    assert_same(run_layers(UNUSUAL[name], False, stages), run_layers(UNUSUAL[name], recompute, stages))


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_autocast_is_that_of_the_forward(recompute: object) -> None:
    """Under 2bw some backwards run in the drain, outside of autocast, and with autocast on for a step without it."""
    subject = models.SUBJECTS["normalized"]

    def run(recompute: object) -> tuple[list[float], dict[str, Tensor]]:
        sample = (subject.sample[0].float(),)
        pipe = pipeline(subject.build().float(), sample=sample, schedule="2bw", stages=3, recompute=recompute)
        losses = []
        for number, (x, y) in enumerate(subject.batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
                losses.append(pipe.step(x.float(), y).loss)
        pipe.drain()
        return [float(loss) for loss in losses], pipe.state_dict()["model"]

    assert_same(run(False), run(recompute))


class Counting(nn.Module):
    """Calls `note` in every forward: a count in an attribute would be state, which is not recomputed."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return torch.tanh(self.linear(x))


FORWARDS = [0, 0, 0]
"""What a file holds is no state of a layer: that all of them write it costs no stage."""


def count(index: int) -> None:
    FORWARDS[index] += 1


def count_forwards(schedule: str, recompute: object) -> list[int]:
    """How often each of three stages went forward in a step of four microbatches and the drain."""
    layers = [Counting(partial(count, index)).double() for index in range(3)]
    x = torch.randn(8, 6, dtype=torch.float64)
    options = {"sample": (x[:2],), "loss_fn": F.mse_loss, "stages": 3, "check": "off"}
    pipe = pipeline(layers, schedule=schedule, recompute=recompute, **options)
    FORWARDS[:] = [0, 0, 0]
    pipe.step(x, x)
    pipe.drain()
    return [*FORWARDS]


def test_a_backward_at_once_recomputes_nothing() -> None:
    for recompute in (True, "layers"):
        assert count_forwards("gpipe", recompute) == [8, 8, 8]
        for schedule in ("1f1b-flush", "pipedream", "2bw"):
            assert count_forwards(schedule, recompute) == [8, 8, 4]
    assert count_forwards("gpipe", {1}) == [4, 8, 4]
    assert count_forwards("gpipe", None) == [4, 4, 4]


def kept_bytes(recompute: object, layers: int = 4) -> list[int]:
    """What autograd keeps in a step of gpipe of one stage and four microbatches, whenever a loss is computed."""
    width, kept = 16, []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        kept.append(sum(record.storages().values()))
        return F.mse_loss(output, target)

    halves = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2 * layers)]
    model = [nn.Sequential(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]
    x = torch.randn(8, width)
    pipe = pipeline(model, sample=(x[:2],), loss_fn=loss_fn, schedule="gpipe", stages=1, recompute=recompute)
    with recording() as record:
        pipe.step(x, x)
    return kept


def test_between_forward_and_backward_only_inputs_are_kept() -> None:
    # Microbatches of 2 rows of 16 floats: 128 bytes. The fourth loss comes when four microbatches are in flight.
    inputs, results, outputs = 4 * 4 * 128, 4 * 4 * 2 * 128, 4 * 128
    weights = (2 * 4 - 1) * 16 * 16 * 4  # the first one is not needed, since the batch needs no gradient

    assert kept_bytes(True)[3] == 0
    assert kept_bytes("layers")[3] == inputs + outputs
    assert kept_bytes(False)[3] == weights + 4 * 128 + results


def test_what_is_kept_is_what_the_simulator_says() -> None:
    """One stage whose input is the batch: nothing in between, and what one microbatch saves while it goes back."""
    weights, saved = (2 * 4 - 1) * 16 * 16 * 4, 4 * 2 * 128
    layers = tuple(penstock.LayerProfile(str(index), 1.0, 2.0, 128, 2 * 128, 0) for index in range(4))
    plan = penstock.Plan.uniform(4, 1, schedule="gpipe", microbatches=4, recompute=True)
    rank = penstock.simulate(plan, penstock.Profile(layers, 2), penstock.Cluster.uniform(1, 1e9)).memory[0]
    # The whole batch is saved as the first layer's input; it is the user's.
    kept = kept_bytes(True)

    assert [max(0, size - weights - 4 * 128) for size in kept] == [0] * 4 + [saved] * 4
    assert {size for _, size in rank.activations} == {saved, 0.0}
    assert rank.activations[0] == (4 * 4 * 1.0, saved)  # after the last forward


@pytest.mark.parametrize(("recompute", "schedule"), [(True, "2bw"), ("layers", "gpipe"), (True, "zb-h1")])
def test_live_tensors_are_constant_from_step_to_step(recompute: object, schedule: str) -> None:
    counts = count_tensors(Case("layered", schedule, 3, 4, "adamw"), 7, recompute=recompute)

    assert len(set(counts[3:])) == 1, counts


def test_a_plan_recomputes() -> None:
    case = Case("layered", "gpipe", 2, 4)
    plan = replace(case.options["plan"], recompute=True)
    pipe = penstock.Pipeline(case.build(), **{**case.options, "plan": plan})
    losses = tuple(float(pipe.step(x, y).loss) for x, y in case.batches)

    assert pipe.plan.recompute
    assert losses == reference(case).losses
    assert not penstock.Pipeline(case.build(), **{**case.options, "plan": plan}, recompute=False).plan.recompute


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "vertical"])
def test_a_step_alone_shows_what_follows_at_once(schedule: str) -> None:
    """The worker sees one step after the other, the simulator all of them: they must decide alike."""
    for ranks in (1, 2, 4):
        per_rank = 2 if schedule == "interleaved" else 1
        made = penstock.schedule(
            penstock.Plan.uniform(8, ranks * per_rank, schedule=schedule, microbatches=4, stages_per_rank=per_rank)
        )
        parts = [*(made.step(minibatch) for minibatch in range(3)), made.drain(3)]
        for rank, row in enumerate(made.program(3)):
            assert find_direct(row) == frozenset().union(*(find_direct(part[rank]) for part in parts))


def test_messages_do_not_separate_a_backward_from_its_forward() -> None:
    (row,) = parse_programs("0F0@0 1F0@0 1B0@0 0B0@0 0F1@0 0S1>1 1R1<0 1A1 0B1@0")
    assert find_direct(row) == {(1, 0), (0, 1)}
    (row,) = parse_programs("0F0@0 0U1<0 0B0@0 0F1@1 0F2@1 0B1@1 0B2@1")
    assert find_direct(row) == set()


class Searching(nn.Module):
    """Asks for a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            (slope,) = torch.autograd.grad(y.sum(), self.linear.bias, retain_graph=True)
            y = y + slope
        return y


class Descending(nn.Module):
    """Moves its input along gradients, after layers with a state and random numbers."""

    def __init__(self, steps: int, connected: bool) -> None:
        super().__init__()
        self.before, self.energy = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3)), nn.Linear(6, 1)
        self.steps, self.connected = steps, connected

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(self.steps):
                energy = self.energy(y).tanh().sum()
                (force,) = torch.autograd.grad(energy, y, create_graph=self.connected)
                y = y - force if self.connected else (y - force).requires_grad_()
        return x + y


class Implicit(nn.Module):
    """A fixed point, whose hook solves for its gradient in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = torch.zeros_like(x)
            for _ in range(4):
                found = torch.tanh(self.linear(found) + x)
        result = torch.tanh(self.linear(found) + x)
        if result.requires_grad:
            inner = found.clone().requires_grad_()
            again = torch.tanh(self.linear(inner) + x)

            def solve(gradient: Tensor) -> Tensor:
                return gradient + torch.autograd.grad(again, inner, gradient, retain_graph=True)[0]

            result.register_hook(solve)
        return result


ASKING: dict[str, Callable[[], nn.Module]] = {
    "a gradient that is kept": Searching,
    "a force": lambda: Descending(1, connected=True),
    "a force without a graph": lambda: Descending(1, connected=False),
    "three steps": lambda: Descending(3, connected=True),
    "an implicit layer": Implicit,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
@pytest.mark.parametrize("name", ASKING)
def test_layers_whose_forward_asks_for_gradients_are_repeated_with_the_same_bits(name: str, schedule: str) -> None:
    build = lambda: [nn.Linear(6, 6), ASKING[name](), *tail()]  # noqa: E731

    assert_same(run_layers(build, False, schedule=schedule), run_layers(build, "layers", schedule=schedule))


def test_a_gradient_in_a_forward_is_refused_where_it_cannot_be_had() -> None:
    def searching() -> list[nn.Module]:
        return [Searching(), *tail()]

    with pytest.raises(penstock.PenstockError, match="asked for gradients in its forward"):
        run_layers(searching, True)
    assert run_layers(searching, {1})[0] == run_layers(searching, False)[0]


class Mixed(nn.Module):
    """Buffers that are written: declared, silently, and through a view; and buffers that are only read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        for name in ("seen", "rows", "mask", "unread"):
            self.register_buffer(name, torch.ones(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean(0))
        self.rows[1].mul_(0.5)
        return self.norm(self.linear(x * self.mask[0])) + self.seen.clone()[0] + self.rows.clone()[1]


def test_only_buffers_that_may_be_written_are_copied() -> None:
    chain = penstock.capture(models.InARow(Mixed(), nn.Linear(6, 3)), (torch.randn(4, 6),))
    found = {name for layer in chain.layers for _, name in find_writable(layer.module)}
    plain = {name for _, name in find_writable(Mixed())}

    # A block is the user's own code, which may write any of its buffers.
    assert found == plain == {"running_mean", "running_var", "num_batches_tracked", "seen", "rows", "mask", "unread"}


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_replicas_sum_what_two_layers_of_a_stage_share(recompute: object) -> None:
    """The gradient of the shared weight is whole before it leaves."""

    def run(recompute: object) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(5)
        stages = (penstock.Stage(0, 4, (0, 1)), penstock.Stage(4, 6, (2,)))
        plan = penstock.Plan(stages, "gpipe", 4)
        pipe = pipeline([layer.double() for layer in tied()], plan=plan, microbatches=None, recompute=recompute)
        return [float(pipe.step(X, Y).loss) for _ in range(3)], pipe.state_dict()["model"]

    assert_same(run(False), run(recompute))


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_a_batch_may_be_overwritten_in_flight(recompute: object) -> None:
    case = Case("normalized", "2bw", 2, 4)
    pipe = penstock.Pipeline(case.build(), **case.options, recompute=recompute)
    for x, y in case.batches:
        # Other tests train on these batches too.
        own = x.clone()
        pipe.step(own, y)
        own.zero_()
    expected = penstock.reference_train(case.build(), case.batches, **case.options).state
    found = pipe.state_dict()["model"]

    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
