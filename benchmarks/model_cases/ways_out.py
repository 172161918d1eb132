"""The models that are refused, once more with the way out that the error names.

A case is called after the refused one: ``name: what was done``. Most compute what the refused model computes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from model_cases import habit_blocks as in_blocks
from model_cases import habit_models as habits
from model_cases import libraries, transformers_models
from model_cases.cases import Case, loss_of
from model_cases.habit_blocks import WIDTH, Block, Stack, draw
from model_cases.habit_models import outside, straight
from model_cases.modules import Build, Habit, Inner, Prepare, adds, holds, with_habit
from model_cases.pages import WAYS_OUT

__all__ = ["CASES"]

# What the model did around its blocks, done by its first or its last layer or by its blocks


class Layer(nn.Module):
    """A module with one module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.layer(*inputs, **named)


Wrap = Callable[[nn.Module], nn.Module]


def around(habit: Habit, prepare: Prepare | None = None, **state: Any) -> Wrap:
    """Does something around a layer."""
    return partial(with_habit(Layer), habit, prepare, state)


def inside(
    first: Wrap = lambda layer: layer,
    block: Wrap = lambda layer: layer,
    last: Wrap = lambda layer: layer,
    kind: Build = Stack,
) -> Build:
    """Makes stacks in whose layers something else is done."""

    def build() -> nn.Module:
        model: Any = kind()
        model.first, model.last = first(model.first), last(model.last)
        model.blocks = nn.ModuleList(map(block, model.blocks))
        return model  # type: ignore[no-any-return]

    return build


