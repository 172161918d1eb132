"""Models of other libraries than transformers, small and with random weights. libraries.yaml has sizes of some."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from model_cases.cases import LENGTH, Case, Draw, arguments, integers, keywords, normal, numbers
from model_cases.modules import Build, InOrder, holds, in_order, many, sequence
from model_cases.pages import WAYS_OUT
from model_cases.transformers_models import GPT, SIZES, T5, decoder, masked, paired, tokens, transformer

__all__ = ["CASES", "graph"]


def tuples(value: Any) -> Any:
    """`value` with tuples for its lists."""
    if isinstance(value, dict):
        return {name: tuples(each) for name, each in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


TABLES = tuples(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def imported(module: str, name: str, *args: Any, **kwargs: Any) -> Build:
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


def image(side: int) -> Draw:
    return arguments(normal(3, side, side))


# torchvision


def torchvision(name: str, module: str = "", *args: Any, **options: Any) -> Build:
    """A model of torchvision with five classes."""
    return imported(f"torchvision.models{module and '.'}{module}", name, *args, **{"num_classes": 5, **options})


def convnext() -> nn.Module:
    module = import_module("torchvision.models.convnext")
    sizes = [module.CNBlockConfig(8, 16, 1), module.CNBlockConfig(16, None, 2)]
    return without_dropout(module.ConvNeXt(sizes, stochastic_depth_prob=0.0, num_classes=5))


def with_new_head(name: str, width: int) -> Build:
    """As it is fine-tuned; its own head has a hundred million weights."""

    def build() -> nn.Module:
        model: nn.Module = getattr(import_module("torchvision.models"), name)()
        model.classifier = nn.Linear(width, 5)
        return model

    return build


SEGMENTS: dict[str, Any] = dict(weights=None, weights_backbone=None, num_classes=3)
LARGE_IMAGES = {
    "alexnet, a new head", "MaxVit", "edgenext_xx_small", "twins_svt_small", "visformer_tiny", "MobileViT"
}  # fmt: skip
"""Models that take images of 64 pixels; others take 32."""
TORCHVISION: dict[str, Build] = {
    "resnet18": torchvision("resnet18"),
    "resnet50": torchvision("resnet50", width_per_group=16),
    "vgg11_bn, a new head": with_new_head("vgg11_bn", 512 * 49),
    "alexnet, a new head": with_new_head("alexnet", 256 * 36),
    "DenseNet": torchvision("DenseNet", "densenet", growth_rate=8, block_config=(2, 2, 2), num_init_features=8),
    "mobilenet_v2": torchvision("mobilenet_v2", width_mult=0.25),
    "mobilenet_v3_small": torchvision("mobilenet_v3_small", width_mult=0.25),
    "efficientnet_b0": torchvision("efficientnet_b0"),
    "shufflenet_v2_x0_5": torchvision("shufflenet_v2_x0_5"),
    "squeezenet1_1": torchvision("squeezenet1_1"),
    "googlenet": torchvision("googlenet", aux_logits=False, init_weights=False),
    "mnasnet0_5": torchvision("mnasnet0_5"),
    "regnet_y_400mf": torchvision("regnet_y_400mf"),
    "ConvNeXt": convnext,
    "VisionTransformer": torchvision("VisionTransformer", "vision_transformer", 32, 8, 4, 4, 32, 48),
    "SwinTransformer": torchvision(
        "SwinTransformer", "swin_transformer", [4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0
    ),
    "MaxVit": torchvision(
        "MaxVit", input_size=(64, 64), stem_channels=8, partition_size=2, block_channels=[8, 16],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    "deeplabv3_mobilenet_v3_large": torchvision("deeplabv3_mobilenet_v3_large", "segmentation", **SEGMENTS),
    "lraspp_mobilenet_v3_large": torchvision("lraspp_mobilenet_v3_large", "segmentation", **SEGMENTS),
}  # fmt: skip

mixer = imported("timm.models.mlp_mixer", "MlpMixer", num_classes=5, num_blocks=4, **TABLES["shared"]["patches"])

# vit-pytorch


def vit(name: str, module: str = "", **options: Any) -> Build:
    """A model of vit-pytorch with five classes."""
    return imported(f"vit_pytorch{module and '.'}{module}", name, num_classes=5, **options)


WIDTHS: dict[str, Any] = dict(dim=32, depth=4, heads=4, mlp_dim=48, dim_head=8)
PLAIN = WIDTHS | dict(image_size=32, patch_size=8)
CROSSING: dict[str, Any] = {
    f"{size}_{name}": value
    for size, parts in (("sm", dict(dim=16, patch_size=8)), ("lg", dict(dim=24, patch_size=16)))
    for name, value in (parts | dict(enc_depth=1, enc_heads=2, enc_mlp_dim=16, enc_dim_head=8)).items()
}
VITS: dict[str, Build] = {
    "ViT": vit("ViT", **PLAIN),
    "SimpleViT": vit("SimpleViT", **PLAIN),
    "CaiT": vit("CaiT", "cait", cls_depth=2, **PLAIN),
    "DeepViT": vit("DeepViT", "deepvit", **PLAIN),
    "T2TViT": vit("T2TViT", "t2t", **WIDTHS | dict(image_size=32, depth=3)),
    "CCT": vit(
        "CCT", "cct", img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=3, num_heads=4, mlp_ratio=2.0,
        positional_embedding="learnable", dropout_rate=0.0, attention_dropout=0.0, stochastic_depth_rate=0.0,
    ),
    "CrossViT": vit(
        "CrossViT", "cross_vit", image_size=32, depth=2, cross_attn_depth=1, cross_attn_heads=2,
        cross_attn_dim_head=8, **CROSSING,
    ),
    "NesT": vit(
        "NesT", "nest", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1)
    ),
    "MobileViT": vit(
        "MobileViT", "mobile_vit", image_size=(64, 64), dims=[16, 24, 32], channels=[8] * 4 + [16] * 7
    ),
    "MaxViT": vit(
        "MaxViT", "max_vit", dim_conv_stem=8, dim=16, dim_head=8, depth=(1, 1), window_size=4,
        mbconv_expansion_rate=2, mbconv_shrinkage_rate=0.25,
    ),
    "ViT 1D": vit("ViT", "vit_1d", seq_len=32, patch_size=4, channels=3, **WIDTHS),
}  # fmt: skip

# diffusers

step = integers(0, 100)
words = normal(LENGTH, 16)
latent = keywords(hidden_states=normal(4, 8, 8), encoder_hidden_states=words, timestep=step)


def noisy(*shape: int) -> Draw:
    return keywords(sample=normal(*shape), timestep=step)


FLUX = keywords(
    hidden_states=normal(16, 4),
    encoder_hidden_states=words,
    pooled_projections=normal(16),
    timestep=numbers(),
    img_ids=lambda samples, length: torch.zeros(16, 3),
    txt_ids=lambda samples, length: torch.zeros(length, 3),
)
SIZES_OF_IMAGES = keywords(added_cond_kwargs=lambda samples, length: {"resolution": None, "aspect_ratio": None})


def diffusers(name: str, draw: Draw, *other_length: int, **options: Any) -> Case:
    build = imported("diffusers", name, **TABLES["diffusers"][name])
    return Case(name, "diffusers", build, draw, lengths=(8, *other_length), **options)


controlled = keywords(noisy(4, 8, 8), encoder_hidden_states=words, controlnet_cond=normal(3, 16, 16))
prior = keywords(hidden_states=normal(8), timestep=step, proj_embedding=normal(8), encoder_hidden_states=normal(7, 8))
labelled = keywords(hidden_states=normal(4, 8, 8), timestep=step, class_labels=step)
frames = keywords(hidden_states=normal(2, 4, 8, 8), encoder_hidden_states=normal(8, 16), timestep=step)
DIFFUSERS = (
    diffusers("UNet2DModel", noisy(3, 16, 16)),
    diffusers("UNet2DConditionModel", keywords(noisy(4, 16, 16), encoder_hidden_states=words), 11),
    diffusers("AutoencoderKL", image(16)),
    diffusers("VQModel", image(16)),
    diffusers("DiTTransformer2DModel", labelled, draws=True, microbatches=1),
    diffusers("Transformer2DModel", keywords(hidden_states=normal(8, 8, 8), encoder_hidden_states=words), 11),
    diffusers("PixArtTransformer2DModel", keywords(latent, SIZES_OF_IMAGES), 11),
    diffusers("SD3Transformer2DModel", keywords(latent, pooled_projections=normal(16)), 11),
    diffusers("FluxTransformer2DModel", FLUX, 11),
    diffusers("AuraFlowTransformer2DModel", latent, 11),
    diffusers("PriorTransformer", prior),
    diffusers("ControlNetModel", controlled, 11),
    diffusers("CogVideoXTransformer3DModel", frames),
    diffusers("UNet3DConditionModel", keywords(noisy(4, 3, 8, 8), encoder_hidden_states=words)),
)

# x-transformers

X = "x_transformers"
ids = arguments(integers(0, 99, LENGTH))
vectors = arguments(normal(LENGTH, 32))


def layers(kind: str, **options: Any) -> nn.Module:
    made: nn.Module = getattr(import_module(X), kind)(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
    return made


def x_transformer(kind: str, **options: Any) -> Build:
    return lambda: import_module(X).TransformerWrapper(
        num_tokens=99, max_seq_len=32, attn_layers=layers(kind, **options)
    )


def mask(samples: int, length: int) -> Tensor:
    found = torch.ones(samples, length, dtype=torch.bool)
    found[0, -2:] = False
    return found


XS: dict[str, tuple[Build, Draw]] = {
    "Decoder": (x_transformer("Decoder"), ids),
    "Decoder, rotary": (x_transformer("Decoder", rotary_pos_emb=True), ids),
    "Decoder, ALiBi": (x_transformer("Decoder", alibi_pos_bias=True, alibi_num_heads=2), ids),
    "Decoder, RMSNorm and GLU": (x_transformer("Decoder", use_rmsnorm=True, ff_glu=True), ids),
    "Decoder, T5 bias": (x_transformer("Decoder", rel_pos_bias=True), ids),
    "Decoder, memory keys": (x_transformer("Decoder", attn_num_mem_kv=4), ids),
    "Encoder": (x_transformer("Encoder"), ids),
    "Encoder, mask": (x_transformer("Encoder"), keywords(x=integers(0, 99, LENGTH), mask=mask)),
    "Encoder, sandwich": (x_transformer("Encoder", sandwich_coef=2), ids),
    "Encoder in a model": (
        holds(
            lambda model, x: model.head(model.layers(x)),
            layers=lambda: layers("Encoder"),
            head=lambda: nn.Linear(32, 5),
        ),
        vectors,
    ),
}

# PyTorch Geometric. A batch is one graph, so that there is one microbatch.

G = "torch_geometric.nn"


def graph(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Six nodes for every sample, and edges between them."""
    nodes = 6 * samples
    return torch.randn(nodes, 8), torch.stack([torch.arange(nodes), (torch.arange(nodes) * 5 + 1) % nodes])


