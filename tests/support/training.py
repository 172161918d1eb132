"""Runs of a subject under a schedule: by the pipeline (here or in many processes) and by the oracle."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.torch_internals.pytrees import tree_flatten, tree_unflatten
from support import models
from support.live_tensors import count_at_rest, forget_what_is_there

LAYERS = 8
"""Of every subject."""
PAIRED = ("interleaved", "breadth-first", "zb-v", "v-half", "v-min")
"""The schedules under which a rank has two stages, in these tests."""
FLUSHING = ("gpipe", "1f1b-flush", "breadth-first", "interleaved", "spp", "zb-h1", "zb-v", "v-half", "v-min")
"""Schedules that end every step with all updates made."""


def stages_on_a_rank(schedule: str) -> int:
    """How many stages a rank has under `schedule`, in these tests."""
    return 2 if schedule in PAIRED else 1


def find_subject(name: str) -> models.Subject:
    """One of the models, or the one that need not be traced."""
    return models.LAYERED if name == "layered" else models.SUBJECTS[name]


def with_accuracy(output: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A tensor and a number beside the loss."""
    loss = F.cross_entropy(output, y)
    return loss, {"accuracy": (output.argmax(-1) == y).double().mean(), "entropy": loss.item()}


@dataclass(frozen=True)
class Case:
    """One training run. `schedule` 'vertical' is `pipedream` with vertical sync."""

    subject: str
    schedule: str
    ranks: int
    microbatches: int
    optimizer: str = "momentum"
    stages_per_rank: int = 1
    drain_after: tuple[int, ...] = ()
    device: str = "cpu"
    turned: bool = False
    """Whether the first stage is on the last rank, and so on."""
    replicas: tuple[int, ...] = ()
    """Of each stage (of each position of a pipeline, under `interleaved`); () is one each."""
    split: bool = False
    """Whether learning rates scale with the replicas."""
    samples: tuple[int, ...] = ()
    """Of each batch; () takes them whole."""

    @property
    def processes(self) -> int:
        """How many ranks there are, replicas included."""
        return sum(self.replicas) or self.ranks

    @property
    def options(self) -> dict[str, Any]:
        subject = find_subject(self.subject)
        plan = penstock.Plan.uniform(
            LAYERS,
            self.ranks * self.stages_per_rank,
            schedule="pipedream" if self.schedule == "vertical" else self.schedule,
            microbatches=self.microbatches,
            stages_per_rank=self.stages_per_rank,
            vertical_sync=self.schedule == "vertical",
        )
        if self.turned:
            stages = (penstock.Stage(s.start, s.stop, (self.ranks - 1 - s.ranks[0],)) for s in plan.stages)
            plan = replace(plan, stages=tuple(stages))
        if self.replicas:
            ends = list(accumulate(self.replicas, initial=0))
            groups = [tuple(range(start, stop)) for start, stop in pairwise(ends)]
            stages = (penstock.Stage(s.start, s.stop, groups[s.ranks[0]]) for s in plan.stages)
            plan = replace(plan, stages=tuple(stages), routing="split" if self.split else "round-robin")
        return {
            "sample": tuple(tensor.to(self.device) for tensor in subject.sample),
            "loss_fn": subject.loss_fn,
            "optimizer": getattr(models, self.optimizer),
            "plan": plan,
            "seed": 3,
        }

    def build(self) -> nn.Module:
        return find_subject(self.subject).build().to(self.device)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        batches = [(x.to(self.device), y.to(self.device)) for x, y in find_subject(self.subject).batches]
        return [(x[:size], y[:size]) for (x, y), size in zip(batches, self.samples, strict=False)] or batches


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: every loss, and the final weights and buffers (of one rank, or whole)."""

    losses: tuple[float, ...]
    state: dict[str, Tensor]
    evaluated: float | None = None
    """The loss of the first batch after the training, where ranks are `turned`."""


def assert_equal(expected: Outcome, actual: Outcome) -> None:
    """Every loss and every tensor of `actual` is exactly the expected one."""
    assert expected.losses == actual.losses
    for name, tensor in actual.state.items():
        assert torch.equal(expected.state[name], tensor), name


def assert_ranks_equal(outcomes: Sequence[Sequence[Outcome]], expected: Sequence[Outcome]) -> None:
    """What each rank found in each run is what is `expected` of the run, and together the ranks hold all tensors."""
    for whole, parts in zip(expected, zip(*outcomes, strict=True), strict=True):
        for part in parts:
            assert_equal(whole, part)

        assert whole.state.keys() == {name for part in parts for name in part.state}


def train(
    pipe: penstock.Pipeline, batches: Sequence[Any], drain_after: Sequence[int] = (), evaluates: bool = False
) -> Outcome:
    """Trains a new pipeline: all ranks here, or this process's part of them; may evaluate the first batch; closes it.

    A batch is the arguments of `Pipeline.step`.
    """
    losses = []
    for number, batch in enumerate(batches):
        losses.append(pipe.step(*batch).loss)
        if number in drain_after:
            pipe.drain()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    evaluated = float(pipe.evaluate(*batches[0]).loss) if evaluates else None
    pipe.close()
    return Outcome(tuple(map(float, losses)), state, evaluated)


def train_by_oracle(model: Any, batches: Sequence[Any], **options: Any) -> Outcome:
    """The same by `reference_train`. Options that are None are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    reference = penstock.reference_train(model, batches, **given)
    return Outcome(reference.losses, reference.state)


