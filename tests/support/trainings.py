"""One generator of trainings: a subject, a placement, a schedule, a recipe and options.

`CHOICES` is the table of what may vary. `covering` names each of its values once with every schedule that allows it,
in cases that are plain otherwise; `drawn_trainings` draws combinations. Whatever the case is, the pipeline has the bits
of `reference_train`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock import RowInt8
from penstock.scheduling import METHODS, define_by_programs
from support import models
from support.jobs.hook_jobs import Shrinking
from support.jobs.precision_jobs import CAST
from support.own_schedules import offloading
from support.random_models import Averaging
from support.skip_models import REACHING, build_web
from support.streamed_orders import random_rows
from support.training import FLUSHING, LAYERS, PAIRED, Case, Outcome, stages_on_a_rank, train_by_oracle
from support.transport_selection import sharing_memory

SCHEDULES = (*(method.name for method in METHODS), "vertical")
EVERYWHERE: tuple[str, ...] = ()
AT_ONCE = ("pipedream", "vertical")
"""Under which a stage updates behind every microbatch, and waits for no other."""
IN_VERSIONS = (*AT_ONCE, "2bw")
"""Whose stages have several versions of their weights."""
IN_PARTS = ("zb-h1", "zb-v", "v-half", "v-min")
"""Whose backwards are in two parts."""
CHOICES: dict[str, dict[Any, Sequence[str]]] = {
    "subject": {
        **dict.fromkeys(("perceptron", "normalized", "skipping", "stateful", "layered"), EVERYWHERE),
        **dict.fromkeys(("web", "typed", "embedded", "averaging", "frozen ends", "frozen middle"), EVERYWHERE),
        **dict.fromkeys(("tied", "tied ends", "tied neighbours"), AT_ONCE),
    },
    "placement": {
        "straight": EVERYWHERE,
        "turned": EVERYWHERE,
        **dict.fromkeys(((2, 2), (3,)), EVERYWHERE),
        **dict.fromkeys(((2, 1), (1, 2, 1), (2, 3), (3, 1)), (*PAIRED, "vertical")),
    },
    "split": {False: EVERYWHERE, True: EVERYWHERE},
    "drains": {(): EVERYWHERE, (0, 2): EVERYWHERE, (1,): EVERYWHERE},
    "ragged": {False: EVERYWHERE, True: EVERYWHERE},
    "varies": {False: EVERYWHERE, True: EVERYWHERE},
    "optimizer": dict.fromkeys(("momentum", "adamw", "nadam", "groups", "several"), EVERYWHERE),
    "clips": {False: EVERYWHERE, True: AT_ONCE},
    "scales": {False: EVERYWHERE, True: AT_ONCE},
    "weighs": {False: EVERYWHERE, True: EVERYWHERE},
    "rate": dict.fromkeys(("steady", "falling", "cycling"), EVERYWHERE),
    "hooks": dict.fromkeys(("none", "prediction", "average", "own"), EVERYWHERE),
    "precision": dict.fromkeys(("float64", "autocast", "low versions"), EVERYWHERE),
    "wire": dict.fromkeys(("as it is", "bfloat16", "float32", "rows"), EVERYWHERE),
    "recompute": {None: EVERYWHERE, True: EVERYWHERE, "layers": IN_PARTS},
    "offloads": {None: EVERYWHERE, "host": EVERYWHERE, "files": EVERYWHERE},
    "state": {"device": EVERYWHERE, "host": EVERYWHERE, "files": EVERYWHERE},
    "shares": {False: EVERYWHERE, True: EVERYWHERE},
    "residence": {"device": EVERYWHERE, **dict.fromkeys(("host", "files", "some"), IN_VERSIONS)},
    "saves": {0: EVERYWHERE, 1: EVERYWHERE, 3: EVERYWHERE},
}
"""The values of each field, the plain one first, and the schedules that do not allow a value."""

HOOKS: dict[str, tuple[penstock.UpdateHook, ...]] = {
    "none": (),
    "prediction": (penstock.WeightPrediction(),),
    "average": (penstock.WeightPrediction(0.3), penstock.WeightAverage(0.5)),
    "own": (Shrinking(),),
}
WIRES: dict[str, Any] = {"as it is": None, "bfloat16": torch.bfloat16, "float32": torch.float32, "rows": RowInt8()}


def _group(params: penstock.NamedParameters) -> torch.optim.Optimizer:
    """No decay for vectors, and another rate for the first layers; a process may have nothing for one group."""
    early = params.where(lambda name, p: p.ndim > 1 and "1." in name)
    late = params.where(lambda name, p: p.ndim > 1 and "1." not in name)
    groups = [
        {"params": early, "weight_decay": 0.1, "lr": 0.2},
        {"params": late, "weight_decay": 0.1},
        {"params": params.where(lambda name, p: p.ndim <= 1), "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _several(params: penstock.NamedParameters) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices, others = params.where(lambda name, p: p.ndim == 2), params.where(lambda name, p: p.ndim != 2)
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return [*made, torch.optim.AdamW(others, lr=0.01)] if others else made


OPTIMIZERS: dict[str, Any] = {
    "momentum": models.momentum,
    "adamw": models.adamw,
    "nadam": partial(torch.optim.NAdam, lr=0.01, betas=(0.99, 0.999)),
    "groups": _group,
    "several": _several,
}
RATES: dict[str, Any] = {
    "falling": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
    # Changes the momentum too.
    "cycling": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.1] * len(optimizer.param_groups), total_steps=60
    ),
}
LOUD = 2.0**12
MOST = 9
"""Values of a training of `covering` that are not plain."""


def _averaging() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(Averaging() for _ in range(7)), nn.Linear(6, 3)).double()


class _Spare(nn.Linear):
    """Has a parameter that no forward uses."""

    def __init__(self, made: int) -> None:
        super().__init__(6, made)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def _freeze(traced: bool, *frozen: int) -> nn.Module:
    """A model that leaves ranks at the ends, or in the middle, nothing to train."""
    torch.manual_seed(7)
    layers = [*(_Spare(6) for _ in range(7)), _Spare(3)]
    for index in frozen:
        layers[index].requires_grad_(False)
    return (models.InARow(*layers) if traced else nn.Sequential(*layers)).double()


class _Curved(nn.Module):
    """A linear layer and a tanh, which may make no gradient of its weight for some data."""

    def __init__(self, detaching: bool = False) -> None:
        super().__init__()
        self.linear, self.detaching = nn.Linear(6, 6), detaching

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.detaching and x.sum() > 0:
            weight = weight.detach()
        return torch.tanh(F.linear(x, weight, self.linear.bias))


def build_tied(shared: tuple[tuple[int, ...], ...], detaching: tuple[int, ...] = ()) -> nn.Sequential:
    """Layers, each with a bias of its own; those of a group in `shared` have one weight."""
    torch.manual_seed(3)
    layers = [_Curved(number in detaching) for number in range(LAYERS)]
    for first, *others in shared:
        for other in others:
            layers[other].linear.weight = layers[first].linear.weight
    return nn.Sequential(*layers).double()


TIED = {"tied": ((0, 3, 7), (2, 5)), "tied ends": ((0, 7), (1, 2)), "tied neighbours": ((3, 4),)}
BUILDS: dict[str, Any] = {
    **{name: subject.build for name, subject in models.SUBJECTS.items()},
    "layered": models.LAYERED.build,
    "typed": CAST["typed"],
    "embedded": CAST["embedded"],
    "averaging": _averaging,
    "frozen ends": partial(_freeze, True, 0, 1, 4, 5, 6, 7),
    "frozen middle": partial(_freeze, False, 2, 3, 4, 5),
    "web": partial(build_web, REACHING),
    **{name: partial(build_tied, shared, (3,) if name == "tied" else ()) for name, shared in TIED.items()},
}


def loss_of(output: Tensor, target: Tensor, *, weighs: bool, loud: bool) -> Tensor:
    """The mean over the samples, or over those of class 1 and 2."""
    if weighs:
        total = F.cross_entropy(output, target, ignore_index=0, reduction="sum")
        loss = total / count_weight(target).clamp(min=1)
    else:
        loss = F.cross_entropy(output, target)
    return loss * LOUD if loud else loss


def count_weight(target: Tensor) -> Tensor:
    return (target != 0).sum()


@dataclass(frozen=True)
class Training:
    """A training run. What its fields may be is in `CHOICES`."""

    schedule: str = "gpipe"
    ranks: int = 2
    microbatches: int = 4
    subject: str = "perceptron"
    placement: Any = "straight"
    """The replicas of each stage (of each position, where a rank has two stages), or the order of the ranks."""
    split: bool = False
    """Whether replicas share every microbatch."""
    drains: tuple[int, ...] = ()
    ragged: bool = False
    varies: bool = False
    """Whether every second step has another number of microbatches."""
    optimizer: str = "momentum"
    clips: bool = False
    scales: bool = False
    """Gradients overflow at first, and again when the scale grows."""
    weighs: bool = False
    rate: str = "steady"
    hooks: str = "none"
    precision: str = "float64"
    wire: str = "as it is"
    recompute: Any = None
    offloads: str | None = None
    state: str = "device"
    shares: bool = False
    """Whether replicas share the optimizer's state."""
    residence: str = "device"
    """Where the weights of all stages that may be streamed are, or in "some" of every second one."""
    order: int = 0
    """What a random order of the computations of a step is drawn from, in the place of the schedule's; 0 for none."""
    saves: int = 0
    """The step behind which a checkpoint is written beside the training, and resumed; 0 for never."""
    late: bool = False
    """Whether the thread that writes it does nothing before the training has ended."""

    def fitted(self) -> "Training":
        """The training that is allowed and has the most of this one: its schedule and, if it can be, all others."""
        made = self
        for name, values in CHOICES.items():
            if self.schedule in values[getattr(self, name)]:
                made = replace(made, **{name: getattr(PLAIN, name)})
        replicas = made.replicas
        if replicas:
            made = replace(made, ranks=len(replicas))
        else:
            made = replace(made, split=False, shares=False)
        if replicas and any(
            len({replicas[made.stage_of(layer) % len(replicas)] for layer in tie}) > 1 for tie in made.ties
        ):
            made = replace(made, subject="layered")
        if made.schedule == "2bw" and made.ties and replicas:
            # Their gradients are whole too late for norms.
            made = replace(made, clips=False, scales=False)
        if made.precision != "float64":
            # Autocast leaves types that these do not expect.
            rounding = {"stateful": "typed", "layered": "embedded"}
            made = replace(made, subject=rounding.get(made.subject, made.subject))
            made = replace(made, wire="as it is" if made.wire == "as it is" else "rows")
        if made.precision == "low versions" or made.hooks == "own":
            # Forwards read a second form of the weights.
            made = replace(made, residence="device")
        if made.offloads:
            made = replace(made, recompute=None, residence="device")
        # Where replicas share a microbatch, each has a sample of it.
        most = (9 if made.ragged else 16) // max(replicas) if made.split else made.microbatches
        made = replace(made, microbatches=min(made.microbatches, most))
        made = replace(made, microbatches=made._allowed_microbatches())
        counts = (made.microbatches, *(made.other_counts if made.varies else ()))
        if made.schedule in IN_PARTS and min(counts) < max(replicas, default=0):
            # Each replica needs a microbatch.
            made = replace(made, residence="device")
        if made.saves:
            made = replace(made, drains=(), ragged=False)
        if made.varies and not made.other_counts:
            made = replace(made, varies=False)
        # What blocks keep in Python is one for all replicas in the oracle only, and in no checkpoint.
        if made.subject == "stateful" and (replicas or made.saves or made.recompute or made.streamed):
            made = replace(made, subject="averaging")
        # Batch normalization takes two samples or more.
        share = (9 if made.ragged else 16) // made.microbatches // (max(replicas) if made.split else 1)
        return replace(made, subject="averaging") if made.subject == "normalized" and share < 2 else made

    def _allowed_microbatches(self) -> int:
        least = len(self.replicas or range(self.ranks)) * stages_on_a_rank(self.schedule)
        turns = 1 if self.split else max(self.replicas, default=1)
        match self.schedule:
            case "interleaved":
                return least * turns
            case "2bw":
                return least * turns if self.saves else max(self.microbatches, least if self.split else self.processes)
        if self.saves:
            return turns * (3 if turns % 2 == 0 and 3 in self.replicas else 2)
        return self.microbatches

    @property
    def other_counts(self) -> tuple[int, ...]:
        """Numbers of microbatches, beside the plan's, that the schedule allows and the batches are enough for."""
        turn = len(self.replicas or range(self.ranks)) * (1 if self.split else max(self.replicas, default=1))
        per_round = turn if self.schedule == "interleaved" else 1
        least = self._allowed_microbatches() if self.schedule == "2bw" else per_round
        most = (9 if self.ragged else 16) // (2 if self.subject == "normalized" else 1)
        most //= max(self.replicas) if self.split else 1
        counts = {least, self.microbatches + per_round} - {self.microbatches}
        return tuple(sorted(count for count in counts if count <= most))

    @property
    def on(self) -> set[tuple[str, Any]]:
        """The fields that are not plain, and their values."""
        return {
            (name, getattr(self, name)) for name, values in CHOICES.items() if getattr(self, name) != next(iter(values))
        }

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.placement if isinstance(self.placement, tuple) else ()

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        return TIED.get(self.subject, ())

    def stage_of(self, layer: int) -> int:
        """In stages of equal numbers of layers; the first have one more."""
        stages = self.ranks * stages_on_a_rank(self.schedule)
        short, longer = divmod(LAYERS, stages)
        return next(stage for stage in range(stages) if layer < (stage + 1) * short + min(stage + 1, longer))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Stages that share no weight."""
        shared = {self.stage_of(layer) for tie in self.ties if len(set(map(self.stage_of, tie))) > 1 for layer in tie}
        every = range(0, self.ranks * stages_on_a_rank(self.schedule), 2 if self.residence == "some" else 1)
        return () if self.residence == "device" else tuple(stage for stage in every if stage not in shared)

    @property
    def processes(self) -> int:
        return sum(self.replicas) or self.ranks

    @property
    def evaluates(self) -> bool:
        return self.placement == "turned" or self.weighs

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the pipeline and of the oracle."""
        per_rank = stages_on_a_rank(self.schedule)
        turned = self.placement == "turned"
        case = Case("layered", self.schedule, self.ranks, self.microbatches, "plain", per_rank, turned=turned)
        rounds = self.precision != "float64"
        given: dict[str, Any] = {
            "sample": (torch.zeros(3000 if self.subject == "web" else 3, 6, dtype=self.dtype),),
            "loss_fn": partial(loss_of, weighs=self.weighs, loud=self.scales),
            "optimizer": OPTIMIZERS[self.optimizer],
            "plan": replace(case, replicas=self.replicas, split=self.split).options["plan"],
            "seed": 3,
        }
        if self.weighs:
            given["loss_weight"] = count_weight
        if self.clips:
            given["clip_grad_norm"] = 0.3 * (LOUD if self.scales else 1)
        if self.scales:
            initial = 2.0 ** (127 if rounds else 1023)
            given["loss_scale"] = penstock.LossScale(initial=initial, growth=2.0**5, backoff=2.0**-6, interval=2)
        if self.rate != "steady":
            given["lr_scheduler"] = RATES[self.rate]
        if self.hooks != "none":
            given["update_hooks"] = HOOKS[self.hooks]
        if rounds:
            given["autocast"] = torch.bfloat16
        if self.precision == "low versions":
            given["version_dtype"] = torch.bfloat16
        if self.wire != "as it is":
            given["wire_dtype"] = WIRES[self.wire]
        return given

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def build(self) -> nn.Module:
        model: nn.Module = BUILDS[self.subject]()
        return model.to(self.dtype)

    @property
    def batches(self) -> list[tuple[Any, Any]]:
        batches = [(x.to(self.dtype), y) for x, y in models.LAYERED.batches]
        if self.ragged:
            batches = [(x[:size], y[:size]) for (x, y), size in zip(batches, (16, 13, 9, 16), strict=True)]
        elif self.saves or self.scales:
            batches = batches * 2
        made: list[tuple[Any, Any]] = [*batches]
        for place, number in enumerate(range(1, len(made) if self.varies else 0, 2)):
            count = self.other_counts[place % len(self.other_counts)]
            made[number] = penstock.Microbatches(*(each.tensor_split(count) for each in made[number])), None
        return made

    def pipeline(self, folder: str) -> penstock.Pipeline:
        given: dict[str, Any] = self.options
        if self.offloads:
            plan = given["plan"]
            given["plan"] = replace(plan, schedule=offloading(plan.definition))
        if self.streamed:
            again = False if self.recompute is None else bool(self.recompute)
            places = 1 + self.order % 3 if self.order else 1 if self.residence == "some" else 2
            plan = replace(given["plan"], recompute=again or self.streamed, streamed=self.streamed, places=places)
            if self.order:
                rows = random_rows(Random(self.order), self.ranks, plan.stages_per_rank, plan.microbatches)
                plan = replace(plan, schedule=define_by_programs("drawn", rows))
            given["plan"] = plan
        if "files" in (self.offloads, self.state, self.residence):
            given["offload_to"] = folder
        if self.subject == "web":
            # In a large microbatch values go directly past stages.
            given["sample"] = (torch.zeros(20_000, *self.batches[0][0].shape[1:], dtype=self.dtype),)
        plain = not self.on and self.ranks == 2
        # The first batch is compared in plain trainings only, which takes a quarter of a run.
        return penstock.Pipeline(
            self.build(),
            **given,
            recompute=self.recompute,
            state_on_host=self.state != "device",
            shard_optimizer=self.shares,
            check="warn" if plain else "off",
        )


