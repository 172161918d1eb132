"""What training holds at its peak, predicted and measured, and what it leaves behind: in the processes of the pool.

On a CUDA device the allocator counts. On a CPU, where it does not, every operation passes a dispatch
mode that notes the storages it reads and makes, for as long as they live.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.scheduling.direct_backwards import find_direct
from support.live_tensors import forget_what_is_there, live_tensors
from support.training import stages_on_a_rank

MICROBATCHES = 4
LOOKS = 5


@dataclass(frozen=True)
class Form:
    """The sizes of a language model and of its microbatches."""

    width: int
    heads: int
    blocks: int
    context: int
    vocabulary: int
    samples: int


SMALL = Form(width=64, heads=2, blocks=6, context=32, vocabulary=128, samples=4)
LARGE = Form(width=1024, heads=16, blocks=6, context=512, vocabulary=4096, samples=2)
"""84 million weights, whose versions, gradients and optimizer's state weigh about as much as what is in flight. The
blocks of an allocator may be up to 1 MiB larger than the tensors in them: most of these tensors are far larger."""


class Embedding(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.tokens = nn.Embedding(form.vocabulary, form.width)
        self.positions = nn.Embedding(form.context, form.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.heads = form.heads
        self.norms = nn.ModuleList([nn.LayerNorm(form.width), nn.LayerNorm(form.width)])
        self.attention = nn.Linear(form.width, 3 * form.width)
        self.projection = nn.Linear(form.width, form.width)
        self.perceptron = nn.Sequential(
            nn.Linear(form.width, 4 * form.width), nn.GELU(), nn.Linear(4 * form.width, form.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)  # type: ignore[misc]
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.norms[1](x))


def make_model(form: Form) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(form.width), nn.Linear(form.width, form.vocabulary))
    return nn.Sequential(Embedding(form), *(Block(form) for _ in range(form.blocks)), head)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Needs nothing beside its state: the one that PyTorch takes of its own accord holds a copy more for a moment."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@dataclass(frozen=True)
class Training:
    """A run of a few steps."""

    schedule: str
    recompute: bool | str | None = None
    autocast: torch.dtype | None = None
    form: Form = SMALL
    device: str = "cpu"
    ranks: int = 2
    away: str | None = None
    """Where the optimizer's state and older versions are, if they are on the host."""
    shares: bool | None = None
    """Whether all ranks are replicas of one stage that share the optimizer's state; None: each rank has a stage."""

    def __str__(self) -> str:
        recompute = {None: "", True: "-recompute", "layers": "-layers"}[self.recompute]
        away = "" if self.away is None else "-state-on-host"
        return f"{self.schedule}{recompute}{'' if self.autocast is None else '-autocast'}{away}"

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)

    def batch(self, microbatches: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
        size = (microbatches * self.form.samples, self.form.context + 1)
        tokens = torch.randint(self.form.vocabulary, size, generator=torch.Generator().manual_seed(0)).to(self.place)
        return tokens[:, :-1], tokens[:, 1:]

    def profile(self) -> penstock.Profile:
        (tokens, target), model = self.batch(1), make_model(self.form).to(self.place)
        options: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "autocast": self.autocast}
        return penstock.profile(model, (tokens,), iterations=1, warmup=1, progress=False, **options)

    @property
    def _placement(self) -> dict[str, Any]:
        if self.shares is None:
            stages = self.ranks * stages_on_a_rank(self.schedule)
            return {"schedule": self.schedule, "microbatches": MICROBATCHES, "stages": stages}
        stage = penstock.Stage(0, self.form.blocks + 3, tuple(range(self.ranks)))
        return {"plan": penstock.Plan((stage,), self.schedule, MICROBATCHES)}

    def pipeline(self, loss: Callable[[Tensor, Tensor], Tensor] = loss_fn) -> penstock.Pipeline:
        """Over a model on the meta device: a process has the weights of its own stages and no others."""
        with torch.device("meta"):
            model = make_model(self.form)
        return penstock.Pipeline(
            model,
            sample=(self.batch(1)[0],),
            loss_fn=loss,
            optimizer=fused,
            **self._placement,
            recompute=self.recompute,
            autocast=self.autocast,
            init_fn=penstock.reset_parameters(model),
            state_on_host=self.away is not None,
            offload_to=self.away or "host",
            shard_optimizer=bool(self.shares),
            timeout_seconds=60.0,
        )


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at its peak."""

    predicted: float
    measured: Mapping[str, int]
    """Beyond what was there before. ``"allocated"``: in tensors. On a CUDA device also ``"active"``: with what has been
    dropped and may not be used again before another stream is done with it; and ``"reserved"``: all that the allocator
    has of the device.
    """

    def __str__(self) -> str:
        reported = (
            f"{name} {size / 2**20:.1f} MiB ({size / self.predicted:.3f})" for name, size in self.measured.items()
        )
        return f"predicted {self.predicted / 2**20:.1f} MiB, {', '.join(reported)}"


def measure_peak(training: Training) -> Peak:
    forget_what_is_there()
    before = held_by_counter(training.place)
    profile = training.profile()
    pipe, (tokens, target) = training.pipeline(), training.batch()
    # The optimizer makes its state in the first step.
    run(pipe, tokens, target, 1)
    gc.collect()
    peaks = peaks_by_counter(training.place, lambda: run(pipe, tokens, target, 3))
    plan = pipe.plan
    if training.recompute == "layers":
        plan, profile = replace(plan, recompute=False), recomputed_alone(profile, plan, pipe.schedule)
    cluster, away = penstock.Cluster.uniform(training.ranks, 1e10), training.away is not None
    options: dict[str, Any] = {"state_on_host": away, "shard_optimizer": bool(training.shares)}
    timeline = penstock.simulate(plan, profile, cluster, optimizer_copies=2.0, **options)
    predicted = timeline.memory[pipe.rank].peak_bytes
    pipe.close()
    return Peak(predicted, {name: peak - before[name] for name, peak in peaks.items()})


def measure_peaks(trainings: list[Training]) -> list[Peak]:
    return [measure_peak(training) for training in trainings]


def recomputed_alone(profile: penstock.Profile, plan: penstock.Plan, schedule: penstock.Schedule) -> penstock.Profile:
    """Layers that keep their input, of a microbatch in flight, and compute again when their backward comes: what they
    saved is a workspace then. The loss, a layer more, keeps the model's output. A stage whose backwards all follow
    their forwards at once is as it was.
    """
    direct = set().union(*map(find_direct, schedule.program(2)))
    layers = []
    for number, stage in enumerate(plan.stages):
        own = profile.layers[stage.start : stage.stop]
        if {(number, k) for k in range(2 * schedule.microbatches)} <= direct:
            layers += own
            continue
        for index, layer in enumerate(own, stage.start):
            # The model's own input is tokens.
            given = profile.layers[index - 1].cut_bytes if index else 0.0
            kept = given + (layer.cut_bytes if index + 1 == len(profile.layers) else 0.0)
            again = layer.workspace_bytes + max(0.0, layer.saved_bytes - given)
            if schedule.guarantees.microbatches_per_update[number] == 1:
                # The gradients of the layers behind it are new, and little was freed to make room for them.
                again += sum(behind.parameter_bytes for behind in profile.layers[index + 1 : stage.stop])
            layers.append(replace(layer, saved_bytes=kept, workspace_bytes=again))
    return replace(profile, layers=tuple(layers))


def run(pipe: penstock.Pipeline, tokens: Tensor, target: Tensor, steps: int) -> None:
    for _ in range(steps):
        pipe.step(tokens, target)
    pipe.drain()


@dataclass(frozen=True)
class Leftovers:
    """Bytes that are held at rest, beyond what was held before."""

    early: int
    """After some steps."""
    late: int
    """After as many again."""
    closed: int
    """After the pipeline is closed and forgotten."""
    kept: int
    """The sizes of the weights and of the optimizer's state, which are not."""
    end: int
    """When they are forgotten, too."""


