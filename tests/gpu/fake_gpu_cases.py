"""On a GPU without values no step reads a number or mixes devices, but for the calls that docs/gpus.md names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

import penstock
from penstock.values.plans import Plan, Stage
from support.paths import ROOT
from support.simulated.fake_gpu import DEVICE, FakeGpu, HostWaits, fake_gpu
from support.training import stages_on_a_rank

# PyTorch warns where a tensor without memory is asked for its address.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", "zb-v", "pipedream", "2bw")
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((schedule, {}) for schedule in SCHEDULES),
    *((schedule, {"clip_grad_norm": 1.0, "autocast": torch.bfloat16}) for schedule in SCHEDULES),
    *((schedule, {"recompute": True}) for schedule in ("1f1b-flush", "zb-h1", "2bw")),
    ("1f1b-flush", {"recompute": "layers"}),
    ("2bw", {"autocast": torch.bfloat16, "version_dtype": torch.bfloat16}),
]
FIRST_STEPS, LATER_STEPS = 3, 2
"""In the first steps what depends on shapes is copied to the device; 2bw has its first norm in the third."""
WIDTH, SAMPLES, MICROBATCHES = 4, 8, 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as device:
        yield device


def layers() -> list[nn.Module]:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return [linears[0], nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(0.1), linears[1], nn.ReLU(), *linears[2:]]


def pipeline(schedule: str = "1f1b-flush", **options: Any) -> penstock.Pipeline:
    """Over weights that are made on the CPU, as a chain is captured there."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        model, sample = nn.Sequential(*layers()), (torch.randn(SAMPLES // MICROBATCHES, WIDTH),)
    given: dict[str, Any] = {
        "loss_fn": F.mse_loss,
        "optimizer": torch.optim.AdamW,
        "microbatches": MICROBATCHES,
        "check": "off",
    }
    if "plan" not in options:
        given |= {"schedule": schedule, "stages": 2 * stages_on_a_rank(schedule)}
    return penstock.Pipeline(model, sample, **given | options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(SAMPLES, WIDTH, device=DEVICE), torch.empty(SAMPLES, WIDTH, device=DEVICE)


def train(gpu: FakeGpu, pipe: penstock.Pipeline) -> None:
    """Some steps, of which the later ones must not wait."""
    for _ in range(FIRST_STEPS):
        pipe.step(*batch())
    for _ in range(LATER_STEPS):
        given = batch()
        with gpu.without_waiting():
            pipe.step(*given)


@pytest.mark.parametrize(
    ("schedule", "options"), CASES, ids=lambda each: each if isinstance(each, str) else "-".join(each)
)
def test_a_step_reads_nothing(gpu: FakeGpu, schedule: str, options: Mapping[str, Any]) -> None:
    pipe = pipeline(schedule, **options)
    train(gpu, pipe)
    with gpu.without_waiting():
        pipe.drain()
    pipe.close()


@pytest.mark.parametrize("routing", ["round-robin", "split"])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_a_step_of_replicas_reads_nothing(gpu: FakeGpu, schedule: str, routing: Any) -> None:
    stages = (Stage(0, 4, (0, 1)), Stage(4, 8, (2,)))
    plan = Plan(stages=stages, schedule=schedule, microbatches=MICROBATCHES, microbatch_size=2, routing=routing)
    train(gpu, pipeline(plan=plan, microbatches=None))


def loss_of_two(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.mse_loss(output, target), {"largest": output.detach().max()}


def loss_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # PyTorch lets a tensor without dimensions be on the CPU in more places than a real GPU does.
    return F.mse_loss(output, target).reshape(1), {"on the CPU": torch.ones(1)}


@pytest.mark.parametrize("loss_fn", [loss_of_two, loss_and_count], ids=["on the GPU", "on the CPU"])
def test_metrics_are_not_read_by_a_step(gpu: FakeGpu, loss_fn: Callable[..., Any]) -> None:
    train(gpu, pipeline(loss_fn=loss_fn))


WAITING: Mapping[str, tuple[Mapping[str, Any], Callable[[penstock.Pipeline], object]]] = {
    "read a loss": ({}, lambda pipe: float(pipe.step(*batch()).loss)),
    "a metric": ({"loss_fn": loss_of_two}, lambda pipe: pipe.step(*batch()).metrics["largest"]),
    "`loss_scale`": ({"autocast": torch.float16, "loss_scale": "dynamic"}, lambda pipe: pipe.step(*batch())),
    "`loss_weight`": ({"loss_weight": torch.count_nonzero}, lambda pipe: pipe.step(*batch())),
}
"""By the words of docs/gpus.md: options, and the call that waits."""


@pytest.mark.parametrize("words", WAITING)
def test_these_wait_and_the_docs_say_so(gpu: FakeGpu, words: str) -> None:
    options, call = WAITING[words]
    (line,) = [
        paragraph
        for paragraph in (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8").split("\n- ")
        if paragraph.startswith("The host waits for the device when")
    ]
    assert words in " ".join(line.split())
    pipe = pipeline(**options)
    with pytest.raises((DataDependentOutputException, HostWaits)), gpu.without_waiting():
        call(pipe)


def test_a_read_in_a_model_is_found(gpu: FakeGpu) -> None:
    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) / max(1.0, target.abs().max().item())

    with pytest.raises(DataDependentOutputException):
        pipeline(loss_fn=scaled).step(*batch())


def test_a_mix_of_devices_is_found(gpu: FakeGpu) -> None:
    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * torch.ones(1)

    with pytest.raises(RuntimeError, match=r"devices,? fakegpu:0.* cpu"):
        pipeline(loss_fn=weighted).step(*batch())