PLAIN = Training()


def run_training(training: Training, folder: str) -> list[Outcome]:
    """The run by a pipeline: all ranks here, or this process's part; and that which goes on from its checkpoint."""
    pipe, batches, saves = training.pipeline(folder), training.batches, training.saves
    joins = training.split and len(set(training.replicas)) > 1
    if training.subject == "web" and training.ranks > 2 and stages_on_a_rank(training.schedule) == 1 and not joins:
        assert pipe.schedule.skips, "nothing passes a stage"
    found = [_train(training, pipe, batches, f"{folder}/saved")]
    if saves:
        resumed = training.pipeline(folder)
        # What it has seen so far is forgotten.
        resumed.step(*batches[-1])
        resumed.load(f"{folder}/saved")
        found.append(_train(replace(training, saves=0), resumed, batches[saves:], ""))
    return found


def _train(training: Training, pipe: penstock.Pipeline, batches: Sequence[Any], folder: str) -> Outcome:
    losses, save, ended = [], None, Event()
    for number, batch in enumerate(batches):
        if training.saves and number == training.saves:
            if training.late:
                pipe._engine.snapshots.copier.submit(ended.wait, 60)
            save = pipe.save(folder, wait=False)
        losses.append(pipe.step(*batch).loss)
        if number in training.drains:
            pipe.drain()
    ended.set()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    evaluated = float(pipe.evaluate(*batches[0]).loss) if training.evaluates else None
    if save is not None:
        save.wait()
    pipe.close()
    return Outcome(tuple(map(float, losses)), state, evaluated)


