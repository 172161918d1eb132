"""`pipedream` without weight stashing: an ablation that the library does not offer, since its gradients are wrong."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import penstock
from convergence.tasks import Task, straight_plan
from penstock.scheduling.actions import Backward, Forward, Update

__all__ = ["Unstashed"]

MakeOptimizers = Callable[[penstock.NamedParameters], list[Optimizer]]
MakeScheduler = Callable[[Optimizer], LambdaLR]


class Unstashed:
    """One set of weights for each stage, all stages in this process.

    The order of every rank is that of the library's schedule, so forwards read the versions that they read there. But
    an update writes over the weights, and the backward of a microbatch that was forwarded before it goes through the
    new ones: its gradient is that of no weights at all. PyTorch's check against this is passed by: the optimizer steps
    aliases of the parameters (``.data``), whose writes it does not count.
    """

    def __init__(
        self, task: Task, layers: Sequence[nn.Module], stages: int, make: MakeOptimizers, decay: MakeScheduler
    ) -> None:
        self.schedule = penstock.schedule(straight_plan(task, "pipedream", stages, 1))
        self.loss_fn, self.steps = task.loss_fn, 0
        self.stages: list[nn.Sequential] = []
        self.aliases: list[dict[nn.Parameter, nn.Parameter]] = []
        self.made: list[list[tuple[Optimizer, LambdaLR]]] = []
        for start, stop in pairwise(task.cuts_for(stages)):
            self.stages.append(nn.Sequential(*layers[start:stop]))
            held = [(index, *pair) for index in range(start, stop) for pair in layers[index].named_parameters()]
            named = {f"{index}.{name}": parameter for index, name, parameter in held}
            aliases = {name: nn.Parameter(p.data) for name, p in named.items()}
            self.aliases.append({p: aliases[name] for name, p in named.items()})
            optimizers = make(penstock.NamedParameters(aliases))
            self.made.append([(optimizer, decay(optimizer)) for optimizer in optimizers])
        self.batches: dict[int, tuple[Tensor, Tensor]] = {}
        self.received: dict[tuple[str, int, int], Tensor] = {}
        """What came to a stage for a microbatch: ("forward" or "backward", stage, microbatch)."""
        self.flying: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By stage and microbatch, what went in and what came out."""

    def step(self, inputs: Tensor, target: Tensor) -> float:
        self.batches[self.steps] = (inputs, target)
        self._run(self.schedule.step(self.steps))
        self.steps += 1
        return self.loss

    def drain(self) -> None:
        self._run(self.schedule.drain(self.steps))

    def _run(self, programs: Iterable[Iterable[object]]) -> None:
        """Every rank's actions in their order, in turns; only one that has what it needs is run."""
        rows = [deque(a for a in row if isinstance(a, Forward | Backward | Update)) for row in programs]
        while any(rows):
            for row in rows:
                while row and self._ready(row[0]):
                    self._act(row.popleft())

    def _ready(self, action: Forward | Backward | Update) -> bool:
        last = len(self.stages) - 1
        match action:
            case Forward(stage, k, _):
                return stage == 0 or ("forward", stage, k) in self.received
            case Backward(stage, k, _):
                return stage == last or ("backward", stage, k) in self.received
            case Update():
                return True

    def _act(self, action: Forward | Backward | Update) -> None:
        match action:
            case Forward(stage, k, _):
                self._forward(stage, k)
            case Backward(stage, k, _):
                given, made = self.flying.pop((stage, k))
                torch.autograd.backward(made, self.received.pop(("backward", stage, k), None))
                if given.grad is not None:
                    self.received["backward", stage - 1, k] = given.grad
            case Update(stage):
                for parameter, alias in self.aliases[stage].items():
                    alias.grad, parameter.grad = parameter.grad, None
                for optimizer, scheduler in self.made[stage]:
                    optimizer.step()
                    scheduler.step()

    def _forward(self, stage: int, k: int) -> None:
        if stage == 0:
            given = self.batches[k][0]
        else:
            given = self.received.pop(("forward", stage, k)).requires_grad_()
        made = self.stages[stage](given)
        if stage < len(self.stages) - 1:
            self.received["forward", stage + 1, k] = made.detach()
        else:
            made = self.loss_fn(made, self.batches.pop(k)[1])
            self.loss = float(made.detach())
        self.flying[stage, k] = (given, made)
