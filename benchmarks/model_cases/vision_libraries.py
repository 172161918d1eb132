"""Models of torchvision, timm, segmentation-models-pytorch, vit-pytorch and diffusers, with random weights."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from model_cases.cases import Case

__all__ = ["CASES"]


def imported(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Makes `module.name(*args, **kwargs)`, imported only then."""

    def build() -> nn.Module:
        made: nn.Module = getattr(import_module(module), name)(*args, **kwargs)
        return without_dropout(made)

    return build


def without_dropout(model: nn.Module) -> nn.Module:
    """`model` with a probability of 0 in all that drops at random."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "drop_path", "attn_drop_prob", "drop_rate"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def image(side: int, channels: int = 3) -> Callable[[int, int], tuple[Tensor]]:
    return lambda samples, length: (torch.randn(samples, channels, side, side),)


def of(family: str, name: str, build: Callable[[], nn.Module], draw: Any, **options: Any) -> Case:
    return Case(name, family, build, draw, **{"lengths": (8,), **options})


VISION = "torchvision.models"
TORCHVISION: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (imported(VISION, "resnet18", num_classes=5), 32),
    "resnet50": (imported(VISION, "resnet50", num_classes=5, width_per_group=16), 32),
    "vgg11_bn, a new head": (lambda: with_new_head("vgg11_bn", 512 * 49), 32),
    "alexnet, a new head": (lambda: with_new_head("alexnet", 256 * 36), 64),
    "DenseNet": (
        imported(
            f"{VISION}.densenet", "DenseNet", growth_rate=8, block_config=(2, 2, 2), num_init_features=8, num_classes=5
        ),
        32,
    ),
    "mobilenet_v2": (imported(VISION, "mobilenet_v2", num_classes=5, width_mult=0.25), 32),
    "mobilenet_v3_small": (imported(VISION, "mobilenet_v3_small", num_classes=5, width_mult=0.25), 32),
    "efficientnet_b0": (imported(VISION, "efficientnet_b0", num_classes=5), 32),
    "shufflenet_v2_x0_5": (imported(VISION, "shufflenet_v2_x0_5", num_classes=5), 32),
    "squeezenet1_1": (imported(VISION, "squeezenet1_1", num_classes=5), 32),
    "googlenet": (imported(VISION, "googlenet", num_classes=5, aux_logits=False, init_weights=False), 32),
    "mnasnet0_5": (imported(VISION, "mnasnet0_5", num_classes=5), 32),
    "regnet_y_400mf": (imported(VISION, "regnet_y_400mf", num_classes=5), 32),
    "ConvNeXt": (lambda: without_dropout(convnext()), 32),
    "VisionTransformer": (
        imported(f"{VISION}.vision_transformer", "VisionTransformer", 32, 8, 4, 4, 32, 48, num_classes=5),
        32,
    ),
    "SwinTransformer": (
        imported(
            f"{VISION}.swin_transformer",
            "SwinTransformer",
            [4, 4],
            16,
            [2, 2],
            [2, 2],
            [4, 4],
            num_classes=5,
            stochastic_depth_prob=0.0,
        ),
        32,
    ),
    "MaxVit": (
        imported(
            VISION,
            "MaxVit",
            input_size=(64, 64),
            stem_channels=8,
            partition_size=2,
            block_channels=[8, 16],
            block_layers=[1, 1],
            head_dim=8,
            stochastic_depth_prob=0.0,
            num_classes=5,
        ),
        64,
    ),
    "deeplabv3_mobilenet_v3_large": (
        imported(
            f"{VISION}.segmentation", "deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3
        ),
        32,
    ),
    "lraspp_mobilenet_v3_large": (
        imported(
            f"{VISION}.segmentation", "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3
        ),
        32,
    ),
}

TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "resnet10t": ({}, 32),
    "convnext_atto": ({"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}, 32),
    "convnextv2_atto": ({"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}, 32),
    "mobilenetv3_small_050": ({}, 32),
    "mobilenetv4_conv_small_035": ({}, 32),
    "ghostnet_050": ({}, 32),
    "regnetx_002": ({}, 32),
    "vit_tiny_patch16_224": ({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}, 32),
    "deit3_small_patch16_224": ({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}, 32),
    "beit_base_patch16_224": ({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}, 32),
    "eva02_tiny_patch14_224": ({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}, 32),
    "cait_xxs24_224": ({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}, 32),
    "xcit_nano_12_p16_224": ({"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}, 32),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
        32,
    ),
    "swinv2_tiny_window8_256": (
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
        32,
    ),
    "pvt_v2_b0": ({"depths": (1, 1, 1, 1)}, 32),
    "edgenext_xx_small": ({"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}, 64),
    "davit_tiny": ({"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 2), "window_size": 4}, 32),
    "twins_svt_small": (
        {
            "img_size": 64,
            "embed_dims": (16, 16),
            "num_heads": (2, 2),
            "depths": (1, 2),
            "mlp_ratios": (2, 2),
            "sr_ratios": (2, 1),
            "wss": (4, 4),
        },
        64,
    ),
    "visformer_tiny": ({"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "init_channels": 8, "num_heads": 2}, 64),
}

VITS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ViT": (
        imported(
            "vit_pytorch",
            "ViT",
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=32,
            depth=4,
            heads=4,
            mlp_dim=48,
            dim_head=8,
        ),
        32,
    ),
    "SimpleViT": (
        imported(
            "vit_pytorch",
            "SimpleViT",
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=32,
            depth=4,
            heads=4,
            mlp_dim=48,
            dim_head=8,
        ),
        32,
    ),
    "CaiT": (
        imported(
            "vit_pytorch.cait",
            "CaiT",
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=32,
            depth=4,
            cls_depth=2,
            heads=4,
            mlp_dim=48,
            dim_head=8,
        ),
        32,
    ),
    "DeepViT": (
        imported(
            "vit_pytorch.deepvit",
            "DeepViT",
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=32,
            depth=4,
            heads=4,
            mlp_dim=48,
            dim_head=8,
        ),
        32,
    ),
    "T2TViT": (
        imported(
            "vit_pytorch.t2t", "T2TViT", image_size=32, num_classes=5, dim=32, depth=3, heads=4, mlp_dim=48, dim_head=8
        ),
        32,
    ),
    "CCT": (
        imported(
            "vit_pytorch.cct",
            "CCT",
            img_size=32,
            embedding_dim=32,
            n_conv_layers=1,
            num_layers=3,
            num_heads=4,
            mlp_ratio=2.0,
            num_classes=5,
            positional_embedding="learnable",
            dropout_rate=0.0,
            attention_dropout=0.0,
            stochastic_depth_rate=0.0,
        ),
        32,
    ),
    "CrossViT": (
        imported(
            "vit_pytorch.cross_vit",
            "CrossViT",
            image_size=32,
            num_classes=5,
            depth=2,
            sm_dim=16,
            sm_patch_size=8,
            sm_enc_depth=1,
            sm_enc_heads=2,
            sm_enc_mlp_dim=16,
            sm_enc_dim_head=8,
            lg_dim=24,
            lg_patch_size=16,
            lg_enc_depth=1,
            lg_enc_heads=2,
            lg_enc_mlp_dim=16,
            lg_enc_dim_head=8,
            cross_attn_depth=1,
            cross_attn_heads=2,
            cross_attn_dim_head=8,
        ),
        32,
    ),
    "NesT": (
        imported(
            "vit_pytorch.nest",
            "NesT",
            image_size=32,
            patch_size=4,
            num_classes=5,
            dim=16,
            heads=2,
            num_hierarchies=2,
            block_repeats=(1, 1),
        ),
        32,
    ),
    "MobileViT": (
        imported(
            "vit_pytorch.mobile_vit",
            "MobileViT",
            image_size=(64, 64),
            dims=[16, 24, 32],
            channels=[8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16],
            num_classes=5,
        ),
        64,
    ),
    "MaxViT": (
        imported(
            "vit_pytorch.max_vit",
            "MaxViT",
            num_classes=5,
            dim_conv_stem=8,
            dim=16,
            dim_head=8,
            depth=(1, 1),
            window_size=4,
            mbconv_expansion_rate=2,
            mbconv_shrinkage_rate=0.25,
        ),
        32,
    ),
    "ViT 1D": (
        imported(
            "vit_pytorch.vit_1d",
            "ViT",
            seq_len=32,
            patch_size=4,
            num_classes=5,
            dim=32,
            depth=4,
            heads=4,
            mlp_dim=48,
            dim_head=8,
            channels=3,
        ),
        0,
    ),
}

D = "diffusers"
UNET = dict(
    sample_size=16, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4
)


def convnext() -> nn.Module:
    module = import_module(f"{VISION}.convnext")
    sizes = [module.CNBlockConfig(8, 16, 1), module.CNBlockConfig(16, None, 2)]
    made: nn.Module = module.ConvNeXt(sizes, stochastic_depth_prob=0.0, num_classes=5)
    return made


def with_new_head(name: str, width: int) -> nn.Module:
    """As it is fine-tuned; its own head has a hundred million weights."""
    model: nn.Module = getattr(import_module(VISION), name)()
    model.classifier = nn.Linear(width, 5)
    return model


def step(samples: int) -> Tensor:
    return torch.randint(0, 100, (samples,))


def noisy(channels: int, side: int, context: int = 0, width: int = 16) -> Callable[[int, int], dict[str, Any]]:
    def draw(samples: int, length: int) -> dict[str, Any]:
        found: dict[str, Any] = {"sample": torch.randn(samples, channels, side, side), "timestep": step(samples)}
        if context:
            found["encoder_hidden_states"] = torch.randn(samples, length, width)
        return found

    return draw


def latent(samples: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(samples, 4, 8, 8),
        "encoder_hidden_states": torch.randn(samples, length, 16),
        "timestep": step(samples),
    }


def flux(samples: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(samples, 16, 4),
        "encoder_hidden_states": torch.randn(samples, length, 16),
        "pooled_projections": torch.randn(samples, 16),
        "timestep": torch.rand(samples),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(length, 3),
    }


DIFFUSERS = (
    of(
        D,
        "UNet2DModel",
        imported(
            D,
            "UNet2DModel",
            **UNET,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ),
        noisy(3, 16),
    ),
    of(
        D,
        "UNet2DConditionModel",
        imported(
            D,
            "UNet2DConditionModel",
            **{**UNET, "in_channels": 4, "out_channels": 4},
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        ),
        noisy(4, 16, 1),
        lengths=(8, 11),
    ),
    of(
        D,
        "AutoencoderKL",
        imported(
            D,
            "AutoencoderKL",
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=2,
        ),
        image(16),
    ),
    of(
        D,
        "VQModel",
        imported(
            D,
            "VQModel",
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=2,
            num_vq_embeddings=8,
        ),
        image(16),
    ),
    of(
        D,
        "DiTTransformer2DModel",
        imported(
            D,
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            sample_size=8,
            patch_size=2,
            norm_num_groups=4,
            num_embeds_ada_norm=100,
        ),
        lambda n, _: {
            "hidden_states": torch.randn(n, 4, 8, 8),
            "timestep": step(n),
            "class_labels": torch.randint(0, 100, (n,)),
        },
        draws=True,
        microbatches=1,
    ),
    of(
        D,
        "Transformer2DModel",
        imported(
            D,
            "Transformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=8,
            num_layers=3,
            norm_num_groups=4,
            cross_attention_dim=16,
        ),
        lambda n, length: {
            "hidden_states": torch.randn(n, 8, 8, 8),
            "encoder_hidden_states": torch.randn(n, length, 16),
        },
        lengths=(8, 11),
    ),
    of(
        D,
        "PixArtTransformer2DModel",
        imported(
            D,
            "PixArtTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=4,
            sample_size=8,
            patch_size=2,
            cross_attention_dim=16,
            caption_channels=16,
            use_additional_conditions=False,
        ),
        lambda n, length: {**latent(n, length), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        lengths=(8, 11),
    ),
    of(
        D,
        "SD3Transformer2DModel",
        imported(
            D,
            "SD3Transformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=8,
        ),
        lambda n, length: {**latent(n, length), "pooled_projections": torch.randn(n, 16)},
        lengths=(8, 11),
    ),
    of(
        D,
        "FluxTransformer2DModel",
        imported(
            D,
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
        flux,
        lengths=(8, 11),
    ),
    of(
        D,
        "AuraFlowTransformer2DModel",
        imported(
            D,
            "AuraFlowTransformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        latent,
        lengths=(8, 11),
    ),
    of(
        D,
        "PriorTransformer",
        imported(
            D,
            "PriorTransformer",
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=4,
            embedding_dim=8,
            num_embeddings=7,
            additional_embeddings=4,
        ),
        lambda n, _: {
            "hidden_states": torch.randn(n, 8),
            "timestep": step(n),
            "proj_embedding": torch.randn(n, 8),
            "encoder_hidden_states": torch.randn(n, 7, 8),
        },
    ),
    of(
        D,
        "ControlNetModel",
        imported(
            D,
            "ControlNetModel",
            block_out_channels=(8, 16),
            layers_per_block=1,
            in_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
            conditioning_embedding_out_channels=(4, 8),
        ),
        lambda n, length: {**noisy(4, 8, 1)(n, length), "controlnet_cond": torch.randn(n, 3, 16, 16)},
        lengths=(8, 11),
    ),
    of(
        D,
        "CogVideoXTransformer3DModel",
        imported(
            D,
            "CogVideoXTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            num_layers=3,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=8,
        ),
        lambda n, _: {
            "hidden_states": torch.randn(n, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(n, 8, 16),
            "timestep": step(n),
        },
    ),
    of(
        D,
        "UNet3DConditionModel",
        imported(
            D,
            "UNet3DConditionModel",
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        ),
        lambda n, length: {
            "sample": torch.randn(n, 4, 3, 8, 8),
            "timestep": step(n),
            "encoder_hidden_states": torch.randn(n, length, 16),
        },
    ),
)

SEGMENTATION = {
    name: imported("segmentation_models_pytorch", name, "resnet18", encoder_weights=None, classes=3)
    for name in ("Unet", "FPN", "PSPNet", "DeepLabV3Plus")
}


def timm(name: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = import_module("timm").create_model(name, pretrained=False, num_classes=5, **sizes)
        return without_dropout(made)

    return build


CASES: tuple[Case, ...] = (
    *(of("torchvision", name, build, image(side)) for name, (build, side) in TORCHVISION.items()),
    *(of("timm", name, timm(name, sizes), image(side)) for name, (sizes, side) in TIMM.items()),
    of(
        "timm",
        "MlpMixer",
        imported(
            "timm.models.mlp_mixer", "MlpMixer", num_classes=5, img_size=32, patch_size=8, embed_dim=32, num_blocks=4
        ),
        image(32),
    ),
    *(of("segmentation-models-pytorch", name, build, image(32)) for name, build in SEGMENTATION.items()),
    *(
        of("vit-pytorch", name, build, image(side) if side else lambda n, _: (torch.randn(n, 3, 32),))
        for name, (build, side) in VITS.items()
    ),
    *DIFFUSERS,
)
