"""What the comparison of what traced code has read costs before each step, for models of 100 blocks.

    nice -n -20 python benchmarks/changes.py

Prints the places that are compared, and the least microseconds of a comparison.
"""

from collections.abc import Callable, Iterator
from timeit import repeat
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.capturing import capture

BLOCKS, CALLS, ROUNDS = 100, 100, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.active, self.gain = nn.Linear(8, 8), True, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Gated(Plain):
    """Reads two attributes of each block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if block.active:
                x = block.gain * block(x)
        return x


def llama() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=BLOCKS, **sizes))


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    yield "blocks in a row", Plain, (torch.randn(2, 8),)
    yield "two attributes of each block", Gated, (torch.randn(2, 8),)
    yield "Llama", llama, {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, make, sample in cases():
        reads = capture(make(), sample).reads
        least = min(repeat(reads.change, number=CALLS, repeat=ROUNDS)) / CALLS
        print(f"{name:30}{len(reads):5} places {least * 1e6:6.1f} us")