def batched_graph(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Features of the same graph for every sample."""
    return torch.randn(samples, 7, 8), torch.stack([torch.arange(7), (torch.arange(7) * 3 + 1) % 7])


def run_graph(model: Any, x: Tensor, edges: Tensor) -> Any:
    for convolution, norm in zip(model.convolutions, model.norms, strict=True):
        x = x + norm(convolution(x, edges)).relu()
    return model.head(x)


def graph_list(name: str, **options: Any) -> Build:
    """Makes a list of convolutions, which are called one after the other."""
    norm = imported(G, "GraphNorm", 8) if name == "GCNConv" else lambda: nn.LayerNorm(8)
    convolutions = many(imported(G, name, 8, 8, **options))
    return holds(run_graph, convolutions=convolutions, norms=many(norm), head=lambda: nn.Linear(8, 3))


def graph_blocks(convolution: Build) -> Build:
    """Makes blocks of a convolution and what is around it."""
    block = holds(
        lambda block, x, edges: x + block.norm(block.convolution(x, edges)).relu(),
        convolution=convolution,
        norm=lambda: nn.LayerNorm(8),
    )
    return partial(InOrder, block)


def isomorphism() -> nn.Module:
    perceptron = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    made: nn.Module = import_module(G).GINConv(perceptron)
    return made


GRAPHS: dict[str, Build] = {
    "GCN": imported(G, "GCN", 8, 8, 4, out_channels=3, norm="batch_norm"),
    "GAT": imported(G, "GAT", 8, 8, 4, out_channels=3),
    "GAT v2": imported(G, "GAT", 8, 8, 4, out_channels=3, v2=True),
    "GraphSAGE": imported(G, "GraphSAGE", 8, 8, 4, out_channels=3, jk="cat"),
    "GIN": imported(G, "GIN", 8, 8, 4, out_channels=3),
    "EdgeCNN": imported(G, "EdgeCNN", 8, 8, 4, out_channels=3),
    "GraphUNet": imported(G, "GraphUNet", 8, 8, 3, depth=2),
    "GCNConv in a list": graph_list("GCNConv"),
    "GATConv in a list": graph_list("GATConv", heads=2, concat=False),
    "TransformerConv in a list": graph_list("TransformerConv", heads=2, concat=False),
    "ChebConv in a list": graph_list("ChebConv", K=2),
    "GINConv in blocks": graph_blocks(isomorphism),
    "GATv2Conv in blocks": graph_blocks(imported(G, "GATv2Conv", 8, 4, heads=2)),
    "GatedGraphConv in blocks": graph_blocks(imported(G, "GatedGraphConv", 8, 2)),
}

# PEFT


LLAMA = decoder("llama", SIZES)


def adapted(kind: str, build: Build = LLAMA, task: str | None = "CAUSAL_LM", **options: Any) -> Build:
    def made() -> nn.Module:
        peft = import_module("peft")
        model: nn.Module = peft.get_peft_model(build(), getattr(peft, kind)(task_type=task, **options))
        return model

    return made


LORA: dict[str, Any] = dict(kind="LoraConfig", r=2, init_lora_weights=False)
QUERIES = ["q_proj", "v_proj"]
ADAPTED: dict[str, tuple[Build, Draw]] = {
    "LoRA on llama": (adapted(**LORA), tokens),
    "DoRA on llama": (adapted(**LORA, use_dora=True), tokens),
    "LoRA on gpt2": (adapted(**LORA, build=decoder("gpt2", GPT), fan_in_fan_out=True), tokens),
    "LoRA on bert": (adapted(**LORA, build=transformer("AutoModelForMaskedLM", "bert", SIZES), task=None), masked),
    "LoRA on t5": (adapted(**LORA, build=transformer("AutoModelForSeq2SeqLM", "t5", T5), task="SEQ_2_SEQ_LM"), paired),
    "LoHa on llama": (adapted("LoHaConfig", task=None, r=2, target_modules=QUERIES, init_weights=False), tokens),
    "IA3 on llama": (adapted("IA3Config", init_ia3_weights=False), tokens),
    "AdaLoRA on llama": (adapted("AdaLoraConfig", total_step=10, init_r=4, target_r=2), tokens),
    "VeRA on llama": (adapted("VeraConfig", r=4, target_modules=QUERIES), tokens),
    "prompt tuning of llama": (adapted("PromptTuningConfig", num_virtual_tokens=3), masked),
    "prefix tuning of llama": (adapted("PrefixTuningConfig", num_virtual_tokens=3), masked),
}

# Smaller libraries


def quantize(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x, _, *rest = model.quantizer(in_order(model.encoder, x))
    return in_order(model.decoder, x), rest[0].mean() if rest else x.mean()


mlp = holds(
    lambda block, x: x + block.down(F.gelu(block.up(x))), up=lambda: nn.Linear(32, 48), down=lambda: nn.Linear(48, 32)
)
two = many(mlp, 2)


def quantizing(name: str, **options: Any) -> Build:
    """Makes a quantizer of vector-quantize-pytorch between blocks."""
    quantizer = imported("vector_quantize_pytorch", name, dim=32, codebook_size=16, **options)
    return holds(quantize, encoder=two, quantizer=quantizer, decoder=two)


QUANTIZERS: dict[str, Build] = {
    "VectorQuantize": quantizing("VectorQuantize", decay=0.8),
    "VectorQuantize, cosine": quantizing("VectorQuantize", use_cosine_sim=True),
    "ResidualVQ": quantizing("ResidualVQ", num_quantizers=2),
}


def mamba() -> nn.Module:
    library = import_module("mambapy.mamba")
    made: nn.Module = library.Mamba(library.MambaConfig(d_model=32, n_layers=3, d_state=4))
    return made


def attend(block: Any, x: Tensor, rotary: Any) -> Tensor:
    """lucidrains' rotary embeddings in the attention of blocks."""
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in block.qkv(x).chunk(3, -1))
    q, k = rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)
    return x + block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


