"""Sets the default cut beside the best one, by measured seconds: models on one device.

    python benchmarks/balance.py --save benchmarks/results/balance.txt

A model is captured and profiled twice, with its loss, one profile right after the other. *best* is the cut with the
least slowest stage by the first profile. The columns *work* (the default, which measures nothing) and *layers* say how
much longer the slowest stage of a cut takes than that of the best cut, by the first profile. *noise* is the same for
the cut that is best by the second profile: what another measurement would have chosen. Needs transformers and
diffusers; random weights.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.reports import Report, conditions, option_parser
from penstock.capturing.work_estimates import estimate_seconds

STAGES = (2, 4)
TOKENS, LENGTH = 16_000, 128


def texts(samples: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, TOKENS, (samples, LENGTH))}


def pictures(samples: int, size: int, name: str) -> dict[str, Tensor]:
    return {name: torch.randn(samples, 3, size, size)}


def logits_loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def noise_loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["sample"], target)


def of_transformers(auto: str, kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes models of transformers with random weights."""

    def build() -> nn.Module:
        transformers = import_module("transformers")
        made: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **sizes))
        return made

    return build


gpt2 = of_transformers(
    "AutoModelForCausalLM", "gpt2", vocab_size=TOKENS, n_embd=256, n_layer=12, n_head=8, n_positions=LENGTH,
    bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip
llama = of_transformers(
    "AutoModelForCausalLM", "llama", vocab_size=TOKENS, hidden_size=256, intermediate_size=688, num_hidden_layers=12,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
)  # fmt: skip
t5 = of_transformers(
    "AutoModelForSeq2SeqLM", "t5", vocab_size=TOKENS, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
vit = of_transformers(
    "AutoModelForImageClassification", "vit", hidden_size=256, num_hidden_layers=12, num_attention_heads=8,
    intermediate_size=1024, image_size=112, patch_size=8, num_labels=1000,
)  # fmt: skip
# The default sizes are those of ResNet-50.
resnet50 = of_transformers("AutoModelForImageClassification", "resnet", num_labels=1000)


def unet() -> nn.Module:
    made: nn.Module = import_module("diffusers").UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(32, 64, 128, 128),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    return made


def labelled(samples: int) -> Tensor:
    return torch.randint(1000, (samples,))


def next_tokens(samples: int) -> Tensor:
    return torch.randint(2, TOKENS, (samples, LENGTH))


SUBJECTS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor, Callable[[Any, Tensor], Tensor]]] = {
    "GPT-2": (gpt2, texts(4), next_tokens(4), logits_loss),
    "Llama": (llama, texts(4), next_tokens(4), logits_loss),
    "T5": (t5, texts(4) | {"decoder_input_ids": next_tokens(4)}, next_tokens(4), logits_loss),
    "ViT": (vit, pictures(4, 112, "pixel_values"), labelled(4), logits_loss),
    "ResNet-50": (resnet50, pictures(4, 192, "pixel_values"), labelled(4), logits_loss),
    "ResNet-50 small": (resnet50, pictures(4, 112, "pixel_values"), labelled(4), logits_loss),
    "U-Net": (
        unet,
        pictures(4, 32, "sample") | {"timestep": torch.tensor([1, 2, 3, 4])},
        torch.randn(4, 3, 32, 32),
        noise_loss,
    ),
}


def slowest(plan: penstock.Plan, seconds: Sequence[float]) -> float:
    return max(sum(seconds[stage.start : stage.stop]) for stage in plan.stages)


def measure(name: str, device: torch.device, iterations: int, layers: bool) -> list[str]:
    """The rows of one model, a row for each number of stages."""
    build, sample, target, loss_fn = SUBJECTS[name]
    torch.manual_seed(0)
    model = build().to(device)
    inputs, target = {key: value.to(device) for key, value in sample.items()}, target.to(device)
    chain = penstock.capture(model, inputs)
    estimated = estimate_seconds(chain, device)
    assert estimated is not None
    measured, again = (
        [
            layer.seconds
            for layer in penstock.profile(
                chain, inputs, loss_fn=loss_fn, target=target, iterations=iterations, progress=False
            ).layers
        ]
        for _ in range(2)
    )
    rows = []
    if layers:
        rows += [
            f"    {layer.name:<32}{1e3 * own:9.3f} ms estimated{1e3 * its:9.3f} ms measured"
            for layer, own, its in zip(chain.layers, estimated, measured, strict=True)
        ]
    for stages in STAGES:
        best = slowest(penstock.Plan.balanced(measured, stages), measured)
        cuts = (
            penstock.Plan.balanced(estimated, stages),
            penstock.Plan.uniform(len(measured), stages),
            penstock.Plan.balanced(again, stages),
        )
        work, uniform, noise = (slowest(plan, measured) / best - 1 for plan in cuts)
        rows.append(
            f"{name:<16}{len(measured):>7}{stages:>7}{1e3 * sum(measured):>9.1f} ms{1e3 * best:>9.1f} ms"
            f"{work:>9.1%}{uniform:>9.1%}{noise:>9.1%}"
        )
    return rows


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS), help="these models")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--layers", action="store_true", help="also show every layer")
    wish = parser.parse_args()
    report = Report(wish.save)
    report.add(
        conditions("benchmarks/balance.py"),
        f"device: {torch.cuda.get_device_name() if wish.device.type == 'cuda' else 'cpu'}\n",
        f"{'model':<16}{'layers':>7}{'stages':>7}{'model':>12}{'best':>12}{'work':>9}{'layers':>9}{'noise':>9}",
    )
    for name in wish.only:
        report.add(*measure(name, wish.device, wish.iterations, wish.layers))


if __name__ == "__main__":
    main()
