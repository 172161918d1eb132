"""Jobs for the processes of the composition's tests: a transformer, trained by stages that a hook has split."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import penstock
from penstock.capturing.chain import StageModule
from penstock.runtime.assembly.pipeline_options import Parallelize
from penstock.runtime.execution.split_backward import run_input_backward
from penstock.runtime.transport.tensor_parallel_transport import TensorParallelTransport
from support import models
from support.jobs.hook_jobs import Dragging

WIDTH, HEADS, TOKENS, WORDS, SAMPLES = 16, 4, 6, 11, 8
WHOLE = Replicate()


class Embedding(nn.Module):
    """Words and places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places


class Attention(nn.Module):
    """Causal attention; its heads may be spread over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = [part(x) for part in (self.query, self.key, self.value)]
        heads = [values.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for values in wide]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)  # type: ignore[misc]
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """The same layers with a connection over all of them, which takes a trace: the code between blocks has a weight."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.share = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        early = self.embedding(tokens)
        # A block's input has two readers in the block. `fully_shard` adds their gradients first and that of a third
        # reader, here of the connection, last. Autograd by itself adds them in another order, with other roundings.
        x = early * 1.0
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x + self.share * early)
        return result


def build_model(blocks: int, traced: bool = False) -> nn.Module:
    """A model of `blocks` blocks, and a layer at either end."""
    torch.manual_seed(3)
    if traced:
        return Transformer(blocks).double()
    return nn.Sequential(Embedding(), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, WORDS)).double()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all tokens; of logits that a hook left spread over processes, too."""
    if isinstance(logits, DTensor):
        target = DTensor.from_local(target, logits.device_mesh, [WHOLE], run_check=False)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return [(torch.randint(WORDS, (SAMPLES, TOKENS)), torch.randint(WORDS, (SAMPLES, TOKENS))) for _ in range(4)]


BATCHES = _batches()
TRAINED = BATCHES[:3]
"""Of a run: enough for every delay of two stages. Gloo's many small collectives make each step slow."""


def split_columns_and_rows(stage: StageModule, mesh: DeviceMesh, along: Placement = WHOLE) -> None:
    """Megatron's layer: heads and hidden units over ``tp``. `along`: how the inputs of these layers are laid out."""
    styles: dict[str, Any] = {}
    for index, layer in enumerate(stage.layers):
        if isinstance(layer.body, Block):
            at = f"layers.{index}.body"
            for name in ("attention.query", "attention.key", "attention.value", "up"):
                styles[f"{at}.{name}"] = ColwiseParallel(input_layouts=along)
            styles |= {f"{at}.attention.out": RowwiseParallel(), f"{at}.down": RowwiseParallel()}
    parallelize_module(stage, mesh["tp"], styles)


def split_logits(stage: StageModule, mesh: DeviceMesh) -> None:
    """Megatron's layer, and an output that stays a DTensor, of which the loss is one too."""
    split_columns_and_rows(stage, mesh)
    if isinstance(stage.layers[-1].body, nn.Linear):
        style = ColwiseParallel(output_layouts=WHOLE, use_local_output=False)
        parallelize_module(stage.layers[-1], mesh["tp"], {"body": style})


def split_sequence(stage: StageModule, mesh: DeviceMesh) -> StageModule:
    """Megatron's layer, with LayerNorms along the tokens: the gradients of their weights are sums yet to be taken."""
    split_columns_and_rows(stage, mesh, Shard(1))
    for layer in stage.layers:
        if isinstance(layer.body, Block):
            for norm in (layer.body.first, layer.body.second):
                before = PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=Shard(1))
                parallelize_module(norm, mesh["tp"], before)
                parallelize_module(norm, mesh["tp"], SequenceParallel())
    return stage


def shard_blocks(stage: StageModule, mesh: DeviceMesh) -> None:
    """FSDP2, block by block, and what is left in the stage itself."""
    for layer in stage.layers:
        if isinstance(layer.body, Block):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


def shard_some(stage: StageModule, mesh: DeviceMesh) -> None:
    """FSDP2 for the blocks only: the pipeline sums the other gradients."""
    for layer in stage.layers:
        if isinstance(layer.body, Block):
            fully_shard(layer.body, mesh=mesh["dp"])


def split_and_shard(stage: StageModule, mesh: DeviceMesh) -> None:
    """Both."""
    split_columns_and_rows(stage, mesh)
    shard_blocks(stage, mesh)


