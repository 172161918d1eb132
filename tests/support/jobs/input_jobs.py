"""A model that reads its inputs in every block, every way of passing them, and models of which only parts are trained.

Also jobs for the processes of the pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.training import Outcome

VOCABULARY, WIDTH, BLOCKS = 20, 6, 4
POSITIONS = torch.arange(16)
"""Without a batch dimension: every microbatch needs all of it."""


class Block(nn.Module):
    """Mixes the positions that the mask leaves; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.near = nn.Linear(WIDTH, WIDTH), nn.Embedding(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        hidden = hidden + self.near(positions[: hidden.shape[1]])
        mean = (hidden * mask[:, :, None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        mixed = torch.tanh(self.linear(hidden + mean))
        return hidden + self.norm(mixed.flatten(0, 1)).view_as(mixed)


class Reader(nn.Module):
    """Every block reads the mask and the positions: arguments that a pipeline must bring to all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        positions: Tensor,
        scale: float = 1.0,
        mode: str = "plain",
        extra: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embedding(tokens) * scale
        for block in self.blocks:
            hidden = block(hidden, mask, positions)
        assert mode == "plain" and extra is None
        return self.head(hidden)


@dataclass
class Rest:
    positions: Tensor
    scale: float = 1.0
    note: str | None = None


@dataclass
class Words:
    tokens: Tensor
    mask: Tensor
    rest: Rest


class Trio(NamedTuple):
    tokens: Tensor
    mask: Tensor
    positions: Tensor


@dataclass
class Answer:
    logits: Tensor
    length: int
    extra: Tensor | None = None


class OfDict(Reader):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        mask, (positions,) = batch["rest"]
        return {"logits": super().forward(batch["tokens"], mask, positions), "kind": "words", "none": None}


class OfDataclass(Reader):
    def forward(self, words: Words) -> Answer:
        return Answer(super().forward(words.tokens, words.mask, words.rest.positions, words.rest.scale), 7)


class OfTuple(Reader):
    def forward(self, trio: Trio) -> tuple[Tensor, list[Tensor]]:
        logits = super().forward(*trio)
        return logits, [logits.mean(), trio.positions]


@dataclass(frozen=True)
class Way:
    """One way to pass the inputs and to get the logits."""

    kind: Callable[[], nn.Module]
    sample: Callable[[Tensor, Tensor], Any]
    logits: Callable[[Any], Tensor]
    batch: Callable[[Tensor, Tensor], Any] | None = None
    """None if it is as the sample."""

    def loss_fn(self, output: Any, target: Tensor) -> Tensor:
        """Mean over the samples."""
        return F.cross_entropy(self.logits(output).flatten(0, 1), target.flatten())

    def inputs(self, tokens: Tensor, mask: Tensor) -> Any:
        """What a step gets."""
        return (self.batch or self.sample)(tokens, mask)


def _same(output: Any) -> Any:
    return output


PLAIN = Way(Reader, lambda t, m: (t, m, POSITIONS), _same)
WAYS = {
    "arguments": PLAIN,
    "list": Way(Reader, lambda t, m: (t, m, POSITIONS), _same, lambda t, m: [t, m, POSITIONS]),
    "keywords": Way(
        Reader,
        lambda t, m: {"tokens": t, "mask": m, "positions": POSITIONS, "scale": 1.0, "mode": "plain", "extra": None},
        _same,
    ),
    "one dict": Way(
        OfDict,
        lambda t, m: ({"tokens": t, "rest": (m, [POSITIONS])},),
        lambda output: output["logits"],
        lambda t, m: {"tokens": t, "rest": (m, [POSITIONS])},
    ),
    "one dataclass": Way(OfDataclass, lambda t, m: Words(t, m, Rest(POSITIONS)), lambda output: output.logits),
    "one named tuple": Way(
        OfTuple,
        lambda t, m: (Trio(t, m, POSITIONS),),
        lambda output: output[0],
        lambda t, m: Trio(t, m, POSITIONS),
    ),
}


def build(way: Way) -> nn.Module:
    """The same weights for every way."""
    torch.manual_seed(0)
    return way.kind().double()


def draw(samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask (every sample of another length) and a target."""
    generator = torch.Generator().manual_seed(samples * 100 + length)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    mask = (torch.arange(length) < 2 + torch.arange(samples)[:, None] % (length - 1)).double()
    return tokens, mask, torch.randint(0, VOCABULARY, (samples, length), generator=generator)


def run_steps(
    way: Way, sizes: Sequence[tuple[int, int]], **options: Any
) -> tuple[list[float], dict[str, Tensor], penstock.Pipeline]:
    """Losses and state after steps on batches of (samples, length), and the pipeline; captured with 3 samples of 5."""
    tokens, mask, _ = draw(3, 5)
    pipe = penstock.Pipeline(
        build(way), way.sample(tokens, mask), loss_fn=way.loss_fn, optimizer=models.momentum, **options
    )
    losses = []
    for size in sizes:
        tokens, mask, target = draw(*size)
        losses.append(pipe.step(way.inputs(tokens, mask), target).loss)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    return [float(loss) for loss in losses], state, pipe


def train_and_look(
    way: str, schedule: str, sizes: Sequence[tuple[int, int]], stages: int | None = None
) -> dict[str, Any]:
    """What this rank sees of a training and, before and after it, of evaluations and predictions of other sizes."""
    chosen = WAYS[way]
    losses, state, pipe = run_steps(chosen, [], schedule=schedule, microbatches=3, stages=stages)
    seen: dict[str, Any] = {"before": _look(pipe, chosen)}
    for size in sizes:
        tokens, mask, target = draw(*size)
        losses.append(float(pipe.step(chosen.inputs(tokens, mask), target).loss))
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    seen |= {"losses": losses, "state": state, "after": _look(pipe, chosen)}
    pipe.close()
    return seen


def _look(pipe: penstock.Pipeline, way: Way) -> list[tuple[float, Tensor]]:
    looks = []
    for size in ((1, 4), (2, 3), (7, 9)):
        tokens, mask, target = draw(*size)
        inputs = way.inputs(tokens, mask)
        looks.append((float(pipe.evaluate(inputs, target).loss), way.logits(pipe.predict(inputs))))
    return looks


class Spare(nn.Linear):
    """A layer with a parameter that no forward uses."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width, width)
        self.unused = nn.Parameter(torch.ones(3))


@dataclass(frozen=True)
class Partial:
    """A run on three ranks of a model of three pairs of layers, of which some are `frozen`."""

    schedule: str
    frozen: tuple[int, ...]
    traced: bool = False
    """Whether the model is captured as a trace and not as the row of layers that it is."""

    def build(self) -> nn.Module:
        """The model."""
        torch.manual_seed(3)
        layers = nn.Sequential(*(nn.Sequential(Spare(), nn.Tanh()) for _ in range(3))).double()
        for index in self.frozen:
            layers[index].requires_grad_(False)
        return Wrapped(layers) if self.traced else layers

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that the pipeline and the oracle share."""
        stages = 3 if self.traced else 6
        plan = penstock.Plan.uniform(stages, 3, schedule=self.schedule, microbatches=4)
        subject = models.SUBJECTS["perceptron"]
        return {"sample": subject.sample, "loss_fn": F.cross_entropy, "optimizer": models.adamw, "plan": plan}


class Wrapped(nn.Module):
    """Not a plain Sequential."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_partial(run: Partial) -> Outcome:
    """The run by the pipeline: all of it here, or this process's part."""
    pipe = penstock.Pipeline(run.build(), **run.options)
    losses = [pipe.step(x, y).loss for x, y in models.SUBJECTS["perceptron"].batches]
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    outcome = Outcome(tuple(float(loss) for loss in losses), state)
    pipe.close()
    return outcome


def run_partials(runs: list[Partial]) -> list[Outcome]:
    """Several runs in the present process group."""
    return [run_partial(run) for run in runs]


def run_partly_by_oracle(run: Partial) -> Outcome:
    """The run by the oracle."""
    reference = penstock.reference_train(run.build(), models.SUBJECTS["perceptron"].batches, **run.options)
    return Outcome(reference.losses, reference.state)
