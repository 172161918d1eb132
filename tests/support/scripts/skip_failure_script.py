"""A training in three stages: the first sends past the second, whose process ends itself in the second step."""

import torch
from torch import Tensor, nn

import penstock
from penstock.testing import faults


class Both(nn.Module):
    """Makes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x)), torch.sigmoid(self.other(x))


class Block(nn.Module):
    """Scales what it makes with another tensor, if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if scale is None else y * scale


class Skipping(nn.Module):
    """The third layer reads what the first one makes, and the second does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Both(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        near, far = self.first(x)
        return self.third(self.second(near), far)


def main() -> None:
    """Trains until a neighbour is gone."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        Skipping(),
        sample=(torch.randn(10000, 4),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule="1f1b-flush",
        microbatches=2,
    )
    print(pipe.schedule.skips, flush=True)
    x = torch.randn(8, 4)
    with faults.inject([faults.Kill(rank=1, step=1)]):
        for _ in range(3):
            print(float(pipe.step(x, x).loss), flush=True)


if __name__ == "__main__":
    main()
