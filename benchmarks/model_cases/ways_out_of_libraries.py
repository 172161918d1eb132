"""Models of libraries that are refused, once more with the way out that the error names.

A case is called after the refused one: ``name: what was done``. All compute what the refused model computes.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from model_cases import other_libraries, transformers_other, transformers_text
from model_cases.cases import Case, loss_of
from model_cases.pages import WAYS_OUT

__all__ = ["CASES"]

REFUSED = {case.name: case for case in (*transformers_text.CASES, *transformers_other.CASES, *other_libraries.CASES)}


# What the code between blocks decided, passed as an argument


def with_decoder_mask(samples: int, length: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = REFUSED["fsmt"].draw(samples, length)
    return {**batch, "decoder_attention_mask": torch.ones_like(batch["decoder_input_ids"])}


# A switch of PyTorch's


def without_checks(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.distributions.Distribution.set_default_validate_args(False)
        return REFUSED[name].build()

    return build


# A loss that compares the samples of a microbatch


def contrastive(output: Any, target: Any) -> Tensor:
    logits = output.logits_per_text
    samples = torch.arange(len(logits))
    losses = [nn.functional.cross_entropy(each, samples) for each in (logits, logits.t())]
    return loss_of((sum(losses) / 2, output))


# A loop over samples, in a block


class InOnePiece(nn.Module):
    """The projector of LLaVA for the pieces of all images as those of one, so that a loop over images has one turn."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(x).flatten(0, 1)[None]  # type: ignore[no-any-return]


def llava() -> nn.Module:
    model: Any = REFUSED["llava"].build()
    model.model.multi_modal_projector = InOnePiece(model.model.multi_modal_projector)
    return model  # type: ignore[no-any-return]


# A method without the code that depends on values: no image is left out


def idefics3() -> nn.Module:
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


# A backward of the library's own, left to PyTorch


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


# A list of layers, which run as they are


class Down(nn.Module):
    """One level down: what is after the first level of the graph U-Net."""

    def __init__(self, pool: nn.Module, convolution: nn.Module) -> None:
        super().__init__()
        self.pool, self.convolution = pool, convolution

    def forward(self, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, edges, weights, batch, *saved = state
        edges, weights = augmented(edges, weights, x.shape[0])
        x, edges, weights, batch, chosen, _ = self.pool(x, edges, weights, batch)
        x = self.convolution(x, edges, weights).relu()
        return x, edges, weights, batch, *saved, chosen, x, edges, weights


class First(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, graph: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, edges = graph
        weights = x.new_ones(edges.shape[1])
        x = self.convolution(x, edges, weights).relu()
        return x, edges, weights, edges.new_zeros(x.shape[0]), x, edges, weights


class Up(nn.Module):
    def __init__(self, convolution: nn.Module, last: bool) -> None:
        super().__init__()
        self.convolution, self.last = convolution, last

    def forward(self, state: Sequence[Tensor]) -> Any:
        x, edges, weights, batch, *saved = state
        *saved, before, edges, weights, chosen, _, _, _ = saved
        filled = torch.zeros_like(before)
        filled[chosen] = x
        x = self.convolution(before + filled, edges, weights)
        return x if self.last else (x.relu(), edges, weights, batch, *saved, before, edges, weights)


def augmented(edges: Tensor, weights: Tensor, nodes: int) -> Any:
    unet = import_module("torch_geometric.nn").GraphUNet
    return unet.augment_adj(None, edges, weights, nodes)


def graph_unet() -> nn.Module:
    unet: Any = REFUSED["GraphUNet"].build()
    first, *rest = unet.down_convs
    return nn.Sequential(
        First(first),
        *(Down(pool, convolution) for pool, convolution in zip(unet.pools, rest, strict=True)),
        *(Up(convolution, index == unet.depth - 1) for index, convolution in enumerate(unet.up_convs)),
    )


# An object that was shared by all blocks, in each block


class Prefix:
    """What an attention takes for a cache: keys and values that come before its own."""

    def __init__(self, prompt: Tensor, samples: int) -> None:
        """`prompt`: by token, keys and values, head, entry."""
        self.keys, self.values = prompt.permute(1, 2, 0, 3)[:, None].expand(-1, samples, -1, -1, -1)

    def update(self, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)


class Prefixed(nn.Module):
    """A layer of Llama with a prompt of its own."""

    def __init__(self, layer: nn.Module, prompt: Tensor) -> None:
        super().__init__()
        self.layer, self.prompt = layer, nn.Parameter(prompt.detach().clone())

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        rest["past_key_values"] = Prefix(self.prompt, hidden_states.shape[0])
        return self.layer(hidden_states, **rest)  # type: ignore[no-any-return]


class PrefixTuned(nn.Module):
    """Llama with prefixes, which takes what the model of PEFT takes."""

    def __init__(self, tuned: Any) -> None:
        super().__init__()
        self.llama = tuned.get_base_model()
        config = self.llama.config
        prompts = tuned.prompt_encoder.default.embedding.weight
        self.tokens = prompts.shape[0]
        heads = config.num_key_value_heads
        prompts = prompts.view(self.tokens, config.num_hidden_layers, 2, heads, -1)
        layers = self.llama.model.layers
        self.llama.model.layers = nn.ModuleList(Prefixed(layer, prompts[:, i]) for i, layer in enumerate(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device)
        before = positions[:, None] >= positions[None, :]
        own = before[None, None] & attention_mask[:, None, None, :].bool()
        mask = torch.cat([own.new_ones(*own.shape[:3], self.tokens), own], -1)
        return self.llama(input_ids, attention_mask=mask, position_ids=(positions + self.tokens)[None])


def prefix_tuned() -> nn.Module:
    return PrefixTuned(REFUSED["prefix tuning of llama"].build())


def case(refused: str, way: str, build: Callable[[], nn.Module], imports: Sequence[str], **options: Any) -> Case:
    its = REFUSED[refused]
    options = {"draw": its.draw, "lengths": its.lengths, "microbatches": its.microbatches, **options}
    options |= {"samples": its.samples, "free_batch": its.free_batch}
    return Case(f"{refused}: {way}", WAYS_OUT, build, imports=imports, **options)


HF = ("transformers",)
CASES: tuple[Case, ...] = (
    case("reformer", "the encoder as operators", reformer, HF),
    case("fsmt", "decoder_attention_mask", REFUSED["fsmt"].build, HF, draw=with_decoder_mask),
    case(
        "clip, return_loss",
        "the loss in loss_fn",
        REFUSED["clip"].build,
        HF,
        draw=REFUSED["clip"].draw,
        loss=contrastive,
    ),
    case("llava", "images in one piece", llava, HF),
    case("idefics3", "a method without decisions", idefics3, HF),
    case(
        "time_series_transformer",
        "set_default_validate_args(False)",
        without_checks("time_series_transformer"),
        HF,
    ),
    case("informer", "set_default_validate_args(False)", without_checks("informer"), HF),
    case(
        "GraphUNet",
        "nn.Sequential",
        graph_unet,
        ("torch_geometric",),
        draw=lambda samples, length: (other_libraries.graph(samples, length),),
    ),
    case("prefix tuning of llama", "a prefix in each block", prefix_tuned, ("transformers", "peft")),
)
