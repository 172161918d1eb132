"""Trains a small byte-level GPT on the sources of this machine's Python standard library.

Nothing is downloaded, and the model below contains no pipeline code. One process with all stages:

    python examples/train_gpt.py --config configs/gpt.yaml --stages 3

Three processes with a stage each:

    torchrun --nproc-per-node 3 examples/train_gpt.py --config configs/gpt.yaml
"""

import math
import sysconfig
import time
from pathlib import Path

import session
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import penstock

BYTES = 256
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages"}


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self.byte(tokens) + self.position


class Attention(nn.Module):
    """Causal self-attention: each byte attends to itself and to earlier bytes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, length, width = x.shape
        query, key, value = self.projections(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, C / H)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


class Head(nn.Module):
    """The score of every byte that may come next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, 256)
        return self.linear(self.norm(x))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embedding = Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = Head(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def read_text(limit_bytes: int) -> tuple[Tensor, Tensor]:
    """The training and the validation bytes: every tenth file of the standard library is for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    paths = (
        path for path in sorted(library.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)
    )
    for index, path in enumerate(paths):
        if size >= limit_bytes:
            break
        content = path.read_bytes()
        parts[index % 10 == 9].append(content)
        size += len(content)
    training, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return training, validation


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte for a model that predicts the frequencies of the bytes alone."""
    frequency = torch.bincount(text.long(), minlength=BYTES).double() / len(text)
    return float(-(frequency * frequency.clamp_min(1e-300).log()).sum())


def draw(text: Tensor, samples: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for every byte in them, the one that follows; both (samples, context)."""
    starts = torch.randint(len(text) - context, (samples, 1), generator=generator)
    windows = text[(starts + torch.arange(context + 1)).to(text.device)].long()
    return windows[:, :-1], windows[:, 1:]


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    """Nats per byte."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def continue_text(pipe: penstock.Pipeline, prompt: Tensor, count: int, generator: torch.Generator) -> bytes:
    """`count` bytes drawn from the model one after the other, after those of `prompt`, which fills the context."""
    window = prompt[None]
    drawn = bytearray()
    for _ in range(count):
        scores = pipe.predict(window)[0, -1]
        following = torch.multinomial(F.softmax(scores / 0.7, dim=-1).cpu(), 1, generator=generator)
        window = torch.cat([window[:, 1:], following[None].to(window.device)], dim=1)
        drawn.append(int(following))
    return bytes(drawn)


def make_model() -> penstock.Subject:
    """The model, a microbatch as configs/gpt.yaml has them, and the loss, for ``penstock profile``."""
    windows = torch.randint(BYTES, (4, 129))
    model = GPT(context=128, width=128, heads=4, blocks=4)
    return penstock.Subject(model, (windows[:, :-1],), loss_fn=loss_fn, target=windows[:, 1:])


def train(
    pipe: penstock.Pipeline,
    text: Tensor,
    expected: penstock.Timeline,
    options: session.Options,
    generator: torch.Generator,
) -> None:
    """`options.steps` minibatches, with a progress bar on rank 0."""
    started = time.perf_counter()
    bar = tqdm(range(options.steps), desc="train", unit="step", disable=pipe.rank != 0, mininterval=1.0)
    for step in bar:
        result = pipe.step(*draw(text, options.batch_size, options.context, generator))
        if step % 20 == 19:
            bar.set_postfix(loss=f"{float(result.loss):.3f}", refresh=False)
    session.compare(pipe, expected)
    pipe.drain()
    tokens = options.steps * options.batch_size * options.context
    session.say(f"{tokens / (time.perf_counter() - started):,.0f} tokens per second")


def main() -> None:
    parser = session.option_parser("Trains a small byte-level GPT on the sources of the Python standard library.")
    parser.add_argument("--text-bytes", type=int, default=4_000_000, help="how much text to read")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=128, help="size of the vectors between the blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads in a block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks in the model")
    parser.add_argument("--sampled-bytes", type=int, default=200, help="bytes to draw from the model at the end")
    options = session.read_options(parser)
    device = penstock.local_device()
    training, validation = (text.to(device) for text in read_text(options.text_bytes))
    entropy = unigram_entropy(validation)

    session.join_processes()
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = GPT(options.context, options.width, options.heads, options.blocks).to(device)
    sample = draw(training, options.batch_size // options.microbatches, options.context, generator)[:1]
    pipe, expected = session.build(model, sample, loss_fn, options)

    held_out = draw(validation, 64, options.context, generator)
    session.say(f"text: {len(training):,} bytes to train on, {len(validation):,} to validate with")
    session.say(f"validation loss before: {float(pipe.evaluate(*held_out).loss):.3f} nats per byte")
    train(pipe, training, expected, options, generator)
    session.say(
        f"validation loss after: {float(pipe.evaluate(*held_out).loss):.3f} nats per byte "
        f"(knowing only how frequent each byte is: {entropy:.3f}; knowing nothing: {math.log(BYTES):.3f})"
    )
    drawn = continue_text(pipe, held_out[0][0], options.sampled_bytes, generator)
    session.say(f"the model continues a text of the validation files:\n{drawn.decode(errors='replace')}")


if __name__ == "__main__":
    main()