def split_own_blocks(stage: StageModule, mesh: DeviceMesh) -> None:
    """Megatron's layer, for the blocks by their names in the model."""
    for name, block in stage.blocks.items():
        if name.startswith("blocks."):
            columns = ("attention.query", "attention.key", "attention.value", "up")
            styles: dict[str, Any] = {part: ColwiseParallel() for part in columns}
            parallelize_module(
                block, mesh["tp"], {**styles, "attention.out": RowwiseParallel(), "down": RowwiseParallel()}
            )


def shard_own_blocks(stage: StageModule, mesh: DeviceMesh) -> None:
    """FSDP2 for each block, and what is left in the stage, the weight between blocks included."""
    for name, block in stage.blocks.items():
        if name.startswith("blocks."):
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


HOOKS = (split_columns_and_rows, split_logits, split_sequence, shard_blocks, shard_some, split_and_shard)
OWN_HOOKS = (split_own_blocks, shard_own_blocks)
HOOKS_AT_UPDATES = (Dragging(), penstock.WeightAverage(0.5))
BY_NAME: dict[str, Parallelize] = {hook.__name__: hook for hook in (*HOOKS, *OWN_HOOKS)}


@dataclass(frozen=True)
class Run:
    """One training: `stages` on ranks of their own, unless interleaved, of `replicas` times `tp` processes each."""

    hook: str
    schedule: str = "1f1b-flush"
    stages: int = 2
    replicas: int = 1
    tp: int = 1
    microbatches: int = 4
    optimizer: str = "momentum"
    split: bool = False
    recompute: bool | str | None = None
    vertical_sync: bool = False
    most: float | None = None
    """The norm that gradients are clipped to."""
    scales: bool = False
    """Whether losses are scaled, by so much at first that some updates are skipped."""
    hooked: bool = False
    """Whether hooks see the updates."""
    predicted: bool = False
    """Whether forwards read predicted weights."""
    shares: bool = False
    """Whether replicas share the optimizer's state."""
    low: bool = False
    """Whether forwards read bfloat16 versions of float32 weights."""
    traced: bool = False
    blocks: int = 2
    """Of the transformer; 4 make two for each of two stages. Every block makes DTensors in Python, which is slow."""

    @property
    def plan(self) -> penstock.Plan:
        uniform = penstock.Plan.uniform(
            self.blocks + 2,
            self.stages,
            schedule=self.schedule,
            microbatches=self.microbatches,
            stages_per_rank=2 if self.schedule == "interleaved" else 1,
            vertical_sync=self.vertical_sync,
        )
        wide = self.replicas * self.tp
        stages = [
            replace(stage, ranks=tuple(range(rank * wide, (rank + 1) * wide)))
            for stage in uniform.stages
            for rank in stage.ranks
        ]
        routing = "split" if self.split else "round-robin"
        return replace(uniform, stages=tuple(stages), routing=routing, tensor_parallel=self.tp)

    @property
    def options(self) -> dict[str, Any]:
        chosen = {"momentum": models.momentum, "adamw": models.adamw}[self.optimizer]
        return {
            "sample": (BATCHES[0][0][:2],),
            "loss_fn": loss_fn,
            "optimizer": chosen,
            "plan": self.plan,
            "seed": 9,
            "clip_grad_norm": self.most,
            "update_hooks": HOOKS_AT_UPDATES if self.hooked else (penstock.WeightPrediction(),) * self.predicted,
            **({"autocast": torch.bfloat16, "version_dtype": torch.bfloat16} if self.low else {}),
            "loss_scale": penstock.LossScale(initial=2.0**1023, interval=2) if self.scales else None,
        }

    def build(self) -> nn.Module:
        model = build_model(self.blocks, self.traced)
        return model.float() if self.low else model

    def make(self, **options: Any) -> penstock.Pipeline:
        """The pipeline; no hook of the name means no hook."""
        own = {"parallelize": BY_NAME.get(self.hook), "recompute": self.recompute, "shard_optimizer": self.shares}
        return penstock.Pipeline(self.build(), **{**self.options, **own, **options})


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    evaluated: float
    predicted: Tensor
    state: dict[str, Tensor]
    sent_bytes: int
    """Over cuts, in training."""


