"""Models of another project: transformers, captured unchanged."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock.capturing import LayerChain, capture
from penstock.capturing.samples import Call
from penstock.errors import CaptureError
from support.chain_execution import assert_equals_model
from support.jobs.transformer_jobs import (
    LENGTH,
    NO_DROPOUT,
    VOCABULARY,
    WIDTH,
    bert,
    gpt2,
    image,
    llama,
    padded,
    resnet,
    t5,
    text,
    translation,
    vit,
)


def mistral() -> nn.Module:
    """Its cache has a tensor in it for every layer."""
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, sliding_window=4,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def drawn(inputs: Callable[[int], dict[str, Tensor]]) -> "Inputs":
    """The same inputs for the same number of samples."""

    def draw(samples: int) -> dict[str, Tensor]:
        torch.manual_seed(samples)
        return inputs(samples)

    return draw


Build = Callable[[], nn.Module]
Inputs = Callable[[int], dict[str, Tensor]]

# Llama gets no mask: it would then compute attention in another way (and order of additions) if it knew of the trace.
LLAMA = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
T5 = [f"{part}.{layer}" for part in ("encoder", "decoder") for layer in ("embed_tokens", "block.0", "block.1")]
RESNET = [f"resnet.encoder.stages.{stage}.layers.{block}" for stage in range(2) for block in range(2)]
GPT2 = ["transformer.wte", *(f"transformer.h.{i}" for i in range(3)), "lm_head"]
BERT = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"]
VIT = ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"]
MODELS: list[Any] = [
    pytest.param(partial(gpt2, tied=True, layers=3), drawn(text), GPT2, id="gpt2"),
    pytest.param(partial(llama, key_value_heads=2), drawn(text), LLAMA, id="llama"),
    pytest.param(mistral, drawn(text), LLAMA, id="mistral"),
    pytest.param(partial(bert, tied=True, **NO_DROPOUT), drawn(padded), BERT, id="bert"),
    pytest.param(vit, drawn(image), VIT, id="vit"),
    pytest.param(partial(t5, dropout_rate=0.0), drawn(translation), [*T5, "lm_head"], id="t5"),
    pytest.param(resnet, drawn(image), ["resnet.embedder", *RESNET, "classifier.1"], id="resnet"),
]


def build(model: Build, **dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return model(**dropout).double().train()


def crossing(chain: LayerChain, call: Call) -> list[list[tuple[int, ...]]]:
    """Shapes of what crosses every inner cut."""
    inputs = chain.inputs.bind(call.args, call.kwargs)
    shapes = []
    with torch.no_grad():
        for cut in range(1, len(chain.layers)):
            shapes.append([tuple(value.shape) for value in chain.stage(0, cut)((), inputs)])
    return shapes


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "inputs", "names"), MODELS)
def test_a_transformer_in_pieces_equals_the_whole(model: Build, inputs: Inputs, names: list[str]) -> None:
    whole = build(model)
    chain = capture(whole, inputs(3))
    uses = Counter(id(parameter) for parameter in chain.parameters.values())
    summed = frozenset(name for name, parameter in chain.parameters.items() if uses[id(parameter)] > 2)

    assert [layer.name for layer in chain.layers] == names
    assert_equals_model(chain, whole, Call((), inputs(3)), summed)
    assert_equals_model(chain, whole, Call((), inputs(5)), summed)
    whole.eval()
    assert_equals_model(chain.evaluation(), whole, Call((), inputs(4)), summed)
    assert [layer.name for layer in chain.evaluation().layers] == names


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "inputs", "names"), MODELS[:5])
def test_only_hidden_states_cross_between_blocks(model: Build, inputs: Inputs, names: list[str]) -> None:
    chain = capture(build(model), inputs(3), check=False)

    for shapes in crossing(chain, Call((), inputs(3))):
        assert len(shapes) == 1
        assert shapes[0][0] == 3
        assert shapes[0][-1] == WIDTH


@pytest.mark.slow
def test_t5_sends_what_its_blocks_pass() -> None:
    chain = capture(build(t5, dropout_rate=0.0), drawn(translation)(3), check=False)
    hidden, bias = (3, LENGTH, WIDTH), (3, 2, LENGTH, LENGTH)
    decoded, decoded_bias = (3, 6, WIDTH), (3, 2, 6, 6)

    found = [sorted(shapes) for shapes in crossing(chain, Call((), drawn(translation)(3)))]

    # The encoder's result is an output of the model, and rides along to the end. A block of the decoder returns two
    # biases, one of them all zeros for the attention to the encoder's result.
    assert [len(shapes) for shapes in found] == [1, 2, 1, 2, 4, 2]
    assert found[0] == [hidden]
    assert found[2] == [hidden]
    assert hidden in found[1]
    assert found[3] == sorted([decoded, hidden])
    assert {decoded, hidden} <= set(found[4])
    assert found[5] == sorted([decoded, hidden])
    assert all(
        s in (hidden, bias, decoded, decoded_bias, (1, *bias[1:]), (1, *decoded_bias[1:]), (1, 2, 6, LENGTH))
        for f in found
        for s in f
    )


def test_the_tied_weights_of_gpt2_are_one_parameter() -> None:
    model = build(partial(gpt2, tied=True, layers=3))
    chain = capture(model, text(3), check=False)

    assert chain.parameters["lm_head.weight"] is model.get_parameter("transformer.wte.weight")
    assert chain.readers["lm_head.weight"] == (0, len(chain.layers) - 1)
    assert chain.readers["transformer.h.1.mlp.c_fc.weight"] == (2,)


@pytest.mark.parametrize("collected", ["hidden_states", "attentions"])
def test_what_hooks_of_the_models_own_code_collect_is_returned(collected: str) -> None:
    """The code of transformers installs the hooks when it first runs, and they stay for good: not in a capture."""
    model = build(partial(llama, key_value_heads=2))
    model.config._attn_implementation = "eager"
    sample = {**drawn(text)(2), f"output_{collected}": True}
    chain = capture(model, sample)

    assert not any(module._forward_hooks for module in model.modules())
    assert_equals_model(chain, model, Call((), {**sample, **drawn(text)(3)}))


def test_hooks_that_an_earlier_call_installed_are_not_traced() -> None:
    model = build(partial(llama, key_value_heads=2))
    sample = {**drawn(text)(2), "output_hidden_states": True}
    model(**sample)

    with pytest.raises(CaptureError, match=r"returns 4 tensors, and 1 of them in a trace .* before the model is first"):
        capture(model, sample)


@pytest.mark.parametrize("seed", [0, 1])
def test_float32_is_judged_by_its_own_rounding(seed: int) -> None:
    """With a mask, the trace computes attention by another kernel. Gradients are sums of some hundreds here."""
    config = transformers.Lfm2Config(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Lfm2ForCausalLM(config)
    ids = torch.randint(3, 97, (2, 16))

    capture(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False})
