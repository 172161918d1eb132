"""Trainings with state that is in no parameter and no buffer, or in tensors of subclasses: saved, and resumed."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.models import Blocks, sgd

WIDTH, BLOCKS, STEPS, SAVED = 4, 4, 5, 3
"""What is trained, for how many steps, and after how many it is saved."""


class Scaled(nn.Module):
    """Follows its outputs by a number, which is its extra state; `form` is how it is kept."""

    def __init__(self, form: str = "number") -> None:
        super().__init__()
        self.linear, self.form, self.scale = nn.Linear(WIDTH, WIDTH).double(), form, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.scale)
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * float(y.detach().abs().amax())
        return y

    def get_extra_state(self) -> Any:
        tensor = torch.tensor(self.scale, dtype=torch.float64)
        forms = {"tensor": tensor, "nested": {"seen": [(tensor, 3), {"name": b"x"}]}, "number": {"scale": self.scale}}
        return forms[self.form]

    def set_extra_state(self, state: Any) -> None:
        found = state["seen"][0][0] if self.form == "nested" else state["scale"] if self.form == "number" else state
        self.scale = float(found)


class Keyed(nn.Module):
    """The same with keys that its own code writes and reads, or its hooks."""

    def __init__(self, hooks: bool = False) -> None:
        super().__init__()
        self.linear, self.scale, self.hooks = nn.Linear(WIDTH, WIDTH).double(), torch.ones(1).double(), hooks
        if hooks:
            self.register_state_dict_post_hook(add_scale)
            self.register_load_state_dict_pre_hook(take_scale)

    forward = Scaled.forward

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.hooks:
            add_scale(self, destination, prefix)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if not self.hooks:
            take_scale(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)


def add_scale(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "linear.scale"] = torch.tensor(float(module.scale), dtype=torch.float64)


def take_scale(module: Any, state: Any, prefix: str, *_: Any) -> None:
    module.scale = float(state.pop(prefix + "linear.scale"))


class Doubled(nn.Module):
    """Its state dict has twice its weight, which it halves again; after a load it notes the weight that it has then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loaded = nn.Linear(WIDTH, WIDTH).double(), torch.zeros(())
        self.register_state_dict_post_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)
        self.register_load_state_dict_post_hook(self._note)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    @staticmethod
    def _double(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "linear.weight"] = 2 * state[prefix + "linear.weight"].detach()

    @staticmethod
    def _halve(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "linear.weight"] = state[prefix + "linear.weight"] / 2

    @staticmethod
    def _note(module: Any, _: Any) -> None:
        module.loaded = module.linear.weight.detach().sum()


class Quantized(nn.Module):
    """Saves constants that no code of its loads; its loader refuses them if it has `refuses`. As in bitsandbytes."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.linear, self.refuses, self.absmax = nn.Linear(WIDTH, WIDTH).double(), refuses, torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.absmax[0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "linear.weight.absmax"] = self.absmax

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if self.refuses and prefix + "linear.weight.absmax" in state:
            raise RuntimeError("it was quantized already")
        super()._load_from_state_dict(state, prefix, *rest)


class Noisy(nn.Module):
    """Draws from NumPy and from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + 0.5 * np.random.rand() + random.random())


class Counted(Blocks):
    """A model whose own code is around its blocks, with an extra state of its own that does not change."""

    def __init__(self, form: str = "number") -> None:
        super().__init__(Scaled, BLOCKS)
        self.version = 1

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


class Centred(nn.Module):
    """A loss with a buffer that its forward assigns, a counter as extra state, and a method that is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH).double())
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output - self.center / (1 + self.calls), target)
        if torch.is_grad_enabled():
            self.calls += 1
            self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss

    def scaled(self, output: Tensor, target: Tensor) -> Tensor:
        return 2 * self(output, target)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Codes(Tensor):
    """Numbers as int8 codes and a scale, with as few operators as torchao's: no clone, no view, no copy."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, title: str) -> "Codes":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, title: str) -> None:
        self.codes, self.scale, self.title = codes, scale, title

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.title,)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> "Codes":
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def of(cls, values: Tensor, title: str) -> "Codes":
        scale = values.abs().amax() / 127 + 1e-30
        return cls((values / scale).round().to(torch.int8), scale, title)

    def numbers(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach(), args[0].title)
        raise NotImplementedError(f"Codes: unimplemented operator {func}")


