"""Language models of transformers, small and with random weights: decoders, encoders, and both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_cases.cases import Case

__all__ = ["CASES", "quiet", "tokens", "transformer"]

SIZES = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
GPT = dict(
    vocab_size=99,
    n_embd=32,
    n_layer=4,
    n_head=4,
    n_positions=64,
    n_inner=48,
    use_cache=False,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
DEEPSEEK = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    kv_lora_rank=8,
    q_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    num_key_value_heads=4,
)
MAMBA = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=4,
    state_size=4,
    conv_kernel=4,
    expand=2,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    time_step_rank=4,
)

DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "openai-gpt": GPT,
    "ctrl": {**GPT, "dff": 48},
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_bigcode": GPT,
    "gpt_neo": {
        **SIZES,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
    },
    "bloom": {"vocab_size": 99, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False},
    "mpt": {"vocab_size": 99, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, "use_cache": False},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"vocab_size": 99, "d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4, "use_cache": False},
    "biogpt": SIZES,
    "gpt_neox": SIZES,
    "falcon": {
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    **{
        name: SIZES
        for name in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "phi",
            "phi3",
            "olmo",
            "olmo2",
            "stablelm",
            "starcoder2",
            "cohere",
            "cohere2",
            "granite",
            "glm",
            "glm4",
            "persimmon",
            "helium",
            "arcee",
            "apertus",
            "ernie4_5",
            "diffllama",
            "hunyuan_v1_dense",
            "seed_oss",
            "nemotron",
            "bitnet",
            "nanochat",
            "exaone4",
            "smollm3",
        )
    },
    "gemma2": {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "olmo3": {**SIZES, "sliding_window": 4},
    "mixtral": {**SIZES, **EXPERTS},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "olmoe": {**SIZES, **EXPERTS},
    "phimoe": {**SIZES, **EXPERTS},
    "granitemoe": {**SIZES, **EXPERTS},
    "granitemoeshared": {**SIZES, **EXPERTS, "shared_intermediate_size": 24},
    "jetmoe": {**SIZES, **EXPERTS, "kv_channels": 8},
    "gpt_oss": {**SIZES, **EXPERTS, "sliding_window": 4},
    "glm4_moe": {**SIZES, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots1": {
        **SIZES,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5_moe": {**SIZES, **EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "deepseek_v2": {**SIZES, **DEEPSEEK},
    "deepseek_v3": {**SIZES, **DEEPSEEK},
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "rwkv": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "context_length": 64,
        "use_cache": False,
    },
    "recurrent_gemma": {**SIZES, "lru_width": 32, "attention_window_size": 8},
    "jamba": {
        **SIZES,
        **EXPERTS,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {
        **SIZES,
        "mamba_d_state": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "zamba2": {
        **SIZES,
        "mamba_d_state": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "use_mem_rope": False,
    },
    "falcon_h1": {
        **SIZES,
        "mamba_d_state": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "full_attn_idxs": [1, 3]},
    "minimax": {**SIZES, **EXPERTS, "block_size": 4},
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "xlstm": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_blocks": 3,
        "num_heads": 4,
        "chunk_size": 4,
        "use_cache": False,
    },
    "modernbert-decoder": SIZES,
    "trocr": {
        "vocab_size": 99,
        "d_model": 32,
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "use_cache": False,
    },
    "bert-generation": SIZES,
}

DEFAULT = {name: value for name, value in SIZES.items() if name != "use_cache"}
WINDOW = {**DEFAULT, "sliding_window": 4}
AS_THEY_COME: dict[str, dict[str, Any]] = {
    "llama": DEFAULT,
    **{
        name: WINDOW
        for name in (
            "mistral",
            "ministral",
            "ministral3",
            "cohere2",
            "olmo3",
            "exaone4",
            "phi3",
            "starcoder2",
            "granite_swa",
            "cwm",
        )
    },
    **{
        name: {**WINDOW, "query_pre_attn_scalar": 8}
        for name in (
            "gemma2",
            "gemma3_text",
            "vaultgemma",
        )
    },
    "gemma3n_text": {
        **WINDOW,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {**WINDOW, "hidden_size_per_layer_input": 0, "global_head_dim": 8, "num_kv_shared_layers": 0},
    "smollm3": {**WINDOW, "use_sliding_window": True},
    **{name: {**WINDOW, "use_sliding_window": True, "max_window_layers": 1} for name in ("qwen2", "qwen3")},
    "modernbert-decoder": {**DEFAULT, "local_attention": 4},
    **{
        name: {**WINDOW, **EXPERTS}
        for name in (
            "gpt_oss",
            "mixtral",
            "granitemoe_swa",
            "cohere2_moe",
            "laguna",
            "mellum",
            "mimo_v2_flash",
        )
    },
    "afmoe": {**WINDOW, **EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1},
    "exaone_moe": {**WINDOW, **EXPERTS, "n_group": 1, "topk_group": 1},
    **{name: DEFAULT for name in ("lfm3", "hyperclovax", "apertus1p5_text", "jais2", "dory", "hrm_text")},
    **{name: {**DEFAULT, **EXPERTS} for name in ("flex_olmo", "minimax_m2")},
    "solar_open": {**DEFAULT, **EXPERTS, "n_group": 1, "topk_group": 1},
    "aria_text": {**DEFAULT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
}
"""Sliding windows and families of later releases, with `use_cache` as the configuration has it."""

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("AutoModelForMaskedLM", SIZES)
        for name in (
            "bert",
            "roberta",
            "camembert",
            "electra",
            "mpnet",
            "megatron-bert",
            "rembert",
            "xlm-roberta",
            "ernie",
            "roberta-prelayernorm",
            "data2vec-text",
            "layoutlm",
            "nystromformer",
            "roformer",
            "eurobert",
        )
    },
    "xlm-roberta-xl": ("AutoModelForMaskedLM", SIZES),
    "albert": ("AutoModelForMaskedLM", {**SIZES, "embedding_size": 16}),
    "distilbert": (
        "AutoModelForMaskedLM",
        {"vocab_size": 99, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48},
    ),
    "deberta": ("AutoModelForMaskedLM", {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": (
        "AutoModelForMaskedLM",
        {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    ),
    "mobilebert": (
        "AutoModelForMaskedLM",
        {**SIZES, "embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "squeezebert": ("AutoModelForMaskedLM", {**SIZES, "embedding_size": 32}),
    "convbert": ("AutoModelForMaskedLM", {**SIZES, "embedding_size": 32}),
    "fnet": ("AutoModelForMaskedLM", SIZES),
    "funnel": (
        "AutoModelForMaskedLM",
        {"vocab_size": 99, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1, 2]},
    ),
    "longformer": ("AutoModelForMaskedLM", {**SIZES, "attention_window": 4}),
    "big_bird": ("AutoModelForMaskedLM", {**SIZES, "attention_type": "original_full"}),
    "ibert": ("AutoModelForMaskedLM", SIZES),
    "modernbert": ("AutoModelForMaskedLM", {**SIZES, "local_attention": 4}),
    "esm": ("AutoModelForMaskedLM", {**SIZES, "mask_token_id": 3}),
    "flaubert": ("AutoModelForMaskedLM", {"vocab_size": 99, "emb_dim": 32, "n_layers": 4, "n_heads": 4}),
    "xlm": ("AutoModelForMaskedLM", {"vocab_size": 99, "emb_dim": 32, "n_layers": 4, "n_heads": 4}),
    "reformer": (
        "AutoModelForMaskedLM",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "attention_head_size": 8,
            "num_attention_heads": 4,
            "feed_forward_size": 48,
            "attn_layers": ["local", "local", "local", "local"],
            "axial_pos_embds": False,
            "local_attn_chunk_length": 4,
            "is_decoder": False,
            "max_position_embeddings": 64,
            "use_cache": False,
        },
    ),
    "luke": ("AutoModelForMaskedLM", {**SIZES, "entity_vocab_size": 9, "entity_emb_size": 8}),
    "lilt": ("AutoModel", {**SIZES, "hidden_size": 24, "channel_shrink_ratio": 2}),
    "canine": (
        "AutoModel",
        {
            **SIZES,
            "num_hash_functions": 2,
            "num_hash_buckets": 16,
            "local_transformer_stride": 4,
            "downsampling_rate": 2,
        },
    ),
    "xlnet": ("AutoModel", {"vocab_size": 99, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48}),
    "splinter": ("AutoModel", SIZES),
    "tapas": ("AutoModel", {**SIZES, "type_vocab_sizes": [3, 256, 256, 2, 256, 256, 10]}),
    "nomic_bert": ("AutoModelForMaskedLM", SIZES),
    "xmod": ("AutoModelForMaskedLM", {**SIZES, "languages": ["en_XX"], "default_language": "en_XX"}),
    "markuplm": ("AutoModel", {**SIZES, "max_depth": 5}),
}

BART = dict(
    vocab_size=99,
    d_model=32,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    use_cache=False,
)
T5 = dict(
    vocab_size=99,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=3,
    num_decoder_layers=3,
    num_heads=4,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
    use_cache=False,
)
SEQ2SEQ: dict[str, dict[str, Any]] = {
    **{
        name: BART
        for name in ("bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "plbart", "mvp")
    },
    "pegasus_x": {**BART, "num_global_tokens": 2, "block_size": 4},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "led": {
        **BART,
        "attention_window": 4,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "fsmt": {
        "src_vocab_size": 99,
        "tgt_vocab_size": 99,
        **{k: v for k, v in BART.items() if k != "vocab_size"},
        "langs": ["en", "de"],
    },
    "prophetnet": {
        "vocab_size": 99,
        "hidden_size": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_encoder_layers": 3,
        "num_decoder_layers": 3,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 64,
        "use_cache": False,
        "ngram": 2,
    },
    **{name: T5 for name in ("t5", "mt5", "umt5")},
    "longt5": {**T5, "local_radius": 4, "encoder_attention_type": "local"},
    "switch_transformers": {
        **T5,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 8,
    },
    "nllb-moe": {**BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 8},
}


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


def transformer(auto: str, kind: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    """Makes the model of a library's own class for `auto`."""

    def build() -> nn.Module:
        import transformers

        config = quiet(transformers.AutoConfig.for_model(kind, **sizes))
        made: nn.Module = getattr(transformers, auto).from_config(config)
        return made

    return build


