"""The operations of a model, against counts by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.capturing import capture
from penstock.reporting.stats import count_training_flops

WIDTH, TOKENS = 8, 5


class Attention(nn.Module):
    """With the fused kernel, and a buffer and a counter that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(TOKENS)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        places = torch.arange(x.shape[1]).to(x)
        y = self.norm(self.linear(x)) + places[:, None]
        return x + F.scaled_dot_product_attention(y, y, y, is_causal=True)


class Branching(nn.Linear):
    """Asks for the data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


PRODUCTS: dict[str, tuple[Any, tuple[int, ...], float]] = {
    "linear": (lambda: [nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, 2)], (WIDTH,), 2 * (WIDTH * 3 + 3 * 2)),
    "convolution": (lambda: [nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(1)], (3, 6, 6), 2 * 36 * 4 * 3 * 9),
    "attention": (
        lambda: [Attention(), nn.Linear(WIDTH, 2)],
        (TOKENS, WIDTH),
        2 * TOKENS * WIDTH * (WIDTH + TOKENS + TOKENS + 2),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_three_times_the_products_of_a_forward(name: str) -> None:
    build, shape, expected = PRODUCTS[name]
    layers = build()
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    sample = (torch.randn(4, *shape),)

    assert count_training_flops(capture(layers, sample)) == 3 * expected
    assert all(torch.equal(tensor, before[key]) for key, tensor in nn.Sequential(*layers).state_dict().items())


def test_a_branch_on_the_data_is_counted_as_it_runs() -> None:
    sample = (torch.ones(4, WIDTH),)

    found = count_training_flops(capture([Branching(WIDTH, WIDTH), nn.ReLU()], sample))
    assert found == 3 * 2 * WIDTH * WIDTH


def test_layers_without_operators_are_not_counted() -> None:
    assert count_training_flops(capture([nn.Identity()], (torch.ones(4, WIDTH),))) is None


def test_a_traced_model_is_counted_like_its_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attention() for _ in range(3))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            early = x
            for block in self.blocks:
                x = block(x)
            result: Tensor = self.head(x + early)
            return result

    sample = (torch.randn(4, TOKENS, WIDTH),)
    expected = 2 * TOKENS * WIDTH * (3 * (WIDTH + TOKENS + TOKENS) + 2)

    assert count_training_flops(capture(Model(), sample)) == 3 * expected


def test_weights_that_are_elsewhere_are_not_needed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, 2))

    def fill(name: str, tensor: Tensor) -> None:
        nn.init.zeros_(tensor)

    with penstock.Pipeline(
        model, (torch.randn(4, WIDTH),), F.cross_entropy, torch.optim.SGD, init_fn=fill, stages=2
    ) as pipe:
        pipe.step(torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long))
        stats = pipe.stats()

    assert stats.flops_per_second is not None
    assert stats.samples_per_second is not None
    assert stats.flops_per_second / stats.samples_per_second == pytest.approx(3 * 2 * (WIDTH * 3 + 3 * 2))
