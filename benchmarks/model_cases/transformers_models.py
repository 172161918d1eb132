"""Models of transformers, small and with random weights: for text, images, sound, time series, and several of these.

Their sizes are in transformers_models.yaml.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from model_cases.cases import LENGTH, Case, Draw, integers, keywords, normal, numbers, ones

__all__ = ["CASES", "GPT", "SIZES", "T5", "decoder", "masked", "paired", "tokens", "transformer"]

TABLES: dict[str, dict[str, Any]] = {
    table: {
        name: value for names, value in rows.items() for name in ([names] if table == "by_class" else names.split())
    }
    for table, rows in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
SIZES, GPT, T5, SOUND = (TABLES["shared"][name] for name in ("sizes", "gpt", "t5", "sound"))


def quiet(config: Any) -> Any:
    """`config` without dropout, in all of its parts."""
    for name, value in list(vars(config).items()):
        if (
            "drop" in name or name in ("attn_pdrop", "jitter_noise", "router_jitter_noise", "apply_spec_augment")
        ) and isinstance(value, float | bool):
            if name not in ("apply_spec_augment",) and isinstance(value, bool):
                continue
            setattr(config, name, False if isinstance(value, bool) else 0.0)
        elif hasattr(value, "to_dict"):
            quiet(value)
    return config


def transformer(
    auto: str, kind: str, sizes: Mapping[str, Any], change: str = "", *args: Any
) -> Callable[[], nn.Module]:
    """Makes the model of a library's own class for `auto`, and calls its method `change`, if one is named."""

    def build() -> nn.Module:
        import transformers

        config = quiet(transformers.AutoConfig.for_model(kind, **sizes))
        made: nn.Module = getattr(transformers, auto).from_config(config)
        if change:
            getattr(made, change)(*args)
        return made

    return build


def by_class(name: str) -> Callable[[], nn.Module]:
    """Makes a model of the class, the sizes, and the configurations in its configuration, that the table has."""

    def build() -> nn.Module:
        import transformers

        parts = dict(TABLES["by_class"][name])
        class_, sizes = getattr(transformers, parts.pop("class")), parts.pop("sizes", {})
        inner = {part: getattr(transformers, config)(**values) for part, (config, values) in parts.items()}
        made: nn.Module = class_(quiet(class_.config_class(**sizes, **inner)))
        return made

    return build


def decoder(name: str, sizes: Mapping[str, Any], *change: Any) -> Callable[[], nn.Module]:
    return transformer("AutoModelForCausalLM", name, sizes, *change)


def mask(samples: int, length: int) -> Tensor:
    """A padding mask: the first sample is shorter by two."""
    found = torch.ones(samples, length, dtype=torch.long)
    found[0, -2:] = 0
    return found


def target(samples: int, length: int) -> Tensor:
    return torch.randint(3, 99, (samples, length - 2))


tokens = keywords(input_ids=integers(3, 99, LENGTH))
masked = keywords(tokens, attention_mask=mask)
paired = keywords(masked, decoder_input_ids=target)
with_image = keywords(masked, pixel_values=normal(3, 32, 32))


def words_and_places(samples: int, length: int) -> Tensor:
    """Words with places for the four pieces of an image."""
    words = torch.randint(3, 90, (samples, length))
    words[:, 1:5] = 98
    return words


looking = keywords(input_ids=words_and_places, pixel_values=normal(3, 16, 16))


def qwen_vl(samples: int, length: int) -> dict[str, Tensor]:
    words = torch.randint(3, 90, (samples, length))
    words[:, 1] = 97
    words[:, 2:6] = 98
    return {
        "input_ids": words,
        "pixel_values": torch.randn(samples * 16, 3 * 2 * 4 * 4),
        "mm_token_type_ids": (words == 98).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(samples, 3).clone(),
    }


def spectrum(samples: int, length: int) -> Tensor:
    return torch.randn(samples, 16, 2 * length)


def longer_spectrum(samples: int, length: int) -> Tensor:
    return torch.randn(samples, 4 * length, 16)


sound = keywords(input_values=normal(LENGTH))
video = keywords(pixel_values=normal(4, 3, 16, 16))
series = keywords(past_values=normal(16, 2))
forecast = keywords(
    past_values=normal(11),
    past_time_features=normal(11, 1),
    past_observed_mask=ones(11),
    future_values=normal(4),
    future_time_features=normal(4, 1),
)
decisions = keywords(
    states=normal(LENGTH, 5),
    actions=normal(LENGTH, 2),
    rewards=normal(LENGTH, 1),
    returns_to_go=normal(LENGTH, 1),
    timesteps=lambda samples, length: torch.arange(length).expand(samples, -1).clone(),
    attention_mask=ones(LENGTH),
)


def side_of(sizes: Mapping[str, Any]) -> int:
    found = sizes.get("image_size", 32)
    return int(found[0] if isinstance(found, list) else found)