def tokens(samples: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 99, (samples, length))}


def masked(samples: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {**tokens(samples, length), "attention_mask": mask}


def paired(samples: int, length: int) -> dict[str, Tensor]:
    return {**masked(samples, length), "decoder_input_ids": torch.randint(3, 99, (samples, length - 2))}


LENGTHS: dict[str, tuple[int, ...]] = {
    "canine": (16, 24),
    "longformer": (8, 12),
    "led": (8, 12),
    "reformer": (8, 12),
    "pegasus_x": (8, 12),
}

CASES: tuple[Case, ...] = (
    *(
        Case(name, "transformers", transformer("AutoModelForCausalLM", name, sizes), tokens)
        for name, sizes in DECODERS.items()
    ),
    *(
        Case(f"{name}, as it comes", "transformers", transformer("AutoModelForCausalLM", name, sizes), tokens)
        for name, sizes in AS_THEY_COME.items()
    ),
    Case("llama, padding mask", "transformers", transformer("AutoModelForCausalLM", "llama", SIZES), masked),
    Case("gpt2, padding mask", "transformers", transformer("AutoModelForCausalLM", "gpt2", GPT), masked),
    *(
        Case(name, "transformers", transformer(auto, name, sizes), masked, lengths=LENGTHS.get(name, (8, 11)))
        for name, (auto, sizes) in ENCODERS.items()
    ),
    *(
        Case(
            name,
            "transformers",
            transformer("AutoModelForSeq2SeqLM", name, sizes),
            paired,
            lengths=LENGTHS.get(name, (8, 11)),
            # The forward of their routers casts the weights to float32.
            float64=name not in ("switch_transformers", "nllb-moe"),
        )
        for name, sizes in SEQ2SEQ.items()
    ),
)
