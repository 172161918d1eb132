"""Models of transformers for images, sound, time series and several of these, small and with random weights."""

from typing import Any

import torch
from torch import Tensor, nn

from model_cases.cases import Case
from model_cases.transformers_text import BART, SIZES, T5, masked, paired, quiet, transformer

__all__ = ["CASES"]

VIT = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
)
IMAGE = "AutoModelForImageClassification"

VISION: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (IMAGE, VIT)
        for name in ("vit", "beit", "dinov2", "vit_msn", "data2vec-vision", "ijepa", "dinov2_with_registers")
    },
    "vitdet": ("AutoBackbone", {**VIT, "window_block_indices": [0, 2], "window_size": 2, "residual_block_indices": []}),
    "vit_mae": ("AutoModel", {**VIT, "mask_ratio": 0.0}),
    "yolos": ("AutoModel", {**VIT, "image_size": [32, 32], "num_detection_tokens": 4}),
    "siglip_vision_model": ("AutoModel", VIT),
    "clip_vision_model": ("AutoModel", VIT),
    # By default it draws how far apart its positions are.
    "dinov3_vit": ("AutoModel", {**VIT, "pos_embed_rescale": None}),
    "hiera": (
        IMAGE,
        {
            "embed_dim": 16,
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 2, 2],
            "image_size": [64, 64],
            "patch_stride": [4, 4],
            "masked_unit_size": [8, 8],
        },
    ),
    "convnext": (IMAGE, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}),
    "convnextv2": (IMAGE, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}),
    "resnet": (
        IMAGE,
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "layer_type": "basic"},
    ),
    "regnet": (IMAGE, {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "groups_width": 8}),
    "bit": (IMAGE, {"embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 2, 1], "num_groups": 8}),
    "mobilenet_v1": (IMAGE, {"depth_multiplier": 0.25, "min_depth": 4}),
    "mobilenet_v2": (IMAGE, {"depth_multiplier": 0.25, "min_depth": 4}),
    "mobilevit": (
        IMAGE,
        {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
            "image_size": 64,
        },
    ),
    "mobilevitv2": (IMAGE, {"image_size": 64, "width_multiplier": 0.25}),
    "poolformer": (IMAGE, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}),
    "pvt": (
        IMAGE,
        {"image_size": 64, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    ),
    "pvt_v2": (
        IMAGE,
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "image_size": 64},
    ),
    "segformer": (
        "AutoModelForSemanticSegmentation",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "focalnet": (
        IMAGE,
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 1, 1],
            "hidden_sizes": [8, 16, 16],
            "focal_levels": [1, 1, 1],
            "focal_windows": [3, 3, 3],
        },
    ),
    "swin": (IMAGE, {"image_size": 32, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}),
    "swinv2": (IMAGE, {"image_size": 32, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}),
    "swiftformer": (IMAGE, {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "image_size": 64}),
    "dpt": (
        "AutoModelForDepthEstimation",
        {
            **VIT,
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
            "head_in_index": -1,
        },
    ),
    "glpn": (
        "AutoModelForDepthEstimation",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
        },
    ),
    "swin2sr": (
        "AutoModelForImageToImage",
        {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
    ),
}

SOUND = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    conv_dim=(16, 16, 16),
    conv_stride=(4, 2, 2),
    conv_kernel=(8, 3, 3),
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4,
    feat_extract_norm="layer",
    mask_time_prob=0.0,
    vocab_size=30,
    apply_spec_augment=False,
    num_feat_extract_layers=3,
)


def image(side: int, channels: int = 3) -> Any:
    def draw(samples: int, length: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(samples, channels, side, side)}

    return draw


def sound(samples: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, length)}


def layered(build: Any) -> Any:
    """A model whose library has random depth in training, without it."""

    def made() -> nn.Module:
        model: nn.Module = build()
        return model

    return made


def make(kind: str, name: str, sizes: dict[str, Any], **parts: Any) -> Any:
    """A model by the names of its class and of its configuration."""

    def build() -> nn.Module:
        import transformers

        inner = {key: getattr(transformers, config)(**values) for key, (config, values) in parts.items()}
        config = quiet(getattr(transformers, name)(**sizes, **inner))
        made: nn.Module = getattr(transformers, kind)(config)
        return made

    return build


