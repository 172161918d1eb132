"""Models as their users have them, most of them from Hugging Face, and their training runs: by the pipeline, by the
oracle and by a plain loop.

Also jobs for the processes of the pool. Sizes are small, the weights random, everything in float64.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import penstock
from penstock.values.plans import require_schedule
from support import models
from support.exports import built_as
from support.training import Outcome, train, train_by_loop, train_by_oracle

VOCABULARY, LENGTH, WIDTH, SAMPLES, STEPS, MICROBATCHES = 50, 8, 16, 9, 3, 4

IMAGE = VOCABULARY - 1
"""The token in the places of patches of images."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    make: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    """Of as many samples, and perhaps of another length."""
    classes: int
    """The target is a class of as many, for each position of the output."""
    positions: tuple[int, ...] = ()
    """The output's dimensions between samples and classes."""

    @property
    def name(self) -> str:
        return next(name for name, subject in SUBJECTS.items() if subject is self)

    def build(self) -> nn.Module:
        """The model, the same at each call."""
        torch.manual_seed(0)
        return built_as(self.name, self.make().double().train())

    @property
    def batches(self) -> list[tuple[Inputs, Tensor]]:
        """Nine samples each: four microbatches of them are not equally large."""
        torch.manual_seed(1)
        return [
            (self.inputs(SAMPLES), torch.randint(0, self.classes, (SAMPLES, *self.positions))) for _ in range(STEPS)
        ]

    @property
    def sample(self) -> Inputs:
        """Keyword arguments of one microbatch."""
        torch.manual_seed(2)
        return self.inputs(2)


@dataclass(frozen=True)
class Run:
    """One training run of a subject. `cuts`: the first layers of the stages but the first; () for equal numbers.

    `replicas` of each stage (of each position of a pipeline, under `interleaved`); () is one each.
    """

    subject: str
    schedule: str
    stages: int
    stages_per_rank: int = 1
    cuts: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    split: bool = False
    microbatches: int = MICROBATCHES


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def make_pipeline(run: Run, **options: Any) -> penstock.Pipeline:
    """The pipeline of a run: all of it here, or this process's part."""
    subject = SUBJECTS[run.subject]
    return penstock.Pipeline(subject.build(), **{"sample": subject.sample, **_options(run), **options})


def run_in_pipeline(run: Run) -> Outcome:
    """The first batch is compared on two ranks only, which takes a third of a run: it is the same on more of them."""
    check = "warn" if run.stages <= 2 * run.stages_per_rank else "off"
    return train(make_pipeline(run, check=check), SUBJECTS[run.subject].batches)


def run_these(runs: list[Run]) -> list[Outcome]:
    """Several runs, one after the other, in the present process group."""
    return [run_in_pipeline(run) for run in runs]


@cache
def run_reference(run: Run) -> Outcome:
    subject = SUBJECTS[run.subject]
    return train_by_oracle(subject.build(), subject.batches, sample=subject.sample, **_options(run))


@cache
def run_plainly(subject: str) -> Outcome:
    """A training loop over the unsplit eager model, as its users write it."""
    chosen = SUBJECTS[subject]
    return train_by_loop(chosen.build(), chosen.batches, loss_fn, models.adamw, MICROBATCHES)


