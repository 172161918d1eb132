"""What a trace holds for, and which of a model's paths it takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing import LayerChain, capture
from penstock.errors import CaptureError


class Two(nn.Module):
    """Two layers, and what else it does with their result and its inputs."""

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.then = nn.Linear(4, 4), nn.Linear(4, 4), then

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.then(self.second(self.first(x)), x, *rest)


def long(y: Tensor, x: Tensor) -> Tensor:
    return y.tanh() if 3 < x.shape[1] < 10 else y


def asking(y: Tensor, x: Tensor) -> Tensor:
    return y if torch.compiler.is_exporting() else y.tanh()


def careful(y: Tensor, x: Tensor) -> Tensor:
    """Looks into its tensors, but not when it is exported."""
    return y.tanh() if torch.compiler.is_exporting() or bool((x < 1e9).all()) else y


def single(y: Tensor, x: Tensor) -> Tensor:
    """Does something else with a single token."""
    return y.tanh() if x.shape[1] == 1 else y


def alone(y: Tensor, x: Tensor) -> Tensor:
    """Returns another shape for a single sample."""
    return y[0] if x.shape[0] == 1 else y


def masked(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """A mask means something else if it is boolean."""
    return y.masked_fill(mask, 0.0) if mask.dtype == torch.bool else y * mask


def plain(y: Tensor, x: Tensor) -> Tensor:
    return y


def data(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def run(chain: LayerChain, x: Tensor) -> Tensor:
    (result,) = chain.stage(0, len(chain.layers))((), chain.inputs.bind((x,), {}))
    return result


def test_a_length_at_which_the_model_branches_otherwise_is_refused() -> None:
    model = Two(long)
    chain = capture(model, (data(2, 5, 4),))
    for length in (4, 9):
        assert torch.equal(run(chain, data(3, length, 4)), model(data(3, length, 4)))

    for length in (3, 10):
        with pytest.raises(CaptureError) as caught:
            run(chain, data(2, length, 4))
        assert str(caught.value) == (
            f"args[0] has shape (2, {length}, 4), but the capture holds for (any, 4 to 9, 4): for other sizes the "
            "model's code may do something else. Pass such a tensor, or capture again with a sample= of the new shape"
        )


@pytest.mark.parametrize(
    ("then", "sizes"),
    [(asking, (3, 5, 4)), (careful, (3, 5, 4)), (plain, (1, 4)), (plain, (2, 1, 4)), (plain, (1, 1, 4))],
)
def test_a_trace_does_what_the_eager_model_does_and_says_nothing(
    then: Callable[..., Tensor], sizes: tuple[int, ...], capfd: Any
) -> None:
    model, truth = Two(then), torch.compiler.is_exporting
    chain = capture(model, (data(*sizes),))

    assert torch.equal(run(chain, data(4, *sizes[1:])), model(data(4, *sizes[1:])))
    assert torch.compiler.is_exporting is truth
    assert capfd.readouterr() == ("", "")


def test_a_size_of_one_at_which_the_model_branches_is_refused() -> None:
    model = Two(single)
    chain = capture(model, (data(2, 5, 4),))

    assert torch.equal(run(chain, data(1, 2, 4)), model(data(1, 2, 4)))
    with pytest.raises(CaptureError, match=r"has shape \(2, 1, 4\), but the capture holds for \(any, at least 2, 4\)"):
        run(chain, data(2, 1, 4))
    lonely = capture(Two(alone), (data(2, 5, 4),)).inputs
    lonely.check_samples(2)
    with pytest.raises(CaptureError, match=r"has 1 sample\(s\) in a microbatch, but the capture holds for at least 2"):
        lonely.check_samples(1)


def test_another_type_is_refused() -> None:
    inputs = capture(Two(masked), (data(2, 4), torch.zeros(2, 4, dtype=torch.bool))).inputs

    with pytest.raises(
        CaptureError, match=r"args\[1\] was torch.bool in sample= and is now torch.int64, .*to\(torch.bool\)"
    ):
        inputs.read((data(2, 4), torch.zeros(2, 4, dtype=torch.long)))


def test_an_error_about_the_batch_says_what_was_taken_for_it() -> None:
    class Biased(Two):
        def forward(self, bias: Tensor, x: Tensor) -> Tensor:
            return super().forward(x + bias)

    chain = capture(Biased(plain), (data(4), data(2, 4)))
    with pytest.raises(CaptureError, match=r"the number of samples was taken to be 4, dimension 0 of args\[0\]"):
        chain.inputs.check_samples(2)
    assert capture(Biased(plain), (data(4), data(2, 4)), microbatch_size=2).inputs.batched == {"args[1]"}


class Borrowing(Two):
    """Uses a weight of a block outside of it, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(plain)
        self.way = way
        if way == "indexed":
            self.more = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "tied":
                return nn.functional.linear(self.second(self.first(x)), self.first.weight)
            case "summed":
                return super().forward(x) * sum(each.square().sum() for each in self.parameters())
            case "counted":
                return super().forward(x) * len(list(self.first.parameters()))
            case "frozen in a number":
                return super().forward(x) * self.first.weight.detach().max()
            case "indexed":
                return self.more(super().forward(x)) * len(self.more) + self.more[0].bias
            case _:
                try:
                    return super().forward(x) + self.first.bias
                except Exception:
                    return x


@pytest.mark.parametrize("way", ["tied", "summed", "counted", "frozen in a number", "indexed", "caught"])
def test_weights_of_blocks_that_other_code_uses_are_used(way: str) -> None:
    torch.manual_seed(0)
    model = Borrowing(way)
    chain = capture(model, (torch.randn(3, 4),))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    x = torch.randn(5, 4)

    assert torch.equal(run(chain, x), model(x))