def run_trainings(trainings: Sequence[Training], folder: str) -> list[list[Outcome]]:
    """Several runs, one after the other, in the present process group; every second one over Gloo."""
    found = []
    for number, training in enumerate(trainings):
        Path(folder, str(number)).mkdir(parents=True, exist_ok=True)
        with sharing_memory(number % 2 == 0):
            found.append(run_training(training, f"{folder}/{number}"))
    return found


def expected_of(training: Training) -> list[Outcome]:
    """By the oracle: of the run, and of the steps behind its checkpoint. Schedules that flush share it, whatever the
    stages: the oracle trains them alike, as a test finds.
    """
    rounds = training.wire != "as it is" or training.ties or training.varies
    if training.schedule in FLUSHING and not (training.drains or training.replicas or rounds):
        training = replace(training, schedule="gpipe", ranks=1, placement="straight")
    whole = ask_oracle(
        replace(training, recompute=None, offloads=None, state="device", residence="device", order=0, shares=False)
    )
    return [whole, replace(whole, losses=whole.losses[training.saves :])][: 2 if training.saves else 1]


@cache
def ask_oracle(training: Training) -> Outcome:
    return train_by_oracle(training.build(), training.batches, drain_after=training.drains, **training.options)


def covering() -> Iterator[Training]:
    """Every value of every field but the subject with every schedule that allows it, several in a training; ranks and
    subjects take turns.
    """
    turn, met = 0, Counter[str]()
    for schedule in SCHEDULES:
        subjects = [value for name, value in allowed(schedule) if name == "subject"]
        left = [each for each in allowed(schedule) if each[0] != "subject" and each[1] != getattr(PLAIN, each[0])]
        while left:
            turn += 1
            subject = min(subjects, key=lambda each: met[each])
            made = Training(schedule, 2 + turn % 3, (4, 5, 3)[turn % 3], subject).fitted()
            chosen: set[tuple[str, Any]] = set()
            # Each from another place of the list, so that other values meet under other schedules.
            for name, value in left[turn % len(left) :] + left[: turn % len(left)]:
                shared = {"placement": made.replicas or (2, 2)} if name in ("split", "shares") else {}
                more = replace(made, **{**shared, name: value}).fitted()
                if more.on >= {*chosen, (name, value)} and len(chosen) < MOST:
                    made, chosen = more, {*chosen, (name, value)}
            left = [each for each in left if each not in made.on]
            met.update((subject, made.subject))
            yield made