def case(name: str, build: Callable[[], nn.Module], draw: Draw, *lengths: int, **options: Any) -> Case:
    return Case(name, "transformers", build, draw, **options | ({"lengths": lengths} if lengths else {}))


def of_class(name: str, draw: Draw, *lengths: int, **options: Any) -> Case:
    return case(name, by_class(name), draw, *lengths, **options)


def automatic(auto: str, draw: Draw, table: str) -> list[Case]:
    return [
        case(name, transformer(TABLES["heads"].get(name, auto), name, sizes), draw, *TABLES["lengths"].get(name, ()))
        for name, sizes in TABLES[table].items()
    ]


DRAWS = dict(draws=True, microbatches=1)
CASES: tuple[Case, ...] = (
    *automatic("AutoModelForCausalLM", tokens, "decoders"),
    *(case(f"{name}, as it comes", decoder(name, sizes), tokens) for name, sizes in TABLES["as_they_come"].items()),
    case("llama, padding mask", decoder("llama", SIZES), masked),
    case("gpt2, padding mask", decoder("gpt2", GPT), masked),
    *automatic("AutoModelForMaskedLM", masked, "encoders"),
    *(
        # The forward of two routers casts the weights to float32.
        replace(each, float64=each.name not in ("switch_transformers", "nllb-moe"))
        for each in automatic("AutoModelForSeq2SeqLM", paired, "encoders_with_decoders")
    ),
    *(
        case(
            name,
            transformer(TABLES["heads"].get(name, "AutoModelForImageClassification"), name, sizes),
            keywords(pixel_values=normal(3, side_of(sizes), side_of(sizes))),
            8,
            # It draws the order of its patches.
            **(DRAWS if name == "vit_mae" else {}),
        )
        for name, sizes in TABLES["images"].items()
    ),
    *(
        case(name, transformer("AutoModel", name, SOUND), sound, 400, 560)
        for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "sew", "data2vec-audio")
    ),
    # It keeps a table of sines in float32, of which one that is computed for another length differs in the last bits.
    case("wav2vec2-conformer", transformer("AutoModel", "wav2vec2-conformer", SOUND), sound, 400),
    of_class("wav2vec2, SpecAugment", sound, 400, **DRAWS),
    of_class("whisper", keywords(input_features=spectrum, decoder_input_ids=target), 16),
    of_class("speech_to_text", keywords(input_features=longer_spectrum, decoder_input_ids=target)),
    of_class("audio-spectrogram-transformer", keywords(input_values=normal(16, 16)), 8),
    of_class("encodec", keywords(input_values=normal(1, LENGTH)), 64),
    of_class("clip", with_image),
    of_class("clip, return_loss", keywords(with_image, return_loss=lambda samples, length: True)),
    of_class("siglip", with_image, 64),
    of_class("blip", with_image),
    of_class("llava", looking),
    of_class("paligemma", looking),
    of_class("idefics3", keywords(looking, pixel_values=normal(1, 3, 16, 16))),
    of_class("qwen2_vl", qwen_vl),
    # It draws which patches it keeps.
    of_class("vilt", with_image, **DRAWS),
    of_class("visual_bert", keywords(masked, visual_embeds=normal(3, 8), visual_attention_mask=ones(3))),
    of_class("lxmert", keywords(masked, visual_feats=normal(3, 8), visual_pos=numbers(3, 4))),
    of_class("git", with_image),
    of_class("flava", masked),
    of_class("encoder-decoder of BERTs", paired),
    of_class("detr", keywords(pixel_values=normal(3, 64, 64)), 8),
    *(of_class(name, video, 8) for name in ("timesformer", "videomae", "vivit")),
    *(of_class(name, series, 8) for name in ("patchtst", "patchtsmixer")),
    *(of_class(name, forecast, 8) for name in ("time_series_transformer", "autoformer", "informer")),
    of_class("decision_transformer", decisions),
    case(
        "gpt2, gradient checkpointing",
        decoder("gpt2", TABLES["shared"]["gpt_checkpointed"], "gradient_checkpointing_enable"),
        masked,
    ),
    case("llama, gradient checkpointing", decoder("llama", SIZES, "gradient_checkpointing_enable"), masked),
    case("llama, eager attention", decoder("llama", SIZES, "set_attn_implementation", "eager"), masked),
    case("llama, tied", decoder("llama", SIZES | dict(tie_word_embeddings=True)), masked),
    case(
        "mixtral, router loss", decoder("mixtral", SIZES | dict(num_local_experts=4, output_router_logits=True)), masked
    ),
    case(
        "t5, shared layers",
        transformer("AutoModelForSeq2SeqLM", "t5", T5 | dict(feed_forward_proj="gated-gelu")),
        paired,
    ),
)
