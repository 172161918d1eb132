"""Layers of bitsandbytes and torchao, and buffers of float8, train with the numbers of a plain loop.

Layers of a library that is not installed are left out. `support.packed_layers` has one that behaves alike.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.models import Blocks, sgd
from support.processes import Pool

WIDTH = 64
"""bitsandbytes packs weights of this width on processors with AVX512-BF16."""


class Adapted(nn.Module):
    """A frozen layer with a trained adapter."""

    def __init__(self, quantized: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.base = quantized(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x)) + torch.tanh(self.base(x))


def of_four_bits(kind: str) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        made = pytest.importorskip("bitsandbytes").nn.Linear4bit(WIDTH, WIDTH, quant_type=kind)
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")  # type: ignore[no-any-return]

    return quantized


def of_eight_bits(linear: nn.Linear) -> nn.Module:
    made = pytest.importorskip("bitsandbytes").nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def of_torchao(configuration: str) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(linear, getattr(torchao, configuration)())
        return linear

    return quantized


class Float8(nn.Module):
    """Weights in a buffer, and their scales in another one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 448
        self.register_buffer("weight", (linear.weight.detach() / scales).to(torch.float8_e4m3fn))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.scales)


KINDS = {
    "bitsandbytes NF4": of_four_bits("nf4"),
    "bitsandbytes FP4": of_four_bits("fp4"),
    "bitsandbytes int8": of_eight_bits,
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao float8": of_torchao("Float8WeightOnlyConfig"),
    "torchao int8 of both": of_torchao("Int8DynamicActivationInt8WeightConfig"),
    "buffers of float8": Float8,
}
FOUR_BITS = ("bitsandbytes NF4", "bitsandbytes FP4")


def setting(kind: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    return Blocks(partial(Adapted, KINDS[kind])), [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


# After an evaluation, on a processor with AVX512-BF16, weights of four bits train in no plain loop.
@pytest.mark.parametrize(
    ("kind", "evaluates"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if kind not in FOUR_BITS)],
)
def test_quantized_layers_train_as_in_a_loop(kind: str, evaluates: bool) -> None:
    model, batches = setting(kind)
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    expected = []
    for x, target in batches:
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = F.mse_loss(model(part), wanted) / 4
            loss.backward()  # type: ignore[no-untyped-call]
            expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                expected.append(F.mse_loss(model(x[:2]), target[:2]).item())
            model.train()
    model, batches = setting(kind)
    found: list[float] = []
    with penstock.Pipeline(model, (batches[0][0][:2],), F.mse_loss, sgd, microbatches=4, stages=2) as pipe:
        for x, target in batches:
            found.append(float(pipe.step(x, target).loss))
            if evaluates:
                found.append(float(pipe.evaluate(x[:2], target[:2]).loss))
    size = 5 if evaluates else 4
    rounds = [expected[start : start + size] for start in range(0, len(expected), size)]
    sums = [[sum(each[:4]), *each[4:]] for each in rounds]
    assert found == [number for each in sums for number in each]


ADAM = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "2bw", "stages": 2},
        {"schedule": "interleaved", "stages": 4},
        {"schedule": "1f1b-flush", "stages": 2, "recompute": True},
        {"schedule": "1f1b-flush", "stages": 2, "recompute": "layers"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_equal_the_oracle(kind: str, options: dict[str, Any]) -> None:
    model, batches = setting(kind)
    sample, own = (batches[0][0][:2],), {key: value for key, value in options.items() if key != "recompute"}
    expected = penstock.reference_train(
        setting(kind)[0], batches, sample=sample, loss_fn=F.mse_loss, optimizer=ADAM, microbatches=4, **own
    )
    with penstock.Pipeline(model, sample, F.mse_loss, ADAM, microbatches=4, **options) as pipe:
        assert tuple(float(pipe.step(*batch).loss) for batch in batches) == expected.losses
        pipe.drain()
        for name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, expected.state[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_stream_or_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Except for four bits and buffers, the memory of a packed weight is not its own."""
    model, batches = setting(kind)
    plan = penstock.Plan.uniform(4, 4, "breadth-first", 4, 4, microbatch_size=2)
    given: dict[str, Any] = {"sample": (batches[0][0][:2],), "loss_fn": F.mse_loss, "optimizer": ADAM}
    streamed = replace(plan, recompute=True, streamed=True)
    build = partial(penstock.Pipeline, model, plan=streamed, offload_to=tmp_path, **given)
    if kind not in (*FOUR_BITS, "buffers of float8"):
        with pytest.raises(penstock.PenstockError, match=r"parameter \S+base\.weight: expected a plain parameter"):
            build()
        return
    packed = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    expected = penstock.reference_train(setting(kind)[0], batches, plan=plan, **given)
    with build() as pipe:
        assert not any(parameter.untyped_storage().resizable() for parameter in packed), "not at home"
        assert tuple(float(pipe.step(*batch).loss) for batch in batches) == expected.losses
        for name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, expected.state[name]), name


def train_all(kinds: list[str], directory: Path) -> list[list[float]]:
    """In each process, of each kind: the losses, then those of a run that goes on beside the same base."""
    found = []
    for kind in kinds:
        model, batches = setting(kind)
        run, sample = directory / kind.replace(" ", "-"), (batches[0][0][:2],)
        arguments: Any = {"microbatches": 4, "save_frozen": False}
        with penstock.Pipeline(model, sample, F.mse_loss, ADAM, **arguments) as pipe:
            losses = [float(pipe.step(*batch).loss) for batch in batches[:2]]
            pipe.save(run)
            losses += [float(pipe.step(*batch).loss) for batch in batches[2:]]
        with penstock.Pipeline(setting(kind)[0], sample, F.mse_loss, ADAM, resume=run, **arguments) as pipe:
            losses += [float(pipe.step(*batch).loss) for batch in batches[2:]]
        found.append(losses)
    return found


def test_two_processes(pool: Pool, tmp_path: Path) -> None:
    needed = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
    kinds = [kind for kind in KINDS if importlib.util.find_spec(needed.get(kind.partition(" ")[0], "torch"))]
    results = pool.run(2, train_all, kinds, tmp_path)
    for kind, *found in zip(kinds, *results, strict=True):
        model, batches = setting(kind)
        expected = penstock.reference_train(
            model, batches, sample=(batches[0][0][:2],), loss_fn=F.mse_loss, optimizer=ADAM, microbatches=4
        ).losses
        assert found == [[*expected, *expected[2:]]] * 2, kind


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_packed_weights_take_a_profile_half_a_byte_each(kind: str) -> None:
    model, batches = setting(kind)
    found = penstock.profile(model, (batches[0][0][:2],), iterations=1, warmup=1, progress=False)
    adapted = [layer for layer in found.layers if layer.frozen_bytes]
    for layer in adapted:
        # The codes, a scale for 64 of them, which is coded itself (both with their tables), and the bias.
        assert WIDTH * WIDTH / 2 + WIDTH < layer.frozen_bytes < WIDTH * WIDTH / 2 + 4 * WIDTH + WIDTH + 1200
        assert layer.parameter_bytes == 4 * 2 * 4 * WIDTH
    assert adapted
