"""One training of the convergence study: a model, an optimizer and its rate, a seed, and the method that trains.

Laws of this file:
  1. Runs of one model and seed begin at the same weights and see the same samples in the same order.
  2. All methods update once per minibatch of the task's size: curves over samples compare update with update.
  3. Validation reads the newest weights where they are. It never drains, since a drain takes the staleness away.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import penstock
from convergence.corrections import ErrorFeedback, LookAhead
from convergence.tasks import STAGES, TASKS, Task, straight_plan
from convergence.unstashed import Unstashed

__all__ = ["METHODS", "MICROBATCHES", "QUICK", "Method", "Run", "train"]

MICROBATCHES = 4
"""Of a minibatch, where a method cuts it; as many as devices under data parallelism. `2bw` needs one for each stage."""
WARM_UP = 0.1
"""Share of the updates over which the rate rises; after that it falls to a tenth along a cosine."""
QUICK = 4
"""Updates that show whether a method runs, and the least from one validation to the next."""
LOST = 3.0
"""A run that meets a minibatch whose loss is this many times the first one's has diverged, and ends."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train. Without a `schedule` it is a plain loop on one device."""

    name: str
    schedule: str = ""
    whole: bool = False
    """The minibatch is one microbatch. So it is for `pipedream`, which updates after each microbatch."""
    vertical_sync: bool = False
    stashing: bool = True
    hook: Callable[[], penstock.UpdateHook] | None = None
    """Makes the correction of the pipeline's updates."""
    variant: str = ""
    """Of the optimizer. "nadam": NAdam with a long memory in AdamW's place, as AsyncPP has it (ICML 2025). "plain":
    without momentum, which the hook brings."""
    tasks: tuple[str, ...] = ("gpt", "digits")
    optimizers: tuple[str, ...] = ("sgd", "adamw", "muon")
    correction: bool = False
    """Drawn among the corrections."""

    def trains(self, task: str, optimizer: str) -> bool:
        """Whether the study has this method for them."""
        return task in self.tasks and optimizer in self.optimizers


