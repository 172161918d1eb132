"""On a GPU without values no step reads a number or mixes devices, but for the calls that docs/gpus.md names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import default_collate

import penstock
from penstock.capturing.chain import StageModule
from penstock.runtime.batches.results import StepResult
from penstock.values.plans import Plan, Stage
from support.paths import ROOT
from support.simulated.fake_gpu import DEVICE, FakeGpu, HostWaits, fake_gpu, fake_mesh
from support.training import stages_on_a_rank

# PyTorch warns where a tensor without memory is asked for its address.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", "zb-v", "pipedream", "2bw")
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((schedule, {}) for schedule in ("1f1b-flush", "zb-v", "pipedream", "2bw")),
    *(
        (schedule, {"clip_grad_norm": 1.0, "autocast": torch.bfloat16})
        for schedule in SCHEDULES
        if schedule != "pipedream"
    ),
    *((schedule, {"recompute": True}) for schedule in ("1f1b-flush", "zb-h1", "2bw")),
    ("1f1b-flush", {"recompute": "layers"}),
    ("2bw", {"autocast": torch.bfloat16, "version_dtype": torch.bfloat16}),
    ("1f1b-flush", {"wire_dtype": penstock.RowInt8()}),
    ("2bw", {"update_hooks": (penstock.WeightPrediction(), penstock.WeightAverage(0.9))}),
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


def pipeline(
    schedule: str = "1f1b-flush", build: Callable[[], nn.Module] = lambda: nn.Sequential(*layers()), **options: Any
) -> penstock.Pipeline:
    """Over weights that are made on the CPU, as a chain is captured there."""
    with unset_fake_temporarily():
        model, sample = build(), (torch.randn(SAMPLES // MICROBATCHES, WIDTH),)
    given: dict[str, Any] = {
        "sample": sample,
        "loss_fn": F.mse_loss,
        "optimizer": torch.optim.AdamW,
        "microbatches": MICROBATCHES,
        "check": "off",
    }
    if "plan" not in options:
        given |= {"schedule": schedule, "stages": 2 * stages_on_a_rank(schedule)}
    return penstock.Pipeline(model, **given | options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(SAMPLES, WIDTH, device=DEVICE), torch.empty(SAMPLES, WIDTH, device=DEVICE)


def train(gpu: FakeGpu, pipe: penstock.Pipeline, reads: int = 0) -> None:
    """Some steps, of which the later ones must not wait. `reads`: what the first ones may read."""
    with gpu.counting() as waits:
        for _ in range(FIRST_STEPS):
            pipe.step(*batch())
    assert sum(wait.endswith("reads") for wait in waits) == reads
    for _ in range(LATER_STEPS):
        given = batch()
        with gpu.without_waiting():
            pipe.step(*given)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("schedule", "options"), CASES, ids=lambda each: each if isinstance(each, str) else "-".join(each)
)
def test_a_step_reads_nothing(gpu: FakeGpu, schedule: str, options: Mapping[str, Any]) -> None:
    pipe = pipeline(schedule, **options)
    train(gpu, pipe)
    with gpu.without_waiting():
        pipe.drain()
    pipe.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("routing", ["round-robin", "split"])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_a_step_of_replicas_reads_nothing(gpu: FakeGpu, schedule: str, routing: Any) -> None:
    stages = (Stage(0, 4, (0, 1)), Stage(4, 8, (2,)))
    plan = Plan(stages=stages, schedule=schedule, microbatches=MICROBATCHES, microbatch_size=2, routing=routing)
    train(gpu, pipeline(plan=plan, microbatches=None))


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
def test_streamed_stages_read_nothing(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any]
) -> None:
    """Weights are at home on the CPU between steps. Updates wait for copies."""
    # What has no values on the device has none at home.
    monkeypatch.setattr(gpu, "host_memory", lambda layout: torch.empty_strided(*layout[:2], dtype=layout[2]))
    stages = tuple(Stage(start, start + 2, (start // 2 % 2,)) for start in range(0, 8, 2))
    plan = Plan(stages, "breadth-first", MICROBATCHES, microbatch_size=2, recompute=True, streamed=True)
    with gpu.counting():
        # Small parameters are stepped, and compared.
        pipe = pipeline(plan=plan, microbatches=None, **options)
    assert {parameter.device.type for parameter in pipe.parameters()} == {"cpu"}
    with gpu.counting() as waits:
        for _ in range(3):
            pipe.step(*batch())
        pipe.evaluate(*batch())
        pipe.predict(batch()[0])
    assert not [wait for wait in waits if "reads" in wait]
    with pytest.raises(penstock.PenstockError, match="weights of streamed stages are on the host: expected all on"):
        pipe.measure()
    pipe.close()


def loss_of_two(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.mse_loss(output, target), {"largest": output.detach().max()}


def loss_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # PyTorch lets a tensor without dimensions be on the CPU in more places than a real GPU does.
    return F.mse_loss(output, target).reshape(1), {"on the CPU": torch.ones(1)}


@pytest.mark.parametrize("loss_fn", [loss_of_two, loss_and_count], ids=["on the GPU", "on the CPU"])
def test_metrics_are_not_read_by_a_step(gpu: FakeGpu, loss_fn: Callable[..., Any]) -> None:
    train(gpu, pipeline(loss_fn=loss_fn))


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x > 0


class Masked(nn.Module):
    """Feed-forward blocks. Behind the last one, two values of the first one are read that get no gradient there: one
    never has one, and the other one requires it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))
        self.signs = Signs()

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.down[0](self.up[0](x).relu())
        mask = self.signs(first)
        x = self.down[1](self.up[1](x).relu())
        return x.where(mask & (first < 1), 0.0)


