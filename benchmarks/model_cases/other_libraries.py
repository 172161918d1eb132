"""Models of x-transformers, PyTorch Geometric, PEFT and of smaller libraries, small and with random weights."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_cases.cases import Case
from model_cases.pages import WAYS_OUT
from model_cases.transformers_text import GPT, SIZES, T5, masked, paired, tokens, transformer
from model_cases.vision_libraries import imported

__all__ = ["CASES"]

X = "x_transformers"


def words(samples: int, length: int) -> tuple[Tensor]:
    return (torch.randint(0, 99, (samples, length)),)


def vectors(samples: int, length: int) -> tuple[Tensor]:
    return (torch.randn(samples, length, 32),)


def x_decoder(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = import_module(X)
        layers = library.Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
        made: nn.Module = library.TransformerWrapper(num_tokens=99, max_seq_len=32, attn_layers=layers)
        return made

    return build


def x_encoder(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = import_module(X)
        layers = library.Encoder(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
        made: nn.Module = library.TransformerWrapper(num_tokens=99, max_seq_len=32, attn_layers=layers)
        return made

    return build


def with_mask(samples: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(samples, length, dtype=torch.bool)
    mask[0, -2:] = False
    return {"x": torch.randint(0, 99, (samples, length)), "mask": mask}


class Continuous(nn.Module):
    """x-transformers between linear layers of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = import_module(X).Encoder(dim=32, depth=4, heads=4, attn_dim_head=8)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


XS = {
    "Decoder": (x_decoder(), words),
    "Decoder, rotary": (x_decoder(rotary_pos_emb=True), words),
    "Decoder, ALiBi": (x_decoder(alibi_pos_bias=True, alibi_num_heads=2), words),
    "Decoder, RMSNorm and GLU": (x_decoder(use_rmsnorm=True, ff_glu=True), words),
    "Decoder, T5 bias": (x_decoder(rel_pos_bias=True), words),
    "Decoder, memory keys": (x_decoder(attn_num_mem_kv=4), words),
    "Encoder": (x_encoder(), words),
    "Encoder, mask": (x_encoder(), with_mask),
    "Encoder, sandwich": (x_encoder(sandwich_coef=2), words),
    "Encoder in a model": (Continuous, vectors),
}


# Graphs. A batch is one graph, so that there is one microbatch.


def graph(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Six nodes for every sample, and edges between them."""
    nodes = 6 * samples
    return torch.randn(nodes, 8), torch.stack([torch.arange(nodes), (torch.arange(nodes) * 5 + 1) % nodes])


def batched_graph(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Features of the same graph for every sample."""
    return torch.randn(samples, 7, 8), torch.stack([torch.arange(7), (torch.arange(7) * 3 + 1) % 7])


class GraphStack(nn.Module):
    """Convolutions of a library, one after the other."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        library = import_module("torch_geometric.nn")
        make = getattr(library, name)
        self.convolutions = nn.ModuleList(make(8, 8, **options) for _ in range(4))
        self.norms = nn.ModuleList(library.GraphNorm(8) if name == "GCNConv" else nn.LayerNorm(8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + norm(convolution(x, edges)).relu()
        return self.head(x)


class Residual(nn.Module):
    """Blocks of a convolution and what is around it."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GraphBlock(make(import_module("torch_geometric.nn"))) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edges)
        return x


class GraphBlock(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = convolution, nn.LayerNorm(8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x, edges)).relu()


G = "torch_geometric.nn"
GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "GCN": imported(G, "GCN", 8, 8, 4, out_channels=3, norm="batch_norm"),
    "GAT": imported(G, "GAT", 8, 8, 4, out_channels=3),
    "GAT v2": imported(G, "GAT", 8, 8, 4, out_channels=3, v2=True),
    "GraphSAGE": imported(G, "GraphSAGE", 8, 8, 4, out_channels=3, jk="cat"),
    "GIN": imported(G, "GIN", 8, 8, 4, out_channels=3),
    "EdgeCNN": imported(G, "EdgeCNN", 8, 8, 4, out_channels=3),
    "GraphUNet": imported(G, "GraphUNet", 8, 8, 3, depth=2),
    "GCNConv in a list": lambda: GraphStack("GCNConv"),
    "GATConv in a list": lambda: GraphStack("GATConv", heads=2, concat=False),
    "TransformerConv in a list": lambda: GraphStack("TransformerConv", heads=2, concat=False),
    "ChebConv in a list": lambda: GraphStack("ChebConv", K=2),
    "GINConv in blocks": lambda: Residual(
        lambda library: library.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    ),
    "GATv2Conv in blocks": lambda: Residual(lambda library: library.GATv2Conv(8, 4, heads=2)),
    "GatedGraphConv in blocks": lambda: Residual(lambda library: library.GatedGraphConv(8, 2)),
}


# PEFT