_MOMENTUM = 0.9
"""Of SGD and of AdamW's first moments, and of the look-ahead that takes their place."""
_LOOK_AHEAD: dict[str, Any] = {
    "hook": partial(LookAhead, momentum=_MOMENTUM),
    "variant": "plain",
    "correction": True,
    "optimizers": ("sgd", "adamw"),
}
METHODS = {
    method.name: method
    for method in (
        Method("data parallelism"),
        # BatchNorm sees whole minibatches under pipedream, which must be compared with this where there is BatchNorm.
        Method("one device", whole=True, tasks=("digits",)),
        Method("flush", "1f1b-flush"),
        Method("pipedream", "pipedream", whole=True),
        Method("pipedream, vertical sync", "pipedream", whole=True, vertical_sync=True),
        Method("pipedream, no stashing", "pipedream", whole=True, stashing=False),
        Method("2bw", "2bw"),
        Method("data parallelism, NAdam", variant="nadam", correction=True, optimizers=("adamw",)),
        Method("flush, look-ahead", "1f1b-flush", **_LOOK_AHEAD),
        Method("2bw, NAdam", "2bw", variant="nadam", correction=True, optimizers=("adamw",)),
        Method("2bw, look-ahead", "2bw", **_LOOK_AHEAD),
        Method("2bw, weight prediction", "2bw", hook=penstock.WeightPrediction, correction=True),
        Method("2bw, error feedback", "2bw", hook=ErrorFeedback, correction=True),
        Method("pipedream, NAdam", "pipedream", whole=True, variant="nadam", correction=True, optimizers=("adamw",)),
        Method(
            "pipedream, weight prediction",
            "pipedream",
            whole=True,
            hook=penstock.WeightPrediction,
            correction=True,
            optimizers=("adamw",),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """What tells one run of the study from the others."""

    task: str
    optimizer: str
    method: str
    rate: float
    seed: int
    stages: int = STAGES
    updates: int = 0

    @property
    def key(self) -> str:
        """One text for each run."""
        return "/".join(str(value) for value in astuple(self))


class Trainer(Protocol):
    """Takes minibatches."""

    def step(self, inputs: Tensor, target: Tensor) -> float:
        """Trains on a minibatch; its loss."""

    def drain(self) -> None:
        """Finishes what is in flight."""


MakeOptimizers = Callable[[penstock.NamedParameters], list[torch.optim.Optimizer]]
MakeScheduler = Callable[[torch.optim.Optimizer], LambdaLR]


def make_optimizers(task: Task, name: str, rate: float, variant: str) -> MakeOptimizers:
    """The function that makes the optimizer `name` for some of the task's parameters.

    Muon is for the matrices between the first layer and the last one, and AdamW beside it for the rest, at one rate:
    ``match_rms_adamw`` gives Muon's updates the size of AdamW's. SGD sums its steps up where a look-ahead averages
    them, so that for the same pace it then needs a larger rate.
    """
    momentum = 0.0 if variant == "plain" else _MOMENTUM
    ends = ("0.", f"{task.cuts[-1] - 1}.")

    def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if variant == "nadam":
            return torch.optim.NAdam(
                params, lr=rate, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True
            )
        return torch.optim.AdamW(params, lr=rate, betas=(momentum, 0.95), weight_decay=0.01)

    def make(params: penstock.NamedParameters) -> list[torch.optim.Optimizer]:
        if name == "sgd":
            return [torch.optim.SGD(params, lr=rate if momentum else rate / (1 - _MOMENTUM), momentum=momentum)]
        if name == "adamw":
            return [adamw(params)]
        inner = params.where(lambda name, p: p.ndim == 2 and not name.startswith(ends))
        others = params.where(lambda name, p: p.ndim != 2 or name.startswith(ends))
        made: list[torch.optim.Optimizer] = [adamw(others)]
        if inner:
            kept = 0.95 if momentum else 0.0
            muon = torch.optim.Muon(
                inner, rate, weight_decay=0.01, momentum=kept, nesterov=kept > 0, adjust_lr_fn="match_rms_adamw"
            )
            made.append(muon)
        return made

    return make


def make_scheduler(updates: int) -> MakeScheduler:
    """A warm-up and a cosine over `updates` updates."""

    def factor(update: int) -> float:
        return min(1.0, (update + 1) / (WARM_UP * updates)) * (0.55 + 0.45 * math.cos(math.pi * update / updates))

    return lambda optimizer: LambdaLR(optimizer, factor)


class _Plain:
    """A training loop in plain PyTorch: the mean gradient over as many parts as there are devices.

    What `DistributedDataParallel` computes, with the parts' gradients summed in their order.
    """

    def __init__(self, task: Task, layers: Sequence[nn.Module], parts: int, make: MakeOptimizers, decay: MakeScheduler):
        self.model, self.loss_fn, self.parts = nn.Sequential(*layers), task.loss_fn, parts
        optimizers = make(penstock.NamedParameters(dict(self.model.named_parameters())))
        self.made = [(optimizer, decay(optimizer)) for optimizer in optimizers]

    def step(self, inputs: Tensor, target: Tensor) -> float:
        total = 0.0
        for x, y in zip(inputs.chunk(self.parts), target.chunk(self.parts), strict=True):
            loss = self.loss_fn(self.model(x), y)
            torch.autograd.backward(loss * (len(x) / len(inputs)))
            total += float(loss.detach().double()) * (len(x) / len(inputs))
        for optimizer, scheduler in self.made:
            optimizer.step()
            scheduler.step()
        self.model.zero_grad()
        return total

    def drain(self) -> None:
        pass


class _Piped:
    """The library, with all stages in this process."""

    def __init__(self, task: Task, layers: list[nn.Module], run: Run, make: MakeOptimizers, decay: MakeScheduler):
        method = METHODS[run.method]
        microbatches = 1 if method.whole else MICROBATCHES
        hooks = [] if method.hook is None else [method.hook()]
        inputs, _ = task.batches.held_out
        self.pipe = penstock.Pipeline(
            layers,
            sample=(inputs[: task.samples // microbatches],),
            loss_fn=task.loss_fn,
            optimizer=make,
            plan=straight_plan(task, method.schedule, run.stages, microbatches, method.vertical_sync),
            lr_scheduler=decay,
            update_hooks=hooks,
        )

    def step(self, inputs: Tensor, target: Tensor) -> float:
        return float(self.pipe.step(inputs, target).loss)

    def drain(self) -> None:
        self.pipe.drain()


def make_trainer(task: Task, layers: list[nn.Module], run: Run, updates: int) -> Trainer:
    """What trains `layers` by the run's method."""
    method = METHODS[run.method]
    make = make_optimizers(task, run.optimizer, run.rate, method.variant)
    decay = make_scheduler(updates)
    if not method.schedule:
        return _Plain(task, layers, 1 if method.whole else MICROBATCHES, make, decay)
    if not method.stashing:
        return Unstashed(task, layers, run.stages, make, decay)
    return _Piped(task, layers, run, make, decay)


def validate(task: Task, layers: Sequence[nn.Module]) -> tuple[float, float]:
    """Loss and accuracy on the held-out samples with the weights and BatchNorm statistics as they are now."""
    model = nn.Sequential(*layers)
    inputs, target = task.batches.held_out
    model.eval()
    with torch.no_grad():
        output = model(inputs)
        loss = float(task.loss_fn(output, target))
    model.train()
    return loss, float((output.argmax(-1) == target).float().mean())


def train(run: Run, points: int = 16) -> dict[str, Any]:
    """Trains, and tells of it in figures that JSON can hold.

    `losses` and `validation` are (updates so far, loss): the mean training loss since the point before, and the loss on
    held-out samples. The last entry of `validation` is after the drain. `digest` is of the final weights and of the
    losses of all minibatches, bit by bit. A run that `diverged` has no more than its curves.
    """
    task = TASKS[run.task]
    updates = run.updates or task.updates
    torch.manual_seed(run.seed)
    layers = task.build()
    batches = task.batches.stream(torch.Generator().manual_seed(run.seed))
    trainer = make_trainer(task, layers, run, updates)
    every, seen = max(QUICK, updates // points), 0
    losses: list[float] = []
    curve: list[tuple[int, float]] = []
    judged = [(0, validate(task, layers)[0])]
    for update in range(1, updates + 1):
        losses.append(trainer.step(*next(batches)))
        if not losses[-1] < LOST * losses[0]:
            return {"diverged": update, "losses": curve, "validation": judged}
        if update % every == 0:
            curve.append((update, sum(losses[seen:]) / (update - seen)))
            seen = update
            if update < updates:
                judged.append((update, validate(task, layers)[0]))
    trainer.drain()
    loss, accuracy = validate(task, layers)
    digest = hashlib.sha256(repr(losses).encode())
    for layer in layers:
        for tensor in layer.state_dict().values():
            digest.update(tensor.numpy().tobytes())
    return {
        "diverged": None,
        "losses": curve,
        "validation": [*judged, (updates, loss)],
        "final": loss,
        "accuracy": accuracy,
        "digest": digest.hexdigest()[:16],
    }