def find_leftovers(training: Training, fails: bool = False) -> Leftovers:
    """What is left on the way; if `fails`, of a pipeline whose loss raises in the midst of its last step."""
    forget_what_is_there()
    pipe, (tokens, target) = training.pipeline(), training.batch()
    # What is made once in a process is no leftover.
    run(pipe, tokens, target, 1)
    pipe.close()
    del pipe
    before = held_bytes(training.place)
    calls = -math.inf

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ArithmeticError("no loss today")
        return loss_fn(logits, target)

    pipe = training.pipeline(loss)
    run(pipe, tokens, target, 3)
    early = held_bytes(training.place) - before
    run(pipe, tokens, target, 3)
    late = held_bytes(training.place) - before
    if fails:
        calls = 0
        with suppress(ArithmeticError, penstock.PenstockError):
            run(pipe, tokens, target, 1)
            raise AssertionError("the loss did not raise")
    weights, optimizers = list(pipe.parameters()), pipe.optimizers
    pipe.close()
    del pipe
    closed = held_bytes(training.place) - before
    states = [list(state.values()) for optimizer in optimizers for state in optimizer.state.values()]
    kept = sum(storages((weights, states), training.place).values())
    del weights, optimizers, states
    return Leftovers(early, late, closed, kept, held_bytes(training.place) - before)


