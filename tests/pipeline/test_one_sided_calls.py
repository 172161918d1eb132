"""A call that only one rank makes is named as the user has made it, whatever the pipeline does within it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from support.processes import Pool

X = torch.linspace(-1, 1, 16).reshape(4, 4)
ARGUMENTS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "evaluate": lambda folder: (X, X),
    "predict": lambda folder: (X,),
    "save": lambda folder: (folder,),
    "load": lambda folder: (folder,),
    "save_weights": lambda folder: (folder,),
    "load_state_dict": lambda folder: ({},),
}
"""Of calls that need some."""


def collective_calls() -> list[str]:
    """The methods of a pipeline that all ranks must call, but for the last one, after which a rank may do anything."""
    codes = {name: getattr(method, "__code__", None) for name, method in vars(penstock.Pipeline).items()}
    marked = [name for name, code in codes.items() if code is not None and code.co_qualname.startswith("collective.")]
    return [name for name in marked if name != "close"]


def call_alone(names: list[str], folder: str) -> dict[str, str]:
    """By name, what this rank says where rank 0 makes the call and rank 1 a step."""
    said = {}
    for name in names:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = [penstock.WeightAverage(0.9)]
        options: dict[str, Any] = {"sample": (X,), "loss_fn": nn.functional.mse_loss, "update_hooks": hooks}
        pipe = penstock.Pipeline(model, optimizer=lambda p: torch.optim.SGD(p, 0.1), check="off", **options)
        pipe.step(X, X)
        try:
            if dist.get_rank() == 0:
                getattr(pipe, name)(*ARGUMENTS.get(name, lambda folder: ())(Path(folder)))
            pipe.step(X, X)
        except penstock.PenstockError as error:
            said[name] = str(error)
        pipe.close()
    return said


@pytest.mark.processes
def test_a_call_of_one_rank_is_named(pool: Pool, tmp_path: Path) -> None:
    names = collective_calls()
    one, two = pool.run(2, call_alone, names, str(tmp_path))

    assert {"save", "evaluate", "state_dict", "full_state_dict", "timeline", "gather_model"} <= set(names)
    for name in names:
        for said in (one, two):
            assert f"rank 0 calls {name}" in said[name] or f"in {name}()" in said[name], (name, said[name])