ATTENTION: dict[str, Build] = dict(qkv=lambda: nn.Linear(32, 96), out=lambda: nn.Linear(32, 32))
rotary = imported("rotary_embedding_torch", "RotaryEmbedding", dim=8)
shared_rotary = holds(
    lambda model, x: in_order(model.blocks, x, model.rotary), rotary=rotary, blocks=many(holds(attend, **ATTENTION))
)
own_rotary = sequence(holds(lambda block, x: attend(block, x, block.rotary), **ATTENTION, rotary=rotary))


def images(family: str, models: Mapping[str, Build]) -> list[Case]:
    return [
        Case(name, family, build, image(64 if name in LARGE_IMAGES else 32), lengths=(8,))
        for name, build in models.items()
    ]


CASES: tuple[Case, ...] = (
    *images("torchvision", TORCHVISION),
    *images(
        "timm",
        {
            name: imported("timm", "create_model", name, pretrained=False, num_classes=5, **sizes)
            for name, sizes in TABLES["timm"].items()
        },
    ),
    *images("timm", {"MlpMixer": mixer}),
    *images(
        "segmentation-models-pytorch",
        {
            name: imported("segmentation_models_pytorch", name, "resnet18", encoder_weights=None, classes=3)
            for name in ("Unet", "FPN", "PSPNet", "DeepLabV3Plus")
        },
    ),
    *(
        replace(each, draw=arguments(normal(3, 32))) if each.name == "ViT 1D" else each
        for each in images("vit-pytorch", VITS)
    ),
    *DIFFUSERS,
    *(Case(name, "x-transformers", build, draw) for name, (build, draw) in XS.items()),
    *(Case(name, "torch_geometric", build, graph, lengths=(8,), microbatches=1) for name, build in GRAPHS.items()),
    *(
        Case(f"{name} of a fixed graph", "torch_geometric", build, batched_graph, lengths=(8,), samples=3)
        for name, build in (
            ("GCNConv", graph_blocks(imported(G, "GCNConv", 8, 8))),
            ("SAGEConv", graph_blocks(imported(G, "SAGEConv", 8, 8))),
        )
    ),
    *(Case(name, "peft", build, draw) for name, (build, draw) in ADAPTED.items()),
    *(Case(name, "vector-quantize-pytorch", build, vectors) for name, build in QUANTIZERS.items()),
    Case("Mamba", "mambapy", mamba, vectors),
    Case("rotary-embedding-torch", "x-transformers", shared_rotary, vectors, imports=("rotary_embedding_torch",)),
    Case("rotary-embedding-torch: in a block", WAYS_OUT, own_rotary, vectors, imports=("rotary_embedding_torch",)),
)
