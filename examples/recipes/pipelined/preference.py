"""Finetunes a Llama by preferences (DPO): of two continuations the chosen one is to become the likelier."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()


class Likelihoods(nn.Module):
    """The logarithms of the probabilities of both texts of each pair."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.language_model = LlamaForCausalLM(config)

    def forward(self, pairs: Tensor) -> Tensor:  # (B, 2, T), the chosen text first -> (B, 2)
        texts = pairs.flatten(0, 1)
        scores = self.language_model(input_ids=texts, use_cache=False).logits[:, :-1].log_softmax(-1)
        found = scores.gather(-1, texts[:, 1:, None]).squeeze(-1).sum(-1)
        return found.view(-1, 2)


def preference_loss(found: Tensor, reference: Tensor) -> Tensor:
    gains = 0.1 * (found - reference)
    return -F.logsigmoid(gains[:, 0] - gains[:, 1]).mean()


rows = torch.randint(256, (options.steps, 16, 2, 32), generator=torch.Generator().manual_seed(1))
rows[:, :, 0] = rows[:, :, 0].sort().values  # chosen: texts in order

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=4,
    num_attention_heads=4,
)
model = Likelihoods(config).double()
with torch.no_grad():
    references = [model(pairs) for pairs in rows]
pipe = penstock.Pipeline(
    model, (rows[0, :4],), preference_loss, lambda params: torch.optim.AdamW(params, lr=1e-3), microbatches=4
)
for batch, reference in zip(rows, references, strict=True):
    begun = time.perf_counter()
    loss = pipe.step(batch, reference).loss
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
