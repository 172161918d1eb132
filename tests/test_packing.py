"""Packed sequences: balanced by seconds, and with the losses of a loop over each sequence by itself."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

import penstock
from penstock import LayerProfile, PenstockError, Profile

RATES = 1e-4, 1e-6
"""Seconds of a token, and of its square."""


def profile(length: int, *, samples: int = 2) -> Profile:
    seconds = samples * (RATES[0] * length + RATES[1] * length**2)
    layer = LayerProfile("blocks", seconds / 3, 2 * seconds / 3, 0, samples * 100 * length, 0)
    return Profile((layer,), microbatch_size=samples)


PROFILES = {100: profile(100), 400: profile(400, samples=1), 1000: profile(1000)}


def longest(lengths: list[int], groups: Sequence[Sequence[int]]) -> float:
    return max(sum(RATES[0] * lengths[i] + RATES[1] * lengths[i] ** 2 for i in group) for group in groups)


def test_the_longest_microbatch_is_near_the_best() -> None:
    """The best of all ways to deal them; and in most cases it is found."""
    draw, best = Random(0), 0
    for _ in range(60):
        lengths = [draw.choice([5, 40, 100, 300, 900]) + draw.randrange(50) for _ in range(draw.randint(3, 8))]
        count = draw.randint(2, 3)
        groups = penstock.pack(lengths, PROFILES, microbatches=count)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        assert len(groups) == count and all(groups)
        ways = product(range(count), repeat=len(lengths))
        least = min(
            longest(lengths, [[i for i, at in enumerate(way) if at == g] for g in range(count)]) for way in ways
        )
        found = longest(lengths, groups)
        assert found <= 1.2 * least
        best += found <= least * (1 + 1e-9)
    assert best >= 45


def test_attention_counts_with_the_square_of_the_length() -> None:
    """One long sequence takes as long as all others, which have three times the tokens."""
    lengths = [1000, *[100] * 30]
    groups = penstock.pack(lengths, {length: profile(length) for length in (100, 1000)}, microbatches=2)
    assert longest(lengths, groups) == pytest.approx(1.1)
    by_tokens = penstock.pack(lengths, 1e-4, microbatches=2)
    assert longest(lengths, by_tokens) > 1.1 * longest(lengths, groups)


def test_a_limit_in_bytes() -> None:
    """100 bytes of a token."""
    lengths = [500, 400, 300, 200, 100]
    groups = penstock.pack(lengths, PROFILES, microbatches=3, memory_bytes=50_000)
    assert max(sum(lengths[i] for i in group) for group in groups) == 500
    with pytest.raises(PenstockError, match=r"found 1\.5e\+05 bytes that do not: pass microbatches=3"):
        penstock.pack(lengths, PROFILES, microbatches=2, memory_bytes=60_000)
    with pytest.raises(PenstockError, match=r"found sequence 0 of 500 tokens with 5e\+04: cut it"):
        penstock.pack(lengths, PROFILES, microbatches=2, memory_bytes=40_000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"microbatches": 4}, "a sequence for each of 4 microbatches, found 3: pass more, or microbatches=3"),
        ({"microbatches": 0}, "microbatches"),
        ({"lengths": [3, 0, 1]}, r"lengths=\)\[1\]: expected a whole number of tokens"),
        ({"profiles": {}}, "a profile at least"),
        ({"profiles": {"long": PROFILES[100]}}, "by the length of its sequences"),
        ({"profiles": {5: 1.0}}, "expected Profiles, found 1.0"),
        ({"profiles": 1e-3, "memory_bytes": 5.0}, "which say what sequences keep"),
        ({"profiles": -1.0}, "seconds of a token"),
    ],
)
def test_refusals(given: dict[str, Any], said: str) -> None:
    options = {"lengths": [3, 2, 1], "profiles": PROFILES, "microbatches": 2, **given}
    with pytest.raises(PenstockError, match=said):
        penstock.pack(options.pop("lengths"), options.pop("profiles"), **options)


def test_no_microbatch_is_empty_where_nothing_takes_time() -> None:
    assert penstock.pack([1, 1], {4: Profile((LayerProfile("b", 0, 0, 0, 0, 0),), 1)}, microbatches=2) == ((0,), (1,))


def test_what_is_no_sequence_is_refused() -> None:
    for wrong in ([], [torch.zeros(2, 3)], [torch.zeros(0)], ["text"]):
        with pytest.raises(PenstockError, match="one dimension"):
            penstock.packed_batch(wrong)  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match=r"a label for each token, \[2\], found \[3\]"):
        penstock.packed_batch([torch.zeros(2)], [torch.zeros(3)])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_losses_and_weights_are_those_of_a_loop_over_each_sequence(attention: str) -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        config._attn_implementation = attention
        return transformers.LlamaForCausalLM(config).double()

    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 50, (size,), generator=generator) for size in (7, 3, 12, 5, 9, 4, 2, 8)]
    expected, losses = build(), []
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    total = sum(len(text) - 1 for text in texts)
    for _ in range(2):
        optimizer.zero_grad()
        # A text of n tokens has n - 1 that are predicted.
        parts = [expected(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) / total for text in texts]
        losses.append(sum(float(part.detach()) for part in parts))
        torch.autograd.backward(parts)
        optimizer.step()

    model = build()
    with penstock.Pipeline(
        model,
        penstock.packed_batch(texts[:3]),
        penstock.model_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=2,
        microbatches=3,
        loss_weight=penstock.token_count("labels", shifted=True),
    ) as pipe:
        for count, loss in zip((3, 2), losses, strict=True):
            groups = penstock.pack(list(map(len, texts)), 1e-3, microbatches=count)
            batches = [penstock.packed_batch([texts[i] for i in group]) for group in groups]
            # Transformers computes losses in float32.
            assert float(pipe.step(penstock.Microbatches(batches)).loss) == pytest.approx(loss, rel=1e-6)
    for name, tensor in expected.state_dict().items():
        # The softmax of its eager attention is one of float32, too.
        rtol, atol = (1e-4, 1e-7) if attention == "eager" else (1e-12, 1e-14)
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=rtol, atol=atol)
