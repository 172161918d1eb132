"""All cases, and what each family of them needs."""

import platform
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import penstock
from model_cases.cases import Case
from model_cases.habit_blocks import CASES as HABIT_BLOCKS
from model_cases.habit_blocks import WIDTH, Stack
from model_cases.habit_models import CASES as HABIT_MODELS
from model_cases.libraries import CASES as OTHER_LIBRARIES
from model_cases.transformers_models import CASES as TRANSFORMERS
from model_cases.ways_out import CASES as WAYS

__all__ = ["CASES", "missing_packages", "versions", "warm_up"]

CASES: tuple[Case, ...] = (*HABIT_BLOCKS, *HABIT_MODELS, *WAYS, *TRANSFORMERS, *OTHER_LIBRARIES)
LIBRARY_FAMILIES = (
    "transformers", "diffusers", "timm", "torchvision", "torch_geometric", "vit-pytorch", "x-transformers",
    "segmentation-models-pytorch", "vector-quantize-pytorch", "mambapy",
)  # fmt: skip
NEEDS = {"peft": ("transformers", "peft"), **{name: (name.replace("-", "_"),) for name in LIBRARY_FAMILIES}}
"""The packages of families."""

LIBRARIES: list[torch.library.Library] = []
"""A library's operators live as long as it."""


def missing_packages(case: Case) -> list[str]:
    """The packages that `case` needs and that are not installed."""
    return [name for name in (*NEEDS.get(case.family, ()), *case.imports) if find_spec(name) is None]


def versions() -> str:
    """The versions of the packages that are installed, for the page."""
    names = ("torch", *sorted({name for names in NEEDS.values() for name in names}))
    found = [f"{name.replace('_', '-')} {version(name)}" for name in names if find_spec(name) is not None]
    return f"Python {platform.python_version()}, {', '.join(found)}; on the CPU with one thread."


def warm_up(families: Collection[str]) -> None:
    """Loads what the cases of `families` import, and what a first capture imports, before any is measured."""
    declare_torchvision_operators()
    for name in {name for family in families for name in NEEDS.get(family, ())}:
        import_module(name)

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    sample, batch = torch.randn(2, 4, WIDTH), torch.randn(4, 4, WIDTH)
    options: dict[str, Any] = {"stages": 2, "microbatches": 2}
    for schedule in ("zb-h1", "2bw"):
        with penstock.Pipeline(
            Stack(blocks=2), (sample,), lambda o, t: o.square().mean(), sgd, schedule=schedule, **options
        ) as pipe:
            pipe.step(batch, None)
            pipe.predict(batch)


def declare_torchvision_operators() -> None:
    """Declares what torchvision registers a kernel for when it is imported.

    Its wheel for CUDA cannot load its own operators beside a torch for the CPU. No model here needs them.
    """
    LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
