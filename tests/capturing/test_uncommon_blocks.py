"""Blocks with operators that call functions, packed sequences, sparse buffers, tensors as keys, or other parameters."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import penstock
from model_cases.cases import arguments
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, assert_trains, batches, sgd, squares


class Branching(Block):
    """Reads weights in its branches only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.linear, lambda x: self.linear(x).sin() * 2, (x,))  # type: ignore[no-any-return]


class BranchingLater(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # type: ignore[no-any-return]


class Sparse(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).roll(1, 0).to_sparse())
        self.further = [torch.eye(WIDTH).to_sparse()]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH).T
        return super().forward((self.edges @ (self.further[0].to(x) @ rows)).T.reshape(x.shape))


def of_blocks(kind: Callable[[], nn.Module]) -> nn.Module:
    return Stack(kind)


def sequential(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(3)))


@pytest.mark.slow
# Dynamo's own, where it looks at what a block is given.
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [Branching, BranchingLater])
@pytest.mark.parametrize("around", [of_blocks, sequential])
def test_blocks_branch_by_torch_cond(
    around: Callable[[Any], nn.Module], kind: type[Block], capfd: pytest.CaptureFixture[str]
) -> None:
    """Branches that are not taken in the sample are, too."""
    inputs = arguments(lambda samples, length: torch.rand(samples, length, WIDTH) * (1 if samples < 5 else -1))
    assert_trains(partial(around, kind), sizes=[(4, 6), (5, 6)], microbatches=1, inputs=inputs)
    assert "fake_tensor" not in capfd.readouterr().err


@pytest.mark.parametrize("around", [of_blocks, sequential])
def test_blocks_have_sparse_buffers(around: Callable[[Any], nn.Module]) -> None:
    assert_trains(partial(around, Sparse), "zb-h1", 2)


class WritingSparse(Sparse):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.edges.mul_(1.5)
        return super().forward(x)


def test_capture_gives_back_sparse_buffers() -> None:
    model = Stack(WritingSparse).double()
    before = [block.edges.to_dense() for block in model.blocks]
    capture(nn.Sequential(*model.blocks), (batches((6,))[0][0],))

    assert all(torch.equal(block.edges.to_dense(), own) for block, own in zip(model.blocks, before, strict=True))


class WithTable(Block):
    """Its weights are keys of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {self.linear.weight: "weight", self.linear.bias: "bias"}


@pytest.mark.parametrize("around", [of_blocks, sequential])
def test_tensors_are_keys_of_dictionaries(around: Callable[[Any], nn.Module]) -> None:
    assert_trains(partial(around, WithTable), stages=2)


class Pack(nn.Module):
    def forward(self, x: Tensor) -> PackedSequence:
        lengths = torch.tensor([x.shape[1] - index % 3 for index in range(x.shape[0])])
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.cells(packed)[0]  # type: ignore[no-any-return]


class Unpack(Block):
    def forward(self, packed: PackedSequence) -> Tensor:
        return super().forward(pad_packed_sequence(packed, batch_first=True)[0])


def test_a_packed_sequence_passes_from_layer_to_layer() -> None:
    """Between stages, too, and for another length."""
    assert_trains(lambda: nn.Sequential(Block(), Pack(), Recurrent(), Recurrent(), Unpack()), "zb-h1", microbatches=1)


class PackingOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent() for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


def test_a_model_that_packs_between_its_blocks_is_refused() -> None:
    with pytest.raises(CaptureError, match="it reads the numbers of a tensor, as pack_padded_sequence reads lengths"):
        capture(PackingOutside().double(), (batches((6,))[0][0], torch.tensor([6, 4, 5, 6])))


class Halved(Stack):
    """Calls blocks with other tensors in the place of their parameters."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            halves = {name: parameter * 0.5 for name, parameter in block.named_parameters()}
            x = torch.func.functional_call(block, halves, (x,))
        return x


class Detached(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            frozen = {name: parameter.detach() for name, parameter in block.named_parameters()}
            x = block(x) + torch.func.functional_call(block, frozen, (x,))
        return x


class OfATwin(Stack):
    """Equal at first, so that no comparison on the sample shows which weights were used."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__(kind)
        self.twin = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = early = self.first(x)
        for block, twin in zip(self.blocks, self.twin, strict=True):
            x = block(x)
            early = torch.func.functional_call(block, dict(twin.named_parameters()), (early,))
        return self.last(x - 0.5 * early)


class Own(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.func.functional_call(block, dict(block.named_parameters()), (x,))
        return x


@pytest.mark.parametrize("kind", [Halved, Detached, OfATwin, Own])
def test_blocks_are_called_with_other_parameters(kind: Callable[[Any], nn.Module]) -> None:
    assert_trains(partial(kind, Block))


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, **options)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.last(self.encoder(x, src_key_padding_mask=padding))


def test_an_encoder_that_makes_nested_tensors_is_refused_in_evaluation() -> None:
    x = batches((6,))[0][0]
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[::2, 4:] = True
    with pytest.raises(CaptureError, match=r"Encoder computes with nested tensors .* with enable_nested_tensor=False"):
        capture(Encoder().double(), (x, padding)).evaluation()
    plain = Encoder(enable_nested_tensor=False).double()
    model = copy.deepcopy(plain)
    with penstock.Pipeline(model, (x, padding), squares, sgd, stages=2) as pipe:
        found = pipe.predict((x, padding))
    with torch.no_grad():
        assert torch.allclose(plain.eval()(x, padding), found, rtol=1e-12)


class Causal(Encoder):
    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.last(self.encoder(x, mask=mask, is_causal=self.is_causal))


@pytest.mark.parametrize("is_causal", [None, True])
def test_an_encoder_that_looks_for_a_causal_mask_trains(is_causal: bool | None) -> None:
    assert_trains(partial(Causal, is_causal), stages=2, sizes=[(2, 6), (4, 6), (4, 6)])