def return_memory(module: Any, inner: Inner, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what it remembers, too."""
    module.memory.append(x.detach().mean())
    return inner(x), torch.stack(module.memory).sum()


def add_memory(model: Any, inner: Inner, x: Tensor) -> Any:
    early, total = model.first(x)
    return model.last(model.run(early) + early) + total


def exit_once(module: Any, inner: Inner, x: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Does nothing once a block before it is done."""
    if done:
        return x, done
    x = inner(x)
    return x, x.abs().mean() < 0.1


def pass_exits(model: Any, inner: Inner, x: Tensor) -> Any:
    x = model.first(x)
    done = torch.zeros((), dtype=torch.bool)
    for block in model.blocks:
        x, done = block(x, done)
    return model.last(x)


def add_losses(model: Any, inner: Inner, x: Tensor) -> tuple[Tensor, Tensor]:
    early = x = model.first(x)
    losses = []
    for block in model.blocks:
        x, loss = block(x)
        losses.append(loss)
    return model.last(x + early), torch.stack(losses).sum()


def evaluate(module: Any, inner: Inner, x: Tensor) -> Any:
    module.layer.eval()
    return inner(x)


def still() -> nn.Module:
    model = Stack(in_blocks.BatchNormed)
    model.blocks[0] = around(evaluate)(model.blocks[0])
    return model


def observe_itself(module: Any) -> None:
    """A hook that writes in an attribute of its own module."""
    module.register_forward_hook(lambda module, inputs, output: module.seen.append(output.detach().mean()))


def observe_last(model: Any) -> None:
    """The observing hook of `HookedOutside` on its last layer."""
    model.last.seen = []
    model.last.register_forward_hook(lambda module, inputs, output: module.seen.append(1))


def add_copied_twin(block: Any, inner: Inner, x: Tensor) -> Any:
    in_blocks.follow(block.target, block.linear)
    return inner(x) + nn.functional.linear(x, block.target.weight.clone(), block.target.bias.clone())


def weighted(name: str) -> Build:
    """Makes a sequence of a module for each weight of a model."""

    def layer(each: Tensor) -> nn.Module:
        make = holds(
            lambda block, x: torch.tanh(x @ block.weight) + x, weight=lambda: nn.Parameter(each.detach().clone())
        )
        return make()

    return lambda: nn.Sequential(*map(layer, habits.HELD[name]().weights))  # type: ignore[arg-type]


def coders() -> nn.Module:
    blocks = [habits.Coder() for _ in range(3)]
    tanh = around(lambda module, inner, x: inner(x).tanh())
    return nn.Sequential(*(tanh(each.there) for each in blocks), *(tanh(each.back) for each in blocks))


def packed() -> nn.Module:
    """Each block packs and unpacks what it takes."""
    wrap = around(lambda module, layer, x: in_blocks.pack(x, lambda packed: layer(packed)[0]))
    return nn.Sequential(*map(wrap, habits.OUTSIDE["PadAndPack"]().layers))


wide, nested, vmapped = around(habits.autocast), around(habits.nest), around(habits.vmap)
IN_A_BLOCK: dict[str, Build] = {
    "BookOutside": inside(first=around(habits.keep_book, habits.prepare_book), kind=straight),
    "ReassignedOutside": inside(first=around(habits.reassign_book, habits.prepare_book)),
    "CounterOutside": inside(last=around(habits.warm_up, steps=0)),
    "PlainTensorOutside": inside(last=around(habits.count_in_a_tensor, plain=torch.zeros(()))),
    "ListOutside": outside(
        add_memory, lambda model: setattr(model, "first", around(return_memory, memory=[])(model.first))
    ),
    "GlobalOutside": inside(last=around(habits.count(lambda steps: steps), steps=0)),
    "BatchOutside": inside(last=around(habits.divide_by_samples)),
    "ValuesOutside": inside(last=around(habits.decide_by_values)),
    "EarlyExit": outside(pass_exits, kind=lambda: around(exit_once)(Block())),
    "ReversalOutside": outside(
        habits.after_blocks(lambda model, x: (model.last(x), model.domain(x))),
        adds(domain=lambda: around(lambda module, inner, x: inner(in_blocks.reverse(x)))(nn.Linear(WIDTH, 2))),
    ),
    "ScaledGradientOutside": inside(first=around(habits.scale_gradient), kind=straight),
    "LossInside": inside(last=around(habits.keep_loss, latest=None)),
    "AutocastOutside": inside(wide, wide, around(habits.autocast_to_float)),
    "VmappedOutside": inside(vmapped, vmapped, vmapped),
    "FunctionalOutside": inside(
        block=around(lambda module, inner, x: habits.call_with_smaller_weights(module, module.layer, x)), kind=straight
    ),
    "SwitchedMode": still,
    "PadAndPack": packed,
    "Jagged": inside(nested, nested, nested),
}
OTHER: dict[str, Build] = {
    "HookedOutside: on a block": outside(prepare=observe_last),
    "ValuesOutside: torch.where": outside(in_blocks.changed(lambda model, y: torch.where(y.mean() > 0, y * 2, y))),
    "ItemOutside: operators on tensors": outside(lambda model, inner, x: inner(x) * x.abs().max().clamp(min=1.0)),
    "ObservedBlocks: in the block's own list": partial(Stack, in_blocks.does(prepare=observe_itself, seen=[])),
    "AuxiliaryAttribute: returned": outside(add_losses, kind=habits.returning),
    "Reentrant: use_reentrant=False": partial(Stack, in_blocks.KINDS["Checkpointed"]),
    "CheckpointedBlocks, reentrant: use_reentrant=False": habits.checkpointed(reentrant=False),
    "MomentumTwin: reads a copy": partial(Stack, in_blocks.does(add_copied_twin, in_blocks.twin)),
    "ParameterListModel: a module for each weight": weighted("ParameterListModel"),
    "StackedWeights: a module for each weight": weighted("StackedWeights"),
    "OtherMethod: a module for each method": coders,
}
DRAWING: dict[str, Build] = {
    "RandomOutside: in a block": inside(last=around(lambda module, inner, x: inner(x) * random.random())),
    "RandomOutside: torch.rand": inside(last=around(lambda module, inner, x: inner(x) * torch.rand([]))),
    "LayerDrop: in a block": inside(block=around(in_blocks.skip_by(random.random)), kind=straight),
    "TorchLayerDrop: in a block": inside(block=around(in_blocks.skip_by(lambda: torch.rand([]))), kind=straight),
}

# What the user changed between steps


def write_data(model: Any) -> None:
    with torch.no_grad():
        habits.blocks_of(model)[1].linear.weight.mul_(0.5)


def write_block(model: Any) -> None:
    torch.manual_seed(3)
    model.blocks[1].load_state_dict(Block().double().state_dict())


def scale_gradients(block: Any) -> None:
    """Has its hook from the beginning."""
    block.linear.weight.register_hook(lambda gradient: gradient * block.share)


def still_blocks(model: Any, step: int) -> None:
    for block in model.blocks:
        block.train(step != 1)


CHANGES: dict[str, tuple[Build, habits.Change]] = {
    "p.data = ...: written in place": (Stack, habits.once(write_data)),
    "a new nn.Parameter: written in place": (Stack, habits.once(write_data)),
    "a new block: written in place": (Stack, habits.once(write_block)),
    "model.temperature: in a block": (
        inside(last=around(habits.cool, temperature=1.0)),
        lambda model, step: setattr(model.last, "temperature", 1.0 + step),
    ),
    "register_hook: before the pipeline": (
        partial(Stack, in_blocks.does(prepare=scale_gradients, share=1.0)),
        habits.once(lambda model: setattr(model.blocks[1], "share", 0.1)),
    ),
    "a hook on the model: on a block": (Stack, habits.once(lambda model: habits.halve_output(model.last))),
    "model.eval(): of its blocks": (habits.normed, still_blocks),
    "nn.Sequential, p.data = ...: written in place": (habits.three, habits.once(write_data)),
}
FROZEN: dict[str, tuple[Build, habits.Change]] = {
    "requires_grad_(False): a new pipeline": (Stack, habits.once(habits.freeze)),
    "requires_grad_(True): a new pipeline": (Stack, habits.unfreeze),
    "nn.Sequential, requires_grad_(False): a new pipeline": (habits.three, habits.once(habits.freeze)),
}

# Models of libraries

REFUSED = {case.name: case for case in (*transformers_models.CASES, *libraries.CASES)}
HF = ("transformers",)


def with_decoder_mask(samples: int, length: int) -> dict[str, Tensor]:
    """What the code between blocks decided, passed as an argument."""
    batch: dict[str, Tensor] = REFUSED["fsmt"].draw(samples, length)
    return {**batch, "decoder_attention_mask": torch.ones_like(batch["decoder_input_ids"])}


def without_checks(name: str) -> Build:
    """Makes the refused model without the checks of PyTorch's distributions."""

    def build() -> nn.Module:
        torch.distributions.Distribution.set_default_validate_args(False)
        return REFUSED[name].build()

    return build


def contrastive(output: Any, target: Any) -> Tensor:
    """A loss that compares the samples of a microbatch."""
    logits = output.logits_per_text
    samples = torch.arange(len(logits))
    losses = [nn.functional.cross_entropy(each, samples) for each in (logits, logits.t())]
    return loss_of((sum(losses) / 2, output))


def llava() -> nn.Module:
    """Its projector takes the pieces of all images as those of one, so that a loop over images has one turn."""
    model: Any = REFUSED["llava"].build()
    in_one_piece = around(lambda module, projector, x: projector(x).flatten(0, 1)[None])
    model.model.multi_modal_projector = in_one_piece(model.model.multi_modal_projector)
    return model  # type: ignore[no-any-return]


def idefics3() -> nn.Module:
    """A method without the code that depends on values: no image is left out."""
    model: Any = REFUSED["idefics3"].build()
    # A method, so that it is of the copy in a copy of the model.
    model.model.get_image_features = MethodType(see_all, model.model)
    return model  # type: ignore[no-any-return]


def see_all(self: Any, pixel_values: Tensor, *rest: Any, **options: Any) -> Any:
    images = pixel_values.flatten(0, 1)
    side = self.config.vision_config.image_size // self.config.vision_config.patch_size
    mask = torch.ones(images.shape[0], side, side, dtype=torch.bool, device=images.device)
    output = self.vision_model(pixel_values=images, patch_attention_mask=mask, return_dict=True)
    output.pooler_output = [self.connector(output.last_hidden_state).flatten(0, 1)]
    return output


class Reversible(nn.Module):
    """The encoder of Reformer as operators. It needs the memory that the library's own backward saves."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.layers, self.layer_norm = encoder.layers, encoder.layer_norm
        for layer in self.layers:
            # They are for a second forward in the backward.
            layer._init_attention_seed = layer._init_feed_forward_seed = do_nothing

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, orig_sequence_length: Any = None, **rest: Any
    ) -> Any:
        attended = hidden = hidden_states
        for layer in self.layers:
            output = layer(attended, hidden, attention_mask=attention_mask, orig_sequence_length=orig_sequence_length)
            attended, hidden = output.attn_output, output.hidden_states
        states = self.layer_norm(torch.cat([attended, hidden], dim=-1))
        return SimpleNamespace(hidden_states=states, all_hidden_states=(), all_attentions=(), past_buckets_states=None)


def do_nothing() -> None:
    pass


def reformer() -> nn.Module:
    model: Any = REFUSED["reformer"].build()
    model.reformer.encoder = Reversible(model.reformer.encoder)
    return model  # type: ignore[no-any-return]


# The graph U-Net as a list of layers, which run as they are


def begin(module: Any, convolution: Inner, given: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    x, edges = given
    weights = x.new_ones(edges.shape[1])
    x = convolution(x, edges, weights).relu()
    return x, edges, weights, edges.new_zeros(x.shape[0]), x, edges, weights


def down(module: Any, convolution: Inner, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One level down: what is after the first level of the graph U-Net."""
    x, edges, weights, batch, *saved = state
    unet = import_module("torch_geometric.nn").GraphUNet
    edges, weights = unet.augment_adj(None, edges, weights, x.shape[0])
    x, edges, weights, batch, chosen, _ = module.pool(x, edges, weights, batch)
    x = convolution(x, edges, weights).relu()
    return x, edges, weights, batch, *saved, chosen, x, edges, weights


def up(module: Any, convolution: Inner, state: Sequence[Tensor]) -> Any:
    x, edges, weights, batch, *saved = state
    *saved, before, edges, weights, chosen, _, _, _ = saved
    filled = torch.zeros_like(before)
    filled[chosen] = x
    x = convolution(before + filled, edges, weights)
    return x if module.last else (x.relu(), edges, weights, batch, *saved, before, edges, weights)


def graph_unet() -> nn.Module:
    unet: Any = REFUSED["GraphUNet"].build()
    first, *rest = unet.down_convs
    return nn.Sequential(
        around(begin)(first),
        *(
            around(down, partial(nn.Module.add_module, name="pool", module=pool))(convolution)
            for pool, convolution in zip(unet.pools, rest, strict=True)
        ),
        *(around(up, last=index == unet.depth - 1)(convolution) for index, convolution in enumerate(unet.up_convs)),
    )


# An object that was shared by all blocks, in each block


class Prefix:
    """What an attention takes for a cache: keys and values that come before its own."""

    def __init__(self, prompt: Tensor, samples: int) -> None:
        """`prompt`: by token, keys and values, head, entry."""
        self.keys, self.values = prompt.permute(1, 2, 0, 3)[:, None].expand(-1, samples, -1, -1, -1)

    def update(self, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)


def prefix(module: Any, layer: Inner, hidden_states: Tensor, **rest: Any) -> Any:
    """A layer of Llama with a prompt of its own."""
    rest["past_key_values"] = Prefix(module.prompt, hidden_states.shape[0])
    return layer(hidden_states, **rest)


class PrefixTuned(nn.Module):
    """Llama with prefixes, which takes what the model of PEFT takes."""

    def __init__(self) -> None:
        super().__init__()
        tuned: Any = REFUSED["prefix tuning of llama"].build()
        self.llama = tuned.get_base_model()
        config = self.llama.config
        prompts = tuned.prompt_encoder.default.embedding.weight
        self.tokens = prompts.shape[0]
        prompts = prompts.view(self.tokens, config.num_hidden_layers, 2, config.num_key_value_heads, -1)
        layers = self.llama.model.layers
        self.llama.model.layers = nn.ModuleList(
            around(prefix, prompt=nn.Parameter(prompts[:, index].detach()))(layer) for index, layer in enumerate(layers)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        before = positions[:, None] >= positions[None, :]
        own = before[None, None] & attention_mask[:, None, None, :].bool()
        mask = torch.cat([own.new_ones(*own.shape[:3], self.tokens), own], -1)
        return self.llama(input_ids, attention_mask=mask, position_ids=(positions + self.tokens)[None])


def case(name: str, build: Build, **options: Any) -> Case:
    return Case(name, WAYS_OUT, build, draw, **options)


def again(refused: str, way: str, build: Build | None = None, imports: Sequence[str] = HF, **options: Any) -> Case:
    """The refused case of a library with another model, or other inputs, or another loss."""
    its = REFUSED[refused]
    changed = {"name": f"{refused}: {way}", "family": WAYS_OUT, "imports": imports, "draws": False, **options}
    return replace(its, build=build or its.build, **changed)


CAUSAL = next(case for case in habits.CASES if case.name == "nn.TransformerEncoder, is_causal")
CASES: tuple[Case, ...] = (
    *(case(f"{name}: in a block", build) for name, build in IN_A_BLOCK.items()),
    *(case(name, build) for name, build in OTHER.items()),
    replace(CAUSAL, name="nn.TransformerEncoder, causal mask: is_causal=True", family=WAYS_OUT),
    *(case(name, build, microbatches=1, draws=True) for name, build in DRAWING.items()),
    *(case(name, build, between=between) for name, (build, between) in CHANGES.items()),
    *(case(name, build, between=between, rebuilds=True) for name, (build, between) in FROZEN.items()),
    again("reformer", "the encoder as operators", reformer),
    again("fsmt", "decoder_attention_mask", draw=with_decoder_mask),
    again("clip, return_loss", "the loss in loss_fn", draw=REFUSED["clip"].draw, loss=contrastive),
    again("llava", "images in one piece", llava),
    again("idefics3", "a method without decisions", idefics3),
    again("time_series_transformer", "set_default_validate_args(False)", without_checks("time_series_transformer")),
    again("informer", "set_default_validate_args(False)", without_checks("informer")),
    again(
        "GraphUNet",
        "nn.Sequential",
        graph_unet,
        ("torch_geometric",),
        draw=lambda samples, length: (libraries.graph(samples, length),),
    ),
    again("prefix tuning of llama", "a prefix in each block", PrefixTuned, ("transformers", "peft")),
)
