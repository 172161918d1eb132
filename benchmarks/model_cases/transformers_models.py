"""Models of transformers, small and with random weights: for text, images, sound, time series, and several of these."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model_cases.cases import LENGTH, Case, Draw, integers, keywords, normal, numbers, ones

__all__ = ["CASES", "GPT", "SIZES", "T5", "masked", "paired", "tokens", "transformer"]

Sizes = dict[str, Any]


def each(names: str, value: Any) -> dict[str, Any]:
    """Gives all of `names`, which are words, the same value."""
    return dict.fromkeys(names.split(), value)


# Language models

TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
DEFAULT: Sizes = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **TOKENS,
)  # fmt: skip
SIZES = DEFAULT | dict(use_cache=False)
GPT: Sizes = dict(
    vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64, n_inner=48, use_cache=False, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
EXPERTS: Sizes = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = SIZES | EXPERTS
ROUTED_AS_DEEPSEEK = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
DEEPSEEK = SIZES | ROUTED_AS_DEEPSEEK | dict(
    num_experts_per_tok=2, moe_intermediate_size=24, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1, num_key_value_heads=4,
)  # fmt: skip
MAMBA: Sizes = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=4, state_size=4, conv_kernel=4, expand=2, use_cache=False,
    time_step_rank=4, **TOKENS,
)  # fmt: skip
STATE_SPACE = SIZES | dict(mamba_d_state=4, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_chunk_size=4)

DECODERS: dict[str, Sizes] = {
    "gpt2": GPT,
    "openai-gpt": GPT,
    "ctrl": GPT | dict(dff=48),
    "gptj": GPT | dict(rotary_dim=4),
    "codegen": GPT | dict(rotary_dim=4),
    "gpt_bigcode": GPT,
    "gpt_neo": SIZES | dict(num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4),
    "bloom": dict(vocab_size=99, hidden_size=32, n_layer=4, n_head=4, use_cache=False),
    "mpt": dict(vocab_size=99, d_model=32, n_layers=4, n_heads=4, max_seq_len=64, use_cache=False),
    "opt": SIZES | dict(ffn_dim=48, word_embed_proj_dim=32),
    "xglm": dict(vocab_size=99, d_model=32, ffn_dim=48, num_layers=4, attention_heads=4, use_cache=False),
    "biogpt": SIZES,
    "gpt_neox": SIZES,
    "falcon": {name: value for name, value in SIZES.items() if name != "head_dim"}
    | dict(num_kv_heads=2, new_decoder_architecture=True),
    **each(
        "llama mistral qwen2 qwen3 gemma phi phi3 olmo olmo2 stablelm starcoder2 cohere cohere2 granite glm glm4 "
        "persimmon helium arcee apertus ernie4_5 diffllama hunyuan_v1_dense seed_oss nemotron bitnet nanochat exaone4 "
        "smollm3",
        SIZES,
    ),
    "gemma2": SIZES | dict(sliding_window=4, query_pre_attn_scalar=8),
    "gemma3_text": SIZES | dict(sliding_window=4, query_pre_attn_scalar=8),
    "olmo3": SIZES | dict(sliding_window=4),
    "mixtral": ROUTED,
    "qwen2_moe": ROUTED | dict(shared_expert_intermediate_size=24),
    "qwen3_moe": ROUTED,
    "olmoe": ROUTED,
    "phimoe": ROUTED,
    "granitemoe": ROUTED,
    "granitemoeshared": ROUTED | dict(shared_intermediate_size=24),
    "jetmoe": ROUTED | dict(kv_channels=8),
    "gpt_oss": ROUTED | dict(sliding_window=4),
    "glm4_moe": ROUTED | ROUTED_AS_DEEPSEEK,
    "dots1": ROUTED | ROUTED_AS_DEEPSEEK | dict(n_group=1, topk_group=1),
    "ernie4_5_moe": ROUTED | dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA | dict(num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "rwkv": dict(
        vocab_size=99, hidden_size=32, num_hidden_layers=4, intermediate_size=48, context_length=64, use_cache=False
    ),
    "recurrent_gemma": SIZES | dict(lru_width=32, attention_window_size=8),
    "jamba": ROUTED | dict(
        mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, use_mamba_kernels=False,
    ),
    "bamba": STATE_SPACE | dict(attn_layer_indices=[1]),
    "zamba2": SIZES | dict(
        mamba_d_state=4, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1, chunk_size=4, num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], attention_head_dim=16, num_key_value_heads=4,
        use_mem_rope=False,
    ),
    "falcon_h1": STATE_SPACE | dict(mamba_d_ssm=64),
    "lfm2": SIZES | dict(layer_types=["conv", "full_attention", "conv", "full_attention"], full_attn_idxs=[1, 3]),
    "minimax": ROUTED | dict(block_size=4),
    "qwen3_next": ROUTED | dict(
        shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "xlstm": dict(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_blocks=3, num_heads=4, chunk_size=4, use_cache=False
    ),
    "modernbert-decoder": SIZES,
    "trocr": dict(
        vocab_size=99, d_model=32, decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=48, use_cache=False
    ),
    "bert-generation": SIZES,
}  # fmt: skip

WINDOW = DEFAULT | dict(sliding_window=4)
AS_THEY_COME: dict[str, Sizes] = {
    "llama": DEFAULT,
    **each("mistral ministral ministral3 cohere2 olmo3 exaone4 phi3 starcoder2 granite_swa cwm", WINDOW),
    **dict.fromkeys(("gemma2", "gemma3_text", "vaultgemma"), WINDOW | dict(query_pre_attn_scalar=8)),
    "gemma3n_text": WINDOW | dict(
        laurel_rank=4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=99, num_kv_shared_layers=0,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_text": WINDOW | dict(hidden_size_per_layer_input=0, global_head_dim=8, num_kv_shared_layers=0),
    "smollm3": WINDOW | dict(use_sliding_window=True),
    **dict.fromkeys(("qwen2", "qwen3"), WINDOW | dict(use_sliding_window=True, max_window_layers=1)),
    "modernbert-decoder": DEFAULT | dict(local_attention=4),
    **each("gpt_oss mixtral granitemoe_swa cohere2_moe laguna mellum mimo_v2_flash", WINDOW | EXPERTS
    ),
    "afmoe": WINDOW | EXPERTS | dict(num_shared_experts=1, num_dense_layers=1),
    "exaone_moe": WINDOW | EXPERTS | dict(n_group=1, topk_group=1),
    **dict.fromkeys(("lfm3", "hyperclovax", "apertus1p5_text", "jais2", "dory", "hrm_text"), DEFAULT),
    **dict.fromkeys(("flex_olmo", "minimax_m2"), DEFAULT | EXPERTS),
    "solar_open": DEFAULT | EXPERTS | dict(n_group=1, topk_group=1),
    "aria_text": DEFAULT | dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
}  # fmt: skip
"""Sliding windows and families of later releases, with `use_cache` as the configuration has it."""

RELATIVE = SIZES | dict(relative_attention=True, pos_att_type=["c2p", "p2c"])
ENCODERS: dict[str, Sizes] = {
    **each(
        "bert roberta camembert electra mpnet megatron-bert rembert xlm-roberta ernie roberta-prelayernorm "
        "data2vec-text layoutlm nystromformer roformer eurobert xlm-roberta-xl", SIZES,
    ),
    "albert": SIZES | dict(embedding_size=16),
    "distilbert": dict(vocab_size=99, dim=32, n_layers=4, n_heads=4, hidden_dim=48),
    "deberta": RELATIVE,
    "deberta-v2": RELATIVE | dict(position_buckets=4),
    "mobilebert": SIZES | dict(embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16),
    "squeezebert": SIZES | dict(embedding_size=32),
    "convbert": SIZES | dict(embedding_size=32),
    "fnet": SIZES,
    "funnel": dict(vocab_size=99, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1, 2]),
    "longformer": SIZES | dict(attention_window=4),
    "big_bird": SIZES | dict(attention_type="original_full"),
    "ibert": SIZES,
    "modernbert": SIZES | dict(local_attention=4),
    "esm": SIZES | dict(mask_token_id=3),
    "flaubert": dict(vocab_size=99, emb_dim=32, n_layers=4, n_heads=4),
    "xlm": dict(vocab_size=99, emb_dim=32, n_layers=4, n_heads=4),
    "reformer": dict(
        vocab_size=99, hidden_size=32, attention_head_size=8, num_attention_heads=4, feed_forward_size=48,
        attn_layers=["local"] * 4, axial_pos_embds=False, local_attn_chunk_length=4, is_decoder=False,
        max_position_embeddings=64, use_cache=False,
    ),
    "luke": SIZES | dict(entity_vocab_size=9, entity_emb_size=8),
    "lilt": SIZES | dict(hidden_size=24, channel_shrink_ratio=2),
    "canine": SIZES
    | dict(num_hash_functions=2, num_hash_buckets=16, local_transformer_stride=4, downsampling_rate=2),
    "xlnet": dict(vocab_size=99, d_model=32, n_layer=4, n_head=4, d_inner=48),
    "splinter": SIZES,
    "tapas": SIZES | dict(type_vocab_sizes=[3, 256, 256, 2, 256, 256, 10]),
    "nomic_bert": SIZES,
    "xmod": SIZES | dict(languages=["en_XX"], default_language="en_XX"),
    "markuplm": SIZES | dict(max_depth=5),
}  # fmt: skip

ENCODER_DECODER = dict(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, use_cache=False)
BART: Sizes = ENCODER_DECODER | TOKENS | dict(
    vocab_size=99, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=4, decoder_start_token_id=1,
)  # fmt: skip
T5: Sizes = dict(
    vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4, pad_token_id=0,
    eos_token_id=1, decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
SEQ2SEQ: dict[str, Sizes] = {
    **each("bart mbart pegasus blenderbot blenderbot-small m2m_100 marian plbart mvp", BART),
    "pegasus_x": BART | dict(num_global_tokens=2, block_size=4),
    "bigbird_pegasus": BART | dict(attention_type="original_full"),
    "led": BART | dict(attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "fsmt": dict(src_vocab_size=99, tgt_vocab_size=99)
    | {name: value for name, value in BART.items() if name != "vocab_size"}
    | dict(langs=["en", "de"]),
    "prophetnet": ENCODER_DECODER | dict(
        vocab_size=99, hidden_size=32, num_encoder_layers=3, num_decoder_layers=3, num_encoder_attention_heads=4,
        num_decoder_attention_heads=4, ngram=2,
    ),
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
    "longt5": T5 | dict(local_radius=4, encoder_attention_type="local"),
    "switch_transformers": T5
    | dict(num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8),
    "nllb-moe": BART | dict(num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=8),
}  # fmt: skip
LENGTHS: dict[str, tuple[int, ...]] = {
    "canine": (16, 24),
    **dict.fromkeys(("longformer", "led", "reformer", "pegasus_x"), (8, 12)),
}

# Images

PART: Sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
VIT = PART | dict(num_hidden_layers=4, image_size=32, patch_size=8)
WIDTHS: Sizes = dict(hidden_sizes=[8, 8, 16, 16])
CONVOLUTIONS = WIDTHS | dict(depths=[1, 1, 2, 1])
PYRAMID = WIDTHS | dict(depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2])
SWIN: Sizes = dict(image_size=32, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4)
IMAGES: dict[str, Sizes] = {
    **each("vit beit dinov2 vit_msn data2vec-vision ijepa dinov2_with_registers", VIT),
    "vitdet": VIT | dict(window_block_indices=[0, 2], window_size=2, residual_block_indices=[]),
    "vit_mae": VIT | dict(mask_ratio=0.0),
    "yolos": VIT | dict(image_size=[32, 32], num_detection_tokens=4),
    "siglip_vision_model": VIT,
    "clip_vision_model": VIT,
    # By default it draws how far apart its positions are.
    "dinov3_vit": VIT | dict(pos_embed_rescale=None),
    "hiera": dict(
        embed_dim=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 2], image_size=[64, 64], patch_stride=[4, 4],
        masked_unit_size=[8, 8],
    ),
    "convnext": CONVOLUTIONS,
    "convnextv2": CONVOLUTIONS,
    "resnet": CONVOLUTIONS | dict(embedding_size=8, layer_type="basic"),
    "regnet": CONVOLUTIONS | dict(embedding_size=8, groups_width=8),
    "bit": dict(embedding_size=32, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 2, 1], num_groups=8),
    "mobilenet_v1": dict(depth_multiplier=0.25, min_depth=4),
    "mobilenet_v2": dict(depth_multiplier=0.25, min_depth=4),
    "mobilevit": dict(
        hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2, image_size=64
    ),
    "mobilevitv2": dict(image_size=64, width_multiplier=0.25),
    "poolformer": CONVOLUTIONS,
    "pvt": PYRAMID | dict(image_size=64),
    "pvt_v2": PYRAMID | dict(image_size=64),
    "segformer": PYRAMID | dict(decoder_hidden_size=16),
    "focalnet": dict(
        image_size=32, embed_dim=8, depths=[1, 1, 1], hidden_sizes=[8, 16, 16], focal_levels=[1, 1, 1],
        focal_windows=[3, 3, 3],
    ),
    "swin": SWIN,
    "swinv2": SWIN,
    "swiftformer": dict(depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16], image_size=64),
    "dpt": VIT | dict(
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, backbone_out_indices=[0, 1, 2, 3], head_in_index=-1
    ),
    "glpn": PYRAMID | dict(decoder_hidden_size=8),
    "swin2sr": SWIN | dict(embed_dim=16, num_heads=[2, 2]),
}  # fmt: skip

HEADS = {
    **each("lilt canine xlnet splinter tapas markuplm", "AutoModel"),
    **each("vit_mae yolos siglip_vision_model clip_vision_model dinov3_vit", "AutoModel"),
    "vitdet": "AutoBackbone",
    "segformer": "AutoModelForSemanticSegmentation",
    "dpt": "AutoModelForDepthEstimation",
    "glpn": "AutoModelForDepthEstimation",
    "swin2sr": "AutoModelForImageToImage",
}
"""Models with another class than those of the same table."""

# Sound, time series, and several kinds of inputs

SOUND = PART | dict(
    num_hidden_layers=4, conv_dim=(16, 16, 16), conv_stride=(4, 2, 2), conv_kernel=(8, 3, 3),
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, feat_extract_norm="layer", mask_time_prob=0.0,
    vocab_size=30, apply_spec_augment=False, num_feat_extract_layers=3,
)  # fmt: skip
SPEC_AUGMENT = SOUND | dict(apply_spec_augment=True, mask_time_prob=0.3, mask_time_length=2)
WHISPER = BART | dict(num_mel_bins=16, max_source_positions=16, max_target_positions=32)
SPEECH = BART | dict(input_feat_per_channel=16, max_source_positions=64, max_target_positions=64, conv_channels=16)
SPECTROGRAM = PART | dict(
    num_hidden_layers=4, patch_size=4, max_length=16, num_mel_bins=16, frequency_stride=4, time_stride=4
)
ENCODEC: Sizes = dict(
    num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=8, upsampling_ratios=[2, 2], target_bandwidths=[1.5],
    sampling_rate=800, num_lstm_layers=1, normalize=False,
)  # fmt: skip
TEXT_PART = PART | dict(num_hidden_layers=3, vocab_size=99, max_position_embeddings=64, projection_dim=16)
IMAGE_PART = PART | dict(num_hidden_layers=3, image_size=32, patch_size=8, projection_dim=16)
SMALL_IMAGE_PART = IMAGE_PART | dict(image_size=16)
LLAMA = PART | dict(num_hidden_layers=3, vocab_size=99, num_key_value_heads=2, max_position_embeddings=64)
SECTIONS = dict(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
QWEN_IMAGE: Sizes = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4, mlp_ratio=2)
PLACE = dict(image_token_id=98, image_token_index=98)
CLIP: Sizes = dict(text_config=("CLIPTextConfig", TEXT_PART), vision_config=("CLIPVisionConfig", IMAGE_PART))
DETR = dict(
    use_timm_backbone=False, use_pretrained_backbone=False, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5,
    backbone=None,
)  # fmt: skip
BACKBONE = WIDTHS | dict(embedding_size=8, depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"])
FRAMES = VIT | dict(image_size=16, num_frames=4)
PATCHES: Sizes = dict(
    num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, prediction_length=4, loss="mse"
)
SERIES: Sizes = dict(
    prediction_length=4, context_length=8, lags_sequence=[1, 2, 3], num_time_features=1, d_model=16, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
)  # fmt: skip
DECISIONS: Sizes = dict(state_dim=5, act_dim=2, hidden_size=32, n_layer=3, n_head=4, max_ep_len=20)


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


def by_class(kind: str, sizes: Mapping[str, Any], **parts: tuple[str, Mapping[str, Any]]) -> Callable[[], nn.Module]:
    """Makes a model of the class `kind`. `parts`: the classes and sizes of configurations in its configuration."""

    def build() -> nn.Module:
        import transformers

        inner = {name: getattr(transformers, config)(**values) for name, (config, values) in parts.items()}
        class_ = getattr(transformers, kind)
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


def automatic(auto: str, draw: Draw, models: Mapping[str, Sizes], **options: Any) -> list[Case]:
    return [
        case(name, transformer(HEADS.get(name, auto), name, sizes), draw, *LENGTHS.get(name, ()), **options)
        for name, sizes in models.items()
    ]


DRAWS = dict(draws=True, microbatches=1)
CASES: tuple[Case, ...] = (
    *automatic("AutoModelForCausalLM", tokens, DECODERS),
    *(case(f"{name}, as it comes", decoder(name, sizes), tokens) for name, sizes in AS_THEY_COME.items()),
    case("llama, padding mask", decoder("llama", SIZES), masked),
    case("gpt2, padding mask", decoder("gpt2", GPT), masked),
    *automatic("AutoModelForMaskedLM", masked, ENCODERS),
    *(
        # The forward of two routers casts the weights to float32.
        replace(each, float64=each.name not in ("switch_transformers", "nllb-moe"))
        for each in automatic("AutoModelForSeq2SeqLM", paired, SEQ2SEQ)
    ),
    *(
        case(
            name,
            transformer(HEADS.get(name, "AutoModelForImageClassification"), name, sizes),
            keywords(pixel_values=normal(3, side_of(sizes), side_of(sizes))),
            8,
            # It draws the order of its patches.
            **(DRAWS if name == "vit_mae" else {}),
        )
        for name, sizes in IMAGES.items()
    ),
    *(
        case(name, transformer("AutoModel", name, SOUND), sound, 400, 560)
        for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "sew", "data2vec-audio")
    ),
    # It keeps a table of sines in float32, of which one that is computed for another length differs in the last bits.
    case("wav2vec2-conformer", transformer("AutoModel", "wav2vec2-conformer", SOUND), sound, 400),
    case("wav2vec2, SpecAugment", by_class("Wav2Vec2Model", SPEC_AUGMENT), sound, 400, **DRAWS),
    case("whisper", by_class("WhisperForConditionalGeneration", WHISPER),
         keywords(input_features=spectrum, decoder_input_ids=target), 16),
    case("speech_to_text", by_class("Speech2TextForConditionalGeneration", SPEECH),
         keywords(input_features=longer_spectrum, decoder_input_ids=target)),
    case("audio-spectrogram-transformer", by_class("ASTForAudioClassification", SPECTROGRAM),
         keywords(input_values=normal(16, 16)), 8),
    case("encodec", by_class("EncodecModel", ENCODEC), keywords(input_values=normal(1, LENGTH)), 64),
    case("clip", by_class("CLIPModel", dict(projection_dim=16), **CLIP), with_image),
    case("clip, return_loss", by_class("CLIPModel", dict(projection_dim=16), **CLIP),
         keywords(with_image, return_loss=lambda samples, length: True)),
    case("siglip", by_class("SiglipModel", {}, text_config=("SiglipTextConfig", TEXT_PART),
                            vision_config=("SiglipVisionConfig", IMAGE_PART)), with_image, 64),
    case("blip", by_class("BlipForConditionalGeneration", {},
                          text_config=("BlipTextConfig", TEXT_PART | dict(encoder_hidden_size=32)),
                          vision_config=("BlipVisionConfig", IMAGE_PART)), with_image),
    case("llava", by_class("LlavaForConditionalGeneration", PLACE | dict(vision_feature_select_strategy="default"),
                           text_config=("LlamaConfig", LLAMA), vision_config=("CLIPVisionConfig", SMALL_IMAGE_PART)),
         looking),
    case("paligemma", by_class("PaliGemmaForConditionalGeneration", PLACE | dict(projection_dim=32),
                               text_config=("GemmaConfig", LLAMA | dict(head_dim=8)),
                               vision_config=("SiglipVisionConfig", SMALL_IMAGE_PART)), looking),
    case("idefics3", by_class("Idefics3ForConditionalGeneration", dict(image_token_id=98, scale_factor=1),
                              text_config=("LlamaConfig", LLAMA),
                              vision_config=("Idefics3VisionConfig", SMALL_IMAGE_PART)),
         keywords(looking, pixel_values=normal(1, 3, 16, 16))),
    case("qwen2_vl", by_class("Qwen2VLForConditionalGeneration", dict(image_token_id=98, vision_start_token_id=97),
                              text_config=("Qwen2VLTextConfig", LLAMA | SECTIONS),
                              vision_config=("Qwen2VLVisionConfig", QWEN_IMAGE)), qwen_vl),
    # It draws which patches it keeps.
    case("vilt", by_class("ViltModel", VIT | dict(vocab_size=99)), with_image, **DRAWS),
    case("visual_bert", by_class("VisualBertModel", SIZES | dict(visual_embedding_dim=8)),
         keywords(masked, visual_embeds=normal(3, 8), visual_attention_mask=ones(3))),
    case("lxmert", by_class("LxmertModel", SIZES | dict(l_layers=2, x_layers=2, r_layers=2, visual_feat_dim=8)),
         keywords(masked, visual_feats=normal(3, 8), visual_pos=numbers(3, 4))),
    case("git", by_class("GitForCausalLM", SIZES | dict(vision_config=IMAGE_PART)), with_image),
    case("flava", by_class("FlavaTextModel", SIZES), masked),
    case("encoder-decoder of BERTs",
         by_class("EncoderDecoderModel", dict(decoder_start_token_id=1, pad_token_id=0), encoder=("BertConfig", SIZES),
                  decoder=("BertConfig", SIZES | dict(is_decoder=True, add_cross_attention=True))), paired),
    case("detr", by_class("DetrModel", DETR, backbone_config=("ResNetConfig", BACKBONE)),
         keywords(pixel_values=normal(3, 64, 64)), 8),
    case("timesformer", by_class("TimesformerModel", FRAMES), video, 8),
    case("videomae", by_class("VideoMAEModel", FRAMES), video, 8),
    case("vivit", by_class("VivitModel", FRAMES | dict(tubelet_size=[2, 8, 8])), video, 8),
    case("patchtst", by_class("PatchTSTForPrediction",
                              PATCHES | dict(num_hidden_layers=3, num_attention_heads=2, ffn_dim=16)), series, 8),
    case("patchtsmixer", by_class("PatchTSMixerForPrediction", PATCHES | dict(num_layers=3)), series, 8),
    case("time_series_transformer", by_class("TimeSeriesTransformerForPrediction", SERIES), forecast, 8),
    case("autoformer", by_class("AutoformerForPrediction", SERIES), forecast, 8),
    case("informer", by_class("InformerForPrediction", SERIES), forecast, 8),
    case("decision_transformer", by_class("DecisionTransformerModel", DECISIONS), decisions),
    case("gpt2, gradient checkpointing",
         decoder("gpt2", dict(vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64, use_cache=False),
                 "gradient_checkpointing_enable"), masked),
    case("llama, gradient checkpointing", decoder("llama", SIZES, "gradient_checkpointing_enable"), masked),
    case("llama, eager attention", decoder("llama", SIZES, "set_attn_implementation", "eager"), masked),
    case("llama, tied", decoder("llama", SIZES | dict(tie_word_embeddings=True)), masked),
    case("mixtral, router loss", decoder("mixtral", SIZES | dict(num_local_experts=4, output_router_logits=True)),
         masked),
    case("t5, shared layers",
         transformer("AutoModelForSeq2SeqLM", "t5", T5 | dict(feed_forward_proj="gated-gelu")), paired),
)  # fmt: skip