def _options(run: Run) -> dict[str, Any]:
    options = {"loss_fn": loss_fn, "optimizer": models.adamw, "seed": 5}
    if not run.cuts and not run.replicas:
        return {**options, "schedule": run.schedule, "stages": run.stages, "microbatches": run.microbatches}
    layers = LAYERS[run.subject]
    bounds = (0, *run.cuts, layers)
    if not run.cuts:
        bounds = tuple(layers * stage // run.stages for stage in range(run.stages + 1))
    ranks = run.stages // run.stages_per_rank
    groups = [tuple(range(*span)) for span in pairwise(accumulate(run.replicas or (1,) * ranks, initial=0))]
    places = require_schedule(run.schedule).layout.ranks(run.stages, ranks)
    stages = tuple(penstock.Stage(bounds[s], bounds[s + 1], groups[at]) for s, at in enumerate(places))
    routing = "split" if run.split else "round-robin"
    plan = penstock.Plan(stages, schedule=run.schedule, microbatches=run.microbatches, routing=routing)
    return {**options, "plan": plan}


def text(samples: int, length: int = LENGTH) -> Inputs:
    return {"input_ids": torch.randint(0, VOCABULARY, (samples, length))}


def padded(samples: int, length: int = LENGTH) -> Inputs:
    """Every sample of another length."""
    lengths = 2 + torch.arange(samples) % (length - 1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {**text(samples, length), "attention_mask": mask}


def translation(samples: int, length: int = LENGTH) -> Inputs:
    return {**text(samples, length), "decoder_input_ids": torch.randint(0, VOCABULARY, (samples, length - 2))}


def image(samples: int) -> Inputs:
    return {"pixel_values": torch.randn(samples, 3, 16, 16, dtype=torch.float64)}


def pictures(samples: int, length: int = LENGTH, patches: int = 4) -> Inputs:
    """Questions of different lengths, each about one image: its patches have places in the text behind the first word.

    Every third sample is not padded.
    """
    tokens = torch.randint(1, IMAGE, (samples, length))
    tokens[:, 1 : 1 + patches] = IMAGE
    mask = (torch.arange(length) < length - torch.arange(samples)[:, None] % 3).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, **image(samples)}


def gpt2(tied: bool, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=layers, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(key_value_heads: int, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=key_value_heads, max_position_embeddings=64,
        attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(tied: bool, layers: int = 2, **dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, tie_word_embeddings=tied, **dropout,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=8, num_labels=5, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5(decoder_layers: int = 2, **dropout: float) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        num_decoder_layers=decoder_layers, **dropout,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(  # type: ignore[call-arg]
        embedding_size=8, hidden_sizes=[8, WIDTH], depths=[2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def llava() -> nn.Module:
    """It makes a list of the images of a microbatch: its code up to the first layer of Llama is not traced."""
    config = transformers.LlavaConfig(  # type: ignore[call-arg]
        vision_config=transformers.CLIPVisionConfig(**_VISION), text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def smolvlm() -> nn.Module:
    """It searches for images that are no padding, and joins four patches to one."""
    config = transformers.SmolVLMConfig(
        vision_config=_VISION, text_config=transformers.LlamaConfig(**_TEXT), image_token_id=IMAGE, scale_factor=2
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def vipllava() -> nn.Module:
    config = transformers.VipLlavaConfig(  # type: ignore[call-arg]
        vision_config=transformers.CLIPVisionConfig(**_VISION), text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE, vision_feature_layers=[-1, -2],
    )  # fmt: skip
    return transformers.VipLlavaForConditionalGeneration(config)


def _one_patch(samples: int, length: int = LENGTH) -> Inputs:
    inputs = pictures(samples, length, patches=1)
    return {**inputs, "pixel_values": inputs["pixel_values"][:, None]}


def _lora() -> nn.Module:
    """The model itself is frozen; beside some of its matrices are two small ones to train."""
    import peft  # takes seconds, which most runs need not wait for

    # It asks transformers by a name of old.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`is_gradient_checkpointing` is deprecated")
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(tied=True, layers=4, dropout=0.1), config)


class Sharing(nn.Module):
    """Blocks in which one matrix is used again and again, in the blocks `shared`."""

    def __init__(self, blocks: int, shared: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks))
        for index in shared[1:]:
            self.blocks[index][1].weight = self.blocks[shared[0]][1].weight
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> transformers.utils.ModelOutput:  # type: ignore[name-defined]
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(hidden))


class Experts(nn.Module):
    """Sends each token to one of many linear layers, so that some get none; which ones depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 24)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))

    def forward(self, hidden: Tensor) -> Tensor:
        shares, chosen = self.router(hidden).softmax(-1).max(-1)
        result = hidden.clone()
        for index in chosen.unique().tolist():
            here = chosen == index
            result[here] = hidden[here] + shares[here][:, None] * self.experts[index](hidden[here])
        return result


class SharedExperts(nn.Module):
    """Two blocks of experts that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        experts = Experts()
        others = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList([experts, others[0], experts, others[1]])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(hidden)
        return result


_WORDS = {"classes": VOCABULARY, "positions": (LENGTH,)}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

SUBJECTS = {
    "gpt2": Subject(lambda: gpt2(tied=False), text, **_WORDS),
    "llama": Subject(lambda: llama(key_value_heads=4), text, **_WORDS),
    "llama-grouped": Subject(lambda: llama(key_value_heads=2), text, **_WORDS),
    "llama-padded": Subject(lambda: llama(key_value_heads=2), padded, **_WORDS),
    "bert": Subject(lambda: bert(tied=False, **NO_DROPOUT), padded, **_WORDS),
    "bert-dropout": Subject(lambda: bert(tied=False), padded, **_WORDS),
    "vit": Subject(vit, image, classes=5),
    "t5": Subject(t5, translation, classes=VOCABULARY, positions=(6,)),
    "resnet": Subject(resnet, image, classes=5),
    "gpt2-tied": Subject(lambda: gpt2(tied=True), text, **_WORDS),
    "bert-tied": Subject(lambda: bert(tied=True, **NO_DROPOUT), padded, **_WORDS),
    "neighbours": Subject(lambda: Sharing(4, (2, 3)), text, **_WORDS),
    "shared-experts": Subject(SharedExperts, text, **_WORDS),
    # With six layers or more, for two stages on each of three ranks, and with dropout where the model has it.
    "GPT2LMHeadModel": Subject(lambda: gpt2(tied=True, layers=4, dropout=0.1), text, **_WORDS),
    "LlamaForCausalLM": Subject(lambda: llama(key_value_heads=2, layers=4, dropout=0.1), padded, **_WORDS),
    "T5ForConditionalGeneration": Subject(
        lambda: t5(decoder_layers=1), translation, classes=VOCABULARY, positions=(6,)
    ),
    "BertForMaskedLM": Subject(lambda: bert(tied=True, layers=4), padded, **_WORDS),
    "ViTForImageClassification": Subject(lambda: vit(layers=4, dropout=0.1), image, classes=5),
    "ResNetForImageClassification": Subject(resnet, image, classes=5),
    "UNet": Subject(models.UNet, image, classes=5, positions=(16, 16)),
    "Recurrent": Subject(models.Recurrent, text, **_WORDS),
    "PeftModel": Subject(_lora, text, **_WORDS),
    "llava": Subject(llava, pictures, **_WORDS),
    "smolvlm": Subject(smolvlm, _one_patch, **_WORDS),
    "vipllava": Subject(vipllava, pictures, **_WORDS),
}

LAYERS = {"gpt2-tied": 4, "bert-tied": 4, "neighbours": 6, "shared-experts": 6}
"""Of the subjects that are planned by hand."""