def side_of(sizes: dict[str, Any]) -> int:
    found = sizes.get("image_size", 32)
    return int(found[0] if isinstance(found, list) else found)


def features(samples: int, length: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(samples, 16, 2 * length),
        "decoder_input_ids": torch.randint(3, 99, (samples, length - 2)),
    }


def spectrum(samples: int, length: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(samples, 4 * length, 16),
        "decoder_input_ids": torch.randint(3, 99, (samples, length - 2)),
    }


def clip(samples: int, length: int) -> dict[str, Tensor]:
    return {**masked(samples, length), "pixel_values": torch.randn(samples, 3, 32, 32)}


def looking(samples: int, length: int) -> dict[str, Tensor]:
    """Words with places for the four pieces of an image."""
    words = torch.randint(3, 90, (samples, length))
    words[:, 1:5] = 98
    return {"input_ids": words, "pixel_values": torch.randn(samples, 3, 16, 16)}


def video(samples: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 4, 3, 16, 16)}


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


def series(samples: int, length: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(samples, 16, 2)}


def forecast(samples: int, length: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(samples, 11),
        "past_time_features": torch.randn(samples, 11, 1),
        "past_observed_mask": torch.ones(samples, 11),
        "future_values": torch.randn(samples, 4),
        "future_time_features": torch.randn(samples, 4, 1),
    }


TEXT_PART = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    projection_dim=16,
)
VISION_PART = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
    projection_dim=16,
)
LLAMA = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SERIES = dict(
    prediction_length=4,
    context_length=8,
    lags_sequence=[1, 2, 3],
    num_time_features=1,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
)
WHISPER = {**BART, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32}

