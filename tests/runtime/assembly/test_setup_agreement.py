"""All ranks start from the same tensors: weights, buffers, and what modules hold in attributes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.processes import Pool

TABLES = {
    "table": "buffer table",
    "unread": "buffer unread",
    "hidden": "tensor hidden of layer blocks.0",
    "constant": "constant of layer blocks.1",
    "order": "tensor order of layer blocks.1",
    "attribute": "tensor attribute of layer blocks.0",
    "mask": "tensor mask of layer blocks.0",
    "phases": "buffer blocks.0.phases",
    "codes": "weights blocks.0.codes",
    "scales": "codes.state.scales of layer blocks.0",
}
"""By what differs between ranks, how the error names it."""


class Block(nn.Module):
    def __init__(self, last: bool, differs: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = last
        if last:
            # All permutations have one sum.
            self.register_buffer("order", drawn("order", differs).argsort(), persistent=False)
        else:
            self.attribute = drawn("attribute", differs)
            # Of minus infinity, as attention adds it.
            self.register_buffer("mask", drawn("mask", differs).masked_fill(torch.eye(4) > 0, -torch.inf), False)
            self.register_buffer("phases", torch.complex(drawn("phases", differs), torch.ones(4, 4)))
            self.codes = nn.Parameter((drawn("codes", differs) * 99).to(torch.int8), requires_grad=False)
            vars(self.codes)["state"] = SimpleNamespace(scales=drawn("scales", differs))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.last:
            return y.gather(1, self.order[: len(y)])
        y = y @ (self.codes * vars(self.codes)["state"].scales)
        return y @ self.attribute @ self.mask.softmax(1) * self.phases.abs().sum()


class Net(nn.Module):
    """Equal on all ranks but in the tensor that `differs`; all weights are equal."""

    def __init__(self, differs: str) -> None:
        super().__init__()
        self.register_buffer("table", drawn("table", differs))
        self.register_buffer("unread", drawn("unread", differs))
        self.register_buffer("hidden", drawn("hidden", differs), persistent=False)
        self.constant = drawn("constant", differs)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(last, differs) for last in (False, True)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[1](self.blocks[0](x @ self.table) @ self.hidden) @ self.constant
        return y


def drawn(name: str, differs: str) -> Tensor:
    """Random numbers, which are other ones on each rank if `name` differs."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank() if name == differs else 9))


def build_all() -> dict[str, str]:
    """By what differs, the error of the building of a pipeline; empty if none does."""
    found = {}
    for differs in ("", *TABLES):
        try:
            penstock.Pipeline(Net(differs), (torch.ones(2, 4),), F.mse_loss, models.plain, microbatches=2).close()
        except penstock.PlanError as error:
            found[differs] = str(error)
    return found


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
def test_tensors_that_differ_between_ranks_are_refused_by_name(pool: Pool) -> None:
    for found in pool.run(2, build_all):
        assert found.keys() == TABLES.keys()
        unnamed = {name: error for name, error in found.items() if TABLES[name] not in error}
        assert unnamed == {}
        for error in found.values():
            assert {"rank 0 has", "rank 1 has"} == {part for part in ("rank 0 has", "rank 1 has") if part in error}
            assert "torch.manual_seed(...) with one seed" in error