class Coded(nn.Module):
    """A frozen weight of codes, which another process may have coded otherwise, beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.weight = nn.Parameter(Codes.of(torch.rand(WIDTH, WIDTH).double(), "w"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) @ self.weight.numbers()  # type: ignore[attr-defined]


class Tagged(Tensor):
    """Numbers of its own, and an attribute."""

    times: int


class Opaque(Codes):
    """Does not say what it wraps."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Momentum(torch.optim.Optimizer):
    """Keeps the moment of every parameter as `keep` makes it of numbers, and reads it with `read`."""

    def __init__(self, params: Any, keep: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._keep, self._read = keep, read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    moment = parameter.grad + (0.9 * self._read(state["moment"]) if state else 0)
                    state["moment"] = self._keep(moment)
                    parameter.add_(self._read(state["moment"]), alpha=-group["lr"])


def tag(values: Tensor) -> Tagged:
    tagged = values.as_subclass(Tagged)
    tagged.times = 2
    return tagged


class Warm(torch.optim.Optimizer):
    """One counter for all parameters: in `state` under a name, or of its own in its state dict."""

    def __init__(self, params: Any, own: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.own, self.box = own, {"k": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        counts = self.box if self.own else self.state["all"]
        counts["k"] = counts.get("k", torch.zeros(())) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / float(counts["k"]))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"box": self.box} if self.own else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        self.box = state.get("box", self.box)
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def hooked_sgd(params: Any) -> torch.optim.Optimizer:
    """Its hooks keep the moments twice as large."""
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def scale(state: Any, factor: float) -> Any:
        scaled = {
            key: {**own, "momentum_buffer": own["momentum_buffer"] * factor} for key, own in state["state"].items()
        }
        return {**state, "state": scaled}

    made.register_state_dict_post_hook(lambda _, state: scale(state, 2.0))
    made.register_load_state_dict_pre_hook(lambda _, state: scale(state, 0.5))
    return made


@dataclass(frozen=True)
class Training:
    """Makes a model, a loss and an optimizer."""

    block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH).double()
    loss: Callable[[], Any] = lambda: F.mse_loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    model: Callable[[], nn.Module] | None = None

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model() if self.model is not None else nn.Sequential(*(self.block() for _ in range(BLOCKS)))

    def start(self, **options: Any) -> penstock.Pipeline:
        arguments = {"microbatches": 2, "check": "off", **options}
        sample = (torch.zeros(2, WIDTH).double(),)
        return penstock.Pipeline(self.net(), sample, self.loss(), self.optimizer, **arguments)


def root_hooked() -> nn.Module:
    """A hook of the whole model adds a key that another one takes away."""
    model = nn.Sequential(*(Scaled() for _ in range(BLOCKS)))
    model.register_state_dict_post_hook(lambda _, state, prefix, meta: state.update({"made_by": "x"}))
    model.register_load_state_dict_pre_hook(lambda _, state, *rest: state.pop("made_by"))
    return model


TRAININGS: dict[str, Training] = {
    "extra state": Training(Scaled),
    "a tensor as extra state": Training(partial(Scaled, "tensor")),
    "nested extra state": Training(partial(Scaled, "nested")),
    "code of state dicts": Training(Keyed),
    "hooks of state dicts": Training(partial(Keyed, True)),
    "hooks that change a weight": Training(Doubled),
    "constants that no code loads": Training(Quantized),
    "constants that code refuses": Training(partial(Quantized, True)),
    "hooks of the whole model": Training(model=root_hooked),
    "extra state of the whole model": Training(model=Counted),
    "state of no parameter": Training(optimizer=partial(Warm, own=False)),
    "a state dict of the optimizer's own": Training(optimizer=partial(Warm, own=True)),
    "hooks of the optimizer": Training(optimizer=hooked_sgd),
    "codes as state": Training(optimizer=partial(Momentum, keep=lambda t: Codes.of(t, "m"), read=Codes.numbers)),
    "nested codes as state": Training(
        optimizer=partial(Momentum, keep=lambda t: {"m": [Codes.of(t, "m")]}, read=lambda m: m["m"][0].numbers())
    ),
    "attributes of a state": Training(
        optimizer=partial(Momentum, keep=tag, read=lambda m: m.as_subclass(Tensor) * (m.times - 1))
    ),
    "a loss with buffers": Training(loss=Centred),
    "a method of a loss": Training(loss=lambda: Centred().scaled),
    "a part of a loss": Training(loss=lambda: partial(Centred().scaled)),
}
NOISY = Training(Noisy)
"""In other processes, and in another order of microbatches, other numbers are drawn."""
X, Y = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH).double(), torch.full((8, WIDTH), 0.1).double()


def seed_generators(seed: int) -> None:
    np.random.seed(seed)
    random.seed(seed)


def plain_losses(training: Training) -> list[float]:
    """By a plain loop that accumulates gradients of two microbatches."""
    net, loss_fn, found = training.net(), training.loss(), []
    optimizer = training.optimizer(list(net.parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_fn(net(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
        for part in parts:
            (part / 2).backward()
        optimizer.step()
        found.append(sum(part.item() / 2 for part in parts))
    return found


def losses(pipe: penstock.Pipeline, steps: int) -> list[float]:
    return [float(pipe.step(X, Y).loss) for _ in range(steps)]


def refused_by_replicas(directory: Path) -> str:
    """The error of a save where two replicas have seen other microbatches, and so have other extra states."""
    plan = penstock.Plan((penstock.Stage(0, 2, (0, 1)), penstock.Stage(2, 4, (2,))), "gpipe", 2)
    with TRAININGS["extra state"].start(plan=plan, microbatches=None) as pipe:
        losses(pipe, 1)
        try:
            pipe.save(directory)
        except penstock.CheckpointError as error:
            losses(pipe, 1)
            return str(error)
    return ""


def train_and_save(names: list[str], directory: Path) -> None:
    """Trains, and saves after some steps, waiting and not: one directory for each of `names`."""
    for name in names:
        with TRAININGS[name].start() as pipe:
            losses(pipe, SAVED)
            save = pipe.save(directory / name / "beside", wait=False)
            pipe.save(directory / name / "run")
            save.wait()


def resume_all(names: list[str], directory: Path) -> list[Any]:
    """The losses after what `train_and_save` has saved, and the whole state dict then."""
    found: list[Any] = []
    for name in names:
        for place in ("run", "beside"):
            with TRAININGS[name].start(resume=directory / name / place) as pipe:
                own = losses(pipe, STEPS - SAVED)
                found.append((own, pipe.full_state_dict(rank=None)))
    return found