CASES: tuple[Case, ...] = (
    *(
        Case(
            name,
            "transformers",
            transformer(auto, name, sizes),
            image(side_of(sizes)),
            lengths=(8,),
            # It draws the order of its patches.
            draws=name == "vit_mae",
            microbatches=1 if name == "vit_mae" else 2,
        )
        for name, (auto, sizes) in VISION.items()
    ),
    *(
        Case(name, "transformers", transformer("AutoModel", name, SOUND), sound, lengths=(400, 560))
        for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "sew", "data2vec-audio")
    ),
    # It keeps a table of sines in float32, of which one that is computed for another length differs in the last bits.
    Case(
        "wav2vec2-conformer",
        "transformers",
        transformer("AutoModel", "wav2vec2-conformer", SOUND),
        sound,
        lengths=(400,),
    ),
    Case(
        "wav2vec2, SpecAugment",
        "transformers",
        make(
            "Wav2Vec2Model",
            "Wav2Vec2Config",
            {**SOUND, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2},
        ),
        sound,
        lengths=(400,),
        draws=True,
        microbatches=1,
    ),
    Case(
        "whisper",
        "transformers",
        make("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
        features,
        lengths=(16,),
    ),
    Case(
        "speech_to_text",
        "transformers",
        make(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            {
                **BART,
                "input_feat_per_channel": 16,
                "max_source_positions": 64,
                "max_target_positions": 64,
                "conv_channels": 16,
            },
        ),
        spectrum,
    ),
    Case(
        "audio-spectrogram-transformer",
        "transformers",
        make(
            "ASTForAudioClassification",
            "ASTConfig",
            {
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "patch_size": 4,
                "max_length": 16,
                "num_mel_bins": 16,
                "frequency_stride": 4,
                "time_stride": 4,
            },
        ),
        lambda n, _: {"input_values": torch.randn(n, 16, 16)},
        lengths=(8,),
    ),
    Case(
        "encodec",
        "transformers",
        make(
            "EncodecModel",
            "EncodecConfig",
            {
                "num_filters": 4,
                "hidden_size": 16,
                "codebook_dim": 16,
                "codebook_size": 8,
                "upsampling_ratios": [2, 2],
                "target_bandwidths": [1.5],
                "sampling_rate": 800,
                "num_lstm_layers": 1,
                "normalize": False,
            },
        ),
        lambda n, length: {"input_values": torch.randn(n, 1, length)},
        lengths=(64,),
    ),
    Case(
        "clip",
        "transformers",
        make(
            "CLIPModel",
            "CLIPConfig",
            {"projection_dim": 16},
            text_config=("CLIPTextConfig", TEXT_PART),
            vision_config=("CLIPVisionConfig", VISION_PART),
        ),
        clip,
    ),
    Case(
        "clip, return_loss",
        "transformers",
        make(
            "CLIPModel",
            "CLIPConfig",
            {"projection_dim": 16},
            text_config=("CLIPTextConfig", TEXT_PART),
            vision_config=("CLIPVisionConfig", VISION_PART),
        ),
        lambda n, length: {**clip(n, length), "return_loss": True},
    ),
    Case(
        "siglip",
        "transformers",
        make(
            "SiglipModel",
            "SiglipConfig",
            {},
            text_config=("SiglipTextConfig", TEXT_PART),
            vision_config=("SiglipVisionConfig", VISION_PART),
        ),
        clip,
        lengths=(64,),
    ),
    Case(
        "blip",
        "transformers",
        make(
            "BlipForConditionalGeneration",
            "BlipConfig",
            {},
            text_config=("BlipTextConfig", {**TEXT_PART, "encoder_hidden_size": 32}),
            vision_config=("BlipVisionConfig", VISION_PART),
        ),
        clip,
    ),
    Case(
        "llava",
        "transformers",
        make(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            {"image_token_id": 98, "image_token_index": 98, "vision_feature_select_strategy": "default"},
            text_config=("LlamaConfig", LLAMA),
            vision_config=("CLIPVisionConfig", {**VISION_PART, "image_size": 16}),
        ),
        looking,
    ),
    Case(
        "paligemma",
        "transformers",
        make(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            {"image_token_id": 98, "image_token_index": 98, "projection_dim": 32},
            text_config=("GemmaConfig", {**LLAMA, "head_dim": 8}),
            vision_config=("SiglipVisionConfig", {**VISION_PART, "image_size": 16}),
        ),
        looking,
    ),
    Case(
        "idefics3",
        "transformers",
        make(
            "Idefics3ForConditionalGeneration",
            "Idefics3Config",
            {"image_token_id": 98, "scale_factor": 1},
            text_config=("LlamaConfig", LLAMA),
            vision_config=("Idefics3VisionConfig", {**VISION_PART, "image_size": 16}),
        ),
        lambda n, length: {**looking(n, length), "pixel_values": torch.randn(n, 1, 3, 16, 16)},
    ),
    Case(
        "qwen2_vl",
        "transformers",
        make(
            "Qwen2VLForConditionalGeneration",
            "Qwen2VLConfig",
            {"image_token_id": 98, "vision_start_token_id": 97},
            text_config=(
                "Qwen2VLTextConfig",
                {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
            ),
            vision_config=(
                "Qwen2VLVisionConfig",
                {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2},
            ),
        ),
        qwen_vl,
    ),
    Case(
        "vilt",
        "transformers",
        make("ViltModel", "ViltConfig", {**VIT, "vocab_size": 99}),
        clip,
        # It draws which patches it keeps.
        draws=True,
        microbatches=1,
    ),
    Case(
        "visual_bert",
        "transformers",
        make("VisualBertModel", "VisualBertConfig", {**SIZES, "visual_embedding_dim": 8}),
        lambda n, length: {
            **masked(n, length),
            "visual_embeds": torch.randn(n, 3, 8),
            "visual_attention_mask": torch.ones(n, 3),
        },
    ),
    Case(
        "lxmert",
        "transformers",
        make(
            "LxmertModel", "LxmertConfig", {**SIZES, "l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 8}
        ),
        lambda n, length: {
            **masked(n, length),
            "visual_feats": torch.randn(n, 3, 8),
            "visual_pos": torch.rand(n, 3, 4),
        },
    ),
    Case("git", "transformers", make("GitForCausalLM", "GitConfig", {**SIZES, "vision_config": VISION_PART}), clip),
    Case("flava", "transformers", make("FlavaTextModel", "FlavaTextConfig", SIZES), masked),
    Case(
        "encoder-decoder of BERTs",
        "transformers",
        make(
            "EncoderDecoderModel",
            "EncoderDecoderConfig",
            {"decoder_start_token_id": 1, "pad_token_id": 0},
            encoder=("BertConfig", SIZES),
            decoder=("BertConfig", {**SIZES, "is_decoder": True, "add_cross_attention": True}),
        ),
        paired,
    ),
    Case(
        "detr",
        "transformers",
        make(
            "DetrModel",
            "DetrConfig",
            {
                "use_timm_backbone": False,
                "use_pretrained_backbone": False,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 32,
                "num_queries": 5,
                "backbone": None,
            },
            backbone_config=(
                "ResNetConfig",
                {
                    "embedding_size": 8,
                    "hidden_sizes": [8, 8, 16, 16],
                    "depths": [1, 1, 1, 1],
                    "layer_type": "basic",
                    "out_features": ["stage4"],
                },
            ),
        ),
        image(64),
        lengths=(8,),
    ),
    Case(
        "timesformer",
        "transformers",
        make("TimesformerModel", "TimesformerConfig", {**VIT, "image_size": 16, "patch_size": 8, "num_frames": 4}),
        video,
        lengths=(8,),
    ),
    Case(
        "videomae",
        "transformers",
        make("VideoMAEModel", "VideoMAEConfig", {**VIT, "image_size": 16, "patch_size": 8, "num_frames": 4}),
        video,
        lengths=(8,),
    ),
    Case(
        "vivit",
        "transformers",
        make("VivitModel", "VivitConfig", {**VIT, "image_size": 16, "num_frames": 4, "tubelet_size": [2, 8, 8]}),
        video,
        lengths=(8,),
    ),
    Case(
        "patchtst",
        "transformers",
        make(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            {
                "num_input_channels": 2,
                "context_length": 16,
                "patch_length": 4,
                "patch_stride": 4,
                "d_model": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "ffn_dim": 16,
                "prediction_length": 4,
                "loss": "mse",
            },
        ),
        series,
        lengths=(8,),
    ),
    Case(
        "patchtsmixer",
        "transformers",
        make(
            "PatchTSMixerForPrediction",
            "PatchTSMixerConfig",
            {
                "num_input_channels": 2,
                "context_length": 16,
                "patch_length": 4,
                "patch_stride": 4,
                "d_model": 16,
                "num_layers": 3,
                "prediction_length": 4,
                "loss": "mse",
            },
        ),
        series,
        lengths=(8,),
    ),
    Case(
        "time_series_transformer",
        "transformers",
        make("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", SERIES),
        forecast,
        lengths=(8,),
    ),
    Case(
        "autoformer",
        "transformers",
        make("AutoformerForPrediction", "AutoformerConfig", SERIES),
        forecast,
        lengths=(8,),
    ),
    Case("informer", "transformers", make("InformerForPrediction", "InformerConfig", SERIES), forecast, lengths=(8,)),
    Case(
        "decision_transformer",
        "transformers",
        make(
            "DecisionTransformerModel",
            "DecisionTransformerConfig",
            {"state_dim": 5, "act_dim": 2, "hidden_size": 32, "n_layer": 3, "n_head": 4, "max_ep_len": 20},
        ),
        lambda n, length: {
            "states": torch.randn(n, length, 5),
            "actions": torch.randn(n, length, 2),
            "rewards": torch.randn(n, length, 1),
            "returns_to_go": torch.randn(n, length, 1),
            "timesteps": torch.arange(length).expand(n, -1).clone(),
            "attention_mask": torch.ones(n, length),
        },
    ),
    Case(
        "gpt2, gradient checkpointing",
        "transformers",
        lambda: checkpointing(
            transformer(
                "AutoModelForCausalLM",
                "gpt2",
                dict(vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64, use_cache=False),
            )()
        ),
        masked,
    ),
    Case(
        "llama, gradient checkpointing",
        "transformers",
        lambda: checkpointing(transformer("AutoModelForCausalLM", "llama", SIZES)()),
        masked,
    ),
    Case(
        "llama, eager attention",
        "transformers",
        lambda: eager(transformer("AutoModelForCausalLM", "llama", SIZES)()),
        masked,
    ),
    Case(
        "llama, tied",
        "transformers",
        transformer("AutoModelForCausalLM", "llama", {**SIZES, "tie_word_embeddings": True}),
        masked,
    ),
    Case(
        "mixtral, router loss",
        "transformers",
        transformer("AutoModelForCausalLM", "mixtral", {**SIZES, "num_local_experts": 4, "output_router_logits": True}),
        masked,
    ),
    Case(
        "t5, shared layers",
        "transformers",
        transformer("AutoModelForSeq2SeqLM", "t5", {**T5, "feed_forward_proj": "gated-gelu"}),
        paired,
    ),
)


def checkpointing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def eager(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model