def train_by_loop(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    microbatches: int = 1,
    *,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> Outcome:
    """The same by a loop of PyTorch, as its users write it, which adds up gradients. Inputs are a tensor, a tuple of
    tensors or a dict of them by keyword; there may be no target.
    """
    made, losses = optimizer(list(model.parameters())), []
    for batch in batches:
        made.zero_grad()
        leaves, structure = tree_flatten(tuple(batch))
        total, count = 0.0, microbatches
        pieces = (leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves)
        for part in zip(*pieces, strict=True):
            inputs, target = tree_unflatten(list(part), structure)
            given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
            loss = loss_fn(model(**given) if isinstance(given, dict) else model(*given), target)
            share = len(part[0]) / len(leaves[0])
            loss.backward(torch.full_like(loss, share))
            total += loss.item() * share
        before_step()
        made.step()
        after_step()
        losses.append(total)
    return Outcome(tuple(losses), {name: tensor.detach() for name, tensor in model.state_dict().items()})


def run_pipeline(case: Case, **options: Any) -> Outcome:
    """The run by `Pipeline`: all ranks here, or this process's part of them. `options` go before those of `case`.

    The first batch is compared on two ranks only, which takes a quarter of a run: it is the same on others.
    """
    check = "warn" if case.processes == 2 else "off"
    pipe = penstock.Pipeline(case.build(), **{"check": check, **case.options, **options})
    return train(pipe, case.batches, case.drain_after, evaluates=case.turned)


def count_tensors(case: Case, steps: int, **options: Any) -> list[int]:
    """How many tensors are alive after each of some steps."""
    pipe, batches = penstock.Pipeline(case.build(), **case.options, **options), case.batches
    forget_what_is_there()
    counts: list[int] = []
    for step in range(steps):
        x, y = batches[step % len(batches)]
        float(pipe.step(x, y).loss)
        counts.append(count_at_rest(counts[2:]))
    pipe.drain()
    pipe.close()
    return counts


def run_reference(case: Case, **options: Any) -> Outcome:
    """The run by the oracle: once for each case, if there are no `options`."""
    return _ask_oracle(case, options) if options else _ask_oracle_once(case)


@cache
def _ask_oracle_once(case: Case) -> Outcome:
    return _ask_oracle(case, {})


def _ask_oracle(case: Case, options: dict[str, Any]) -> Outcome:
    return train_by_oracle(case.build(), case.batches, drain_after=case.drain_after, **{**case.options, **options})