def every_subject(met: Sequence[Training]) -> Iterator[Training]:
    """Every subject with every schedule that allows it, if none of those that were `met` has both; plain otherwise."""
    for turn, schedule in enumerate(SCHEDULES):
        left = {value for name, value in allowed(schedule) if name == "subject"}
        left -= {training.subject for training in met if training.schedule == schedule}
        yield from (Training(schedule, 2 + turn % 3, subject=subject).fitted() for subject in sorted(left))


def met_again(trainings: Iterable[Training]) -> list[Training]:
    """Some of them, which have all their schedules, numbers of processes and values, in few processes."""
    met: set[Any] = set()
    found = []
    for training in sorted(trainings, key=lambda each: each.processes):
        has = {training.schedule, training.processes, *training.on}
        if not has <= met:
            met |= has
            found.append(training)
    return found


def allowed(schedule: str) -> Iterator[tuple[str, Any]]:
    """The fields and their values that a schedule allows."""
    for name, values in CHOICES.items():
        yield from ((name, value) for value, refused in values.items() if schedule not in refused)


def draw_training(choose: Callable[[Sequence[Any]], Any], schedules: Sequence[str]) -> Training:
    """What `choose` takes of lists. Most fields are plain in two of three trainings."""
    drawn: dict[str, Any] = {}
    for name, values in CHOICES.items():
        first, *others = values
        often = {"subject": 1, "placement": len(others)}.get(name, 2 * len(others))
        drawn[name] = choose([first] * often + others)
    return Training(choose(schedules), choose((1, 2, 3, 4)), choose((1, 2, 3, 4, 5, 6)), **drawn).fitted()


def draw_sharing(choose: Callable[[Sequence[Any]], Any]) -> Training:
    """One whose replicas share the optimizer's state, with at most four processes."""
    while True:
        made = draw_training(choose, SCHEDULES)
        several = [value for value in CHOICES["placement"] if isinstance(value, tuple)]
        made = replace(made, placement=choose(several), shares=True).fitted()
        if made.shares and made.processes <= 4:
            return made


def draw_streamed(draw: Random, processes: int) -> Training:
    """One with streamed stages, in a random order where that can be; of as many `processes`, or of any ranks in 1."""
    while True:
        made = draw_training(draw.choice, [schedule for schedule in SCHEDULES if schedule not in IN_VERSIONS])
        made = replace(made, offloads=None, residence=draw.choice(("host", "files", "some"))).fitted()
        if made.streamed and processes in (1, made.processes):
            in_turn = made.schedule not in IN_PARTS[1:] and made.placement == "straight" and not made.varies
            return replace(made, order=draw.randint(1, 999)) if in_turn and draw.random() < 0.6 else made


@st.composite
def drawn_trainings(draw: st.DrawFn) -> Training:
    """The plainest first."""
    return draw_training(lambda values: draw(st.sampled_from(values)), SCHEDULES)