def train(run: Run) -> Outcome:
    """A training to its end, an evaluation, and a prediction."""
    pipe = run.make()
    losses = [float(pipe.step(x, y).loss) for x, y in TRAINED]
    pipe.drain()
    transport = pipe._engine.transport
    sent = transport.sent_bytes if isinstance(transport, TensorParallelTransport) else 0
    evaluated, predicted = float(pipe.evaluate(*BATCHES[0]).loss), pipe.predict(BATCHES[1][0])
    state = pipe.state_dict()["model"]
    pipe.close()
    assert not any(isinstance(tensor, DTensor) for tensor in state.values())
    return Outcome(losses, evaluated, predicted, state, sent)


def look_around(run: Run, plan: penstock.Plan | None) -> tuple[list[tuple[Any, ...]], list[int], Outcome]:
    """What a hook gets of each stage, the ranks of a step's spans, and what comes of it. None: no plan."""
    reported: list[tuple[Any, ...]] = []

    def listen(stage: StageModule, mesh: DeviceMesh) -> None:
        reported.append((tuple(stage.blocks), mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_local_rank("tp")))
        if run.hook:
            BY_NAME[run.hook](stage, mesh)

    by_hand = {} if plan else {"tensor_parallel": run.tp, "microbatches": run.microbatches}
    pipe = run.make(parallelize=listen, plan=plan, **by_hand)
    losses = [float(pipe.step(x, y).loss) for x, y in TRAINED]
    spans = [span.rank for span in pipe.timeline().spans]
    pipe.drain()
    evaluated, predicted = float(pipe.evaluate(*BATCHES[0]).loss), pipe.predict(BATCHES[1][0])
    outcome = Outcome(losses, evaluated, predicted, pipe.state_dict()["model"], 0)
    pipe.close()
    return reported, spans, outcome


def name_blocks() -> list[str]:
    """The names of the blocks in a stage that has one module twice."""
    shared = nn.Linear(4, 4)
    named: list[str] = []
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": models.plain, "stages": 1, "tensor_parallel": 2}
    pipe = penstock.Pipeline(
        [shared, nn.Tanh(), shared],
        (torch.zeros(2, 4),),
        parallelize=lambda stage, mesh: named.extend(stage.blocks),  # type: ignore[func-returns-value]
        **options,
    )
    pipe.close()
    return named


@dataclass(frozen=True)
class Saved:
    """What a training saves after two steps, and how it goes on."""

    own: dict[str, Tensor]
    """The state dict of this process."""
    whole: dict[str, Tensor]
    """That of the whole model."""
    losses: list[float]
    """Of the steps after it."""


def save(run: Run, directory: str) -> Saved:
    """Two steps, a checkpoint in `directory`, the weights in its folder ``weights``, and the steps after it."""
    pipe = run.make()
    for x, y in BATCHES[:2]:
        pipe.step(x, y)
    pipe.save(directory)
    pipe.save_weights(f"{directory}/weights", max_shard_size="1KB")
    own, whole = pipe.state_dict()["model"], pipe.full_state_dict(rank=None)
    return Saved(own, whole, _finish(pipe))


def load(run: Run, directory: str) -> list[float]:
    pipe = run.make(seed=1)
    pipe.load(directory)
    return _finish(pipe)


def _finish(pipe: penstock.Pipeline) -> list[float]:
    losses = [float(pipe.step(x, y).loss) for x, y in BATCHES[2:]]
    pipe.drain()
    pipe.close()
    return losses


def divide_backward() -> tuple[set[str], list[bool]]:
    """A divided backward of a block that is split: the layers whose weights have no gradient after the input backward,
    and whether the weight backward makes the gradients of a whole one.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    block = Block().double().eval()
    columns = ("attention.query", "attention.key", "attention.value", "up")
    styles: dict[str, Any] = {part: ColwiseParallel() for part in columns}
    parallelize_module(block, mesh["tp"], {**styles, "attention.out": RowwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    block(x).sum().backward()
    whole = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    output = block(x)
    _, pending = run_input_backward([get_gradient_edge(output)], [torch.ones_like(output)], [x])
    deferred = {id(use.leaf) for work in pending._deferred for use in work.uses}
    left = {name.rpartition(".")[0] for name, weight in block.named_parameters() if id(weight) in deferred}
    assert all(parameter.grad is None for parameter in block.parameters())
    pending.run()
    pairs = [(whole[name], parameter.grad) for name, parameter in block.named_parameters()]
    return left, [_alike(one, other) for one, other in pairs]


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other)