def adapted(build: Callable[[], nn.Module], kind: str, **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        peft = import_module("peft")
        config = getattr(peft, kind)(**options)
        model: nn.Module = peft.get_peft_model(build(), config)
        return model

    return made


CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LLAMA = transformer("AutoModelForCausalLM", "llama", SIZES)
ADAPTED = {
    "LoRA on llama": (adapted(LLAMA, "LoraConfig", r=2, init_lora_weights=False, **CAUSAL), tokens),
    "DoRA on llama": (adapted(LLAMA, "LoraConfig", r=2, use_dora=True, init_lora_weights=False, **CAUSAL), tokens),
    "LoRA on gpt2": (
        adapted(
            transformer("AutoModelForCausalLM", "gpt2", GPT),
            "LoraConfig",
            r=2,
            init_lora_weights=False,
            fan_in_fan_out=True,
            **CAUSAL,
        ),
        tokens,
    ),
    "LoRA on bert": (
        adapted(transformer("AutoModelForMaskedLM", "bert", SIZES), "LoraConfig", r=2, init_lora_weights=False),
        masked,
    ),
    "LoRA on t5": (
        adapted(
            transformer("AutoModelForSeq2SeqLM", "t5", T5),
            "LoraConfig",
            r=2,
            init_lora_weights=False,
            task_type="SEQ_2_SEQ_LM",
        ),
        paired,
    ),
    "LoHa on llama": (
        adapted(LLAMA, "LoHaConfig", r=2, target_modules=["q_proj", "v_proj"], init_weights=False),
        tokens,
    ),
    "IA3 on llama": (adapted(LLAMA, "IA3Config", init_ia3_weights=False, **CAUSAL), tokens),
    "AdaLoRA on llama": (adapted(LLAMA, "AdaLoraConfig", total_step=10, init_r=4, target_r=2, **CAUSAL), tokens),
    "VeRA on llama": (adapted(LLAMA, "VeraConfig", r=4, target_modules=["q_proj", "v_proj"], **CAUSAL), tokens),
    "prompt tuning of llama": (adapted(LLAMA, "PromptTuningConfig", num_virtual_tokens=3, **CAUSAL), masked),
    "prefix tuning of llama": (adapted(LLAMA, "PrefixTuningConfig", num_virtual_tokens=3, **CAUSAL), masked),
}


class Quantizing(nn.Module):
    """A quantizer of vector-quantize-pytorch between blocks."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Mlp() for _ in range(2))
        self.quantizer = getattr(import_module("vector_quantize_pytorch"), name)(**options)
        self.decoder = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.encoder:
            x = block(x)
        x, _, *rest = self.quantizer(x)
        for block in self.decoder:
            x = block(x)
        return x, rest[0].mean() if rest else x.mean()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


QUANTIZERS = {
    "VectorQuantize": lambda: Quantizing("VectorQuantize", dim=32, codebook_size=16, decay=0.8),
    "VectorQuantize, cosine": lambda: Quantizing("VectorQuantize", dim=32, codebook_size=16, use_cosine_sim=True),
    "ResidualVQ": lambda: Quantizing("ResidualVQ", dim=32, num_quantizers=2, codebook_size=16),
}


def mamba() -> nn.Module:
    library = import_module("mambapy.mamba")
    made: nn.Module = library.Mamba(library.MambaConfig(d_model=32, n_layers=3, d_state=4))
    return made


class RotaryModel(nn.Module):
    """lucidrains' rotary embeddings in the attention of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = import_module("rotary_embedding_torch").RotaryEmbedding(dim=8)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = rotary.rotate_queries_or_keys(q), rotary.rotate_queries_or_keys(k)  # type: ignore[operator]
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OwnRotaryBlock(RotaryBlock):
    """Has rotary embeddings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = import_module("rotary_embedding_torch").RotaryEmbedding(dim=8)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.rotary)


CASES: tuple[Case, ...] = (
    *(Case(name, "x-transformers", build, draw) for name, (build, draw) in XS.items()),
    *(Case(name, "torch_geometric", build, graph, lengths=(8,), microbatches=1) for name, build in GRAPHS.items()),
    Case(
        "GCNConv of a fixed graph",
        "torch_geometric",
        lambda: Residual(lambda library: library.GCNConv(8, 8)),
        batched_graph,
        lengths=(8,),
        samples=3,
    ),
    Case(
        "SAGEConv of a fixed graph",
        "torch_geometric",
        lambda: Residual(lambda library: library.SAGEConv(8, 8)),
        batched_graph,
        lengths=(8,),
        samples=3,
    ),
    *(Case(name, "peft", build, draw) for name, (build, draw) in ADAPTED.items()),
    *(Case(name, "vector-quantize-pytorch", build, vectors) for name, build in QUANTIZERS.items()),
    Case("Mamba", "mambapy", mamba, vectors),
    Case("rotary-embedding-torch", "x-transformers", RotaryModel, vectors, imports=("rotary_embedding_torch",)),
    Case(
        "rotary-embedding-torch: in a block",
        WAYS_OUT,
        lambda: nn.Sequential(*(OwnRotaryBlock() for _ in range(4))),
        vectors,
        imports=("rotary_embedding_torch",),
    ),
)