def held_bytes(device: torch.device) -> int:
    """What is held at rest: a thread of the transport may hold a message for a moment longer than the step."""
    return min(_held_now(device, look) for look in range(LOOKS))


def _held_now(device: torch.device, look: int) -> int:
    """After a pause, unless it is the first look. What libraries keep for the next time does not count."""
    time.sleep(0.01 if look else 0.0)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device)
    return sum(storages(live_tensors(), device).values())


def held_by_counter(device: torch.device) -> dict[str, int]:
    """What is held at rest, as `Peak` counts it."""
    held = held_bytes(device)
    if device.type == "cuda":
        # What other trainings of this process needed is no part of this one's peak.
        torch.cuda.empty_cache()
        return _counters(device, "current")
    return {"allocated": held}


def peaks_by_counter(device: torch.device, work: Callable[[], object]) -> dict[str, int]:
    """The most that is held while `work` runs, as `Peak` counts it."""
    if device.type == "cuda":
        # What the profile needed is no part of it either.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return _counters(device, "peak")
    alive = Alive()
    alive.note(live_tensors())
    with alive:
        work()
    return {"allocated": alive.peak}


def _counters(device: torch.device, moment: str) -> dict[str, int]:
    """What the allocator counts; `moment` is current or peak."""
    reported = torch.cuda.memory_stats(device)
    return {name: reported[f"{name}_bytes.all.{moment}"] for name in ("allocated", "active", "reserved")}


def storages(tree: Any, device: torch.device) -> dict[torch.UntypedStorage, int]:
    found = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type == device.type:
            storage = leaf.untyped_storage()
            # A file that is mapped is no memory, and such a storage cannot grow.
            if storage.resizable():
                found[storage._cdata] = storage, storage.nbytes()
    return dict(found.values())


class Alive(TorchDispatchMode):
    """The storages that operations have read or made and that are still there."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = self.peak = 0
        """Of those in `alive`, of which some may be gone; and of those that were there at once."""

    def note(self, *trees: Any) -> None:
        """Notes the tensors in `trees`, and how much there is now."""
        for storage, size in storages(trees, torch.device("cpu")).items():
            before, left = self.alive.get(storage._cdata, (None, 0))
            if before is None or before.expired():
                self.alive[storage._cdata] = StorageWeakRef(storage), size
                self.total += size - left
        # As long as all of them together would be no peak, it makes no difference which are gone.
        if self.total > self.peak:
            self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(args, kwargs, result)
        return result