def split_blocks(stage: StageModule, mesh: DeviceMesh) -> None:
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for name, block in stage.blocks.items():
        if name != "signs":
            parallelize_module(block, mesh["tp"], styles[name.partition(".")[0]])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b-flush", {"clip_grad_norm": 1.0}), ("2bw", {"recompute": True})], ids=str
)
def test_a_step_of_tensor_parallel_members_reads_nothing(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, schedule: str, options: Mapping[str, Any]
) -> None:
    with fake_mesh(monkeypatch, 4):
        pipe = pipeline(schedule, build=Masked, tensor_parallel=2, parallelize=split_blocks, **options)
        # Of each kind of message the ranks compare the first one.
        train(gpu, pipe, reads=4 if options.keys() == {"clip_grad_norm"} else 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_calls_between_steps_read_nothing(gpu: FakeGpu, schedule: str) -> None:
    pipe = pipeline(schedule, clip_grad_norm=1.0)
    train(gpu, pipe)
    for context in (gpu.counting, gpu.without_waiting):
        x, y = batch()
        with context():
            pipe.evaluate(x, y)
            pipe.predict(x)
            pipe.load_state_dict(pipe.state_dict())
            pipe.stats()
            pipe.step(x, y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_background_save_reads_nothing(gpu: FakeGpu, schedule: str, tmp_path: Path) -> None:
    """Its thread waits for the copies."""
    pipe = pipeline(schedule)
    train(gpu, pipe)
    for _ in range(2):
        given = batch()
        with gpu.without_waiting():
            save = pipe.save(tmp_path, wait=False)
            for _ in range(2):
                pipe.step(*given)
        save.wait()
    with gpu.counting() as waits, unset_fake_temporarily():
        pipe.load(tmp_path)
    assert waits


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(SAMPLES, WIDTH), nn.Linear(WIDTH, SAMPLES)

    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.words(input_ids) * weights)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(samples: int) -> Any:
    integers = torch.zeros(3, dtype=torch.int64)
    return [{"input_ids": integers, "labels": integers, "weights": torch.ones(3, 1)}] * samples


def on_the_host(batches: Iterable[Any]) -> Iterator[Any]:
    """`batches`, which a data loader makes of real tensors."""
    iterator = iter(batches)
    while True:
        with unset_fake_temporarily():
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss_weight", [None, penstock.token_count("labels", shifted=True)])
@pytest.mark.parametrize("cut", [False, True], ids=["one batch", "microbatches"])
def test_labels_are_read_once_in_a_step(gpu: FakeGpu, loss_weight: Any, cut: bool) -> None:
    """And taking a batch reads nothing."""
    with unset_fake_temporarily():
        loader, sample = penstock.loader(rows(3 * SAMPLES), SAMPLES), default_collate(rows(2))
    options = {"loss_fn": penstock.model_loss, "loss_weight": loss_weight, "sample": sample}
    pipe, batches = pipeline(build=Labelled, **options), iter(penstock.prefetch(on_the_host(loader), DEVICE))
    for _ in range(3):
        with gpu.without_waiting():
            found = next(batches)
            parts = [{name: tensor[:2] for name, tensor in found.items()}] * MICROBATCHES
        with gpu.counting() as waits:
            pipe.step(penstock.Microbatches(parts) if cut else found)
    assert waits == ["tolist reads"]


class TensorRates(torch.optim.SGD):
    """Has its learning rate on the GPU, and reads it there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = torch.full((), 0.1, device=DEVICE)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * self.param_groups[0]["lr"])


def step_of(pipe: penstock.Pipeline) -> StepResult:
    return pipe.step(*batch())


WAITING: Mapping[str, tuple[Mapping[str, Any], Callable[[penstock.Pipeline], object]]] = {
    "read a loss": ({}, lambda pipe: float(step_of(pipe).loss)),
    "a metric": ({"loss_fn": loss_of_two}, lambda pipe: step_of(pipe).metrics["largest"]),
    "`gradient_norm`": ({"clip_grad_norm": 1.0}, lambda pipe: (step_of(pipe), pipe.gradient_norm)),
    "`loss_scale`": ({"autocast": torch.float16, "loss_scale": "dynamic"}, step_of),
    '`on_nonfinite="skip"`': ({"on_nonfinite": "skip"}, step_of),
    "`loss_weight`": ({"loss_weight": torch.count_nonzero}, step_of),
    "learning rate": ({"optimizer": TensorRates, "schedule": "pipedream"}, step_of),
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
    with gpu.counting():
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
