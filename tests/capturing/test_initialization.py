"""A model on the meta device gets the same weights however its layers are spread, and only where they are held."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.capturing.initialization import InitFn, initialize, named_tensors, reset_parameters
from penstock.capturing.weightless import asks_for_weights, capture_weightless, is_weightless
from penstock.errors import CaptureError, PenstockError
from penstock.torch_internals.dispatch import OperatorMode
from support import models
from support.processes import Pool
from support.random_models import Averaging
from support.training import Case

BUILDS: dict[str, Callable[[], nn.Module]] = {"layered": models.layered, "normalized": models.Normalized}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, in float64, without memory."""
    with torch.device("meta"):
        return build().double()


def draw(name: str, tensor: Tensor) -> None:
    """An init_fn: normal numbers, and what a constructor would compute."""
    if name == "table":
        tensor.copy_(torch.arange(float(tensor.numel())).sin())
    elif tensor.is_floating_point():
        tensor.normal_(std=0.3)
    else:
        tensor.zero_()


def train_from_nothing(case: Case) -> tuple[tuple[float, ...], dict[str, Tensor], list[str]]:
    """Losses and weights of this process's part of a training, and the parameters that take memory in it."""
    model = on_meta(BUILDS[case.subject])
    pipe = penstock.Pipeline(model, init_fn=draw, **case.options)
    losses = [pipe.step(x, y).loss for x, y in case.batches]
    pipe.drain()
    evaluated = pipe.evaluate(*case.batches[0])
    state = pipe.state_dict()["model"]
    held = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    found = (*(float(loss) for loss in losses), float(evaluated.loss))
    pipe.close()
    return found, {name: tensor.clone() for name, tensor in state.items()}, held


class Positioned(nn.Module):
    """Tied weights, a table that the constructor computes and no state dict holds, a parameter in the root, dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(width)).sin(), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        # Made where the input is: on the meta device while it is captured, on the CPU when it runs.
        x = x * self.scale + self.table + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = self.dropout(block(x)) + x
        return self.head(x)


@cache
def spread(build: Callable[[], nn.Module], stages: int, init_fn: InitFn, seed: int = 0) -> list[dict[str, Tensor]]:
    """What each of these processes holds: its tensors, by their first names."""
    held = []
    for index in range(stages):
        model = on_meta(build)
        weightless = capture_weightless(model, (torch.ones(2, 6, dtype=torch.float64),))
        stage = penstock.Plan.uniform(len(weightless.chain.layers), stages).stages[index]
        weightless.materialize(range(stage.start, stage.stop), init_fn, seed)
        held.append({name: tensor for name, tensor in named_tensors(model).items() if not tensor.is_meta})
    return held


@pytest.mark.parametrize("build", [Positioned, models.layered], ids=["traced", "layers"])
def test_weights_do_not_depend_on_the_number_of_stages(build: Callable[[], nn.Module]) -> None:
    whole = named_tensors(initialize(on_meta(build), draw, seed=4))

    for stages in (1, 4):
        held = spread(build, stages, draw, seed=4)
        assert set().union(*held) == set(whole)
        for part in held:
            for name, tensor in part.items():
                assert torch.equal(tensor, whole[name]), name


def test_another_seed_gives_other_weights_and_no_two_tensors_are_alike() -> None:
    first, second = (named_tensors(initialize(on_meta(models.Perceptron), draw, seed=seed)) for seed in (0, 1))
    weights = [tensor for name, tensor in first.items() if name.endswith("0.weight")]

    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_process_holds_its_own_layers_only() -> None:
    """Tied weights are held wherever they are read, and what no layer reads is held where the first layer is."""
    held = spread(Positioned, 4, draw, seed=4)

    assert "blocks.0.0.weight" in held[0] and "blocks.0.0.weight" not in held[3]
    first = {"unused.weight", "steps", "scale", "table"}
    assert [part.keys() & first for part in held] == [first, set(), set(), set()]
    assert held[3].keys() == {"head.weight", "head.bias"}
    assert sum(len(part) for part in held) == len(set().union(*held)) + 1  # the tied one is in two


@pytest.mark.parametrize("build", [Positioned, models.layered], ids=["traced", "layers"])
def test_the_chain_computes_what_the_model_does(build: Callable[[], nn.Module]) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    model = on_meta(build)
    weightless = capture_weightless(model, (x[:2],))
    count = len(weightless.chain.layers)
    chain = weightless.materialize(range(count), draw, 0)
    expected = initialize(on_meta(build), draw).eval()

    assert any(module.training for module in model.modules())
    model.eval()
    assert torch.equal(chain.evaluation().stage(0, count)((), {"args[0]": x})[0], expected(x))
    assert any(layer.random for layer in chain.layers)
    assert {id(p) for p in chain.parameters.values()} == {id(p) for p in model.parameters()}
    assert all(chain.readers[name] for name in chain.parameters if not name.startswith("unused"))
    assert not is_weightless(model)


def expected_of(case: Case) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """The losses of the oracle, which starts from the same weights, and its state."""
    model = initialize(on_meta(BUILDS[case.subject]), draw, seed=3)
    reference = penstock.reference_train(model, case.batches, **case.options)
    return reference.losses, reference.state


@pytest.mark.slow
def test_a_pipeline_and_the_oracle_start_from_the_same_weights() -> None:
    """Traced, with BatchNorm and dropout, and in layers."""
    for case in (Case("normalized", "2bw", 3, 4), Case("layered", "pipedream", 4, 4), Case("layered", "gpipe", 1, 4)):
        losses, state, held = train_from_nothing(case)
        wanted, weights = expected_of(case)
        assert losses[:-1] == wanted
        assert all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
        assert len(held) == len(list(case.build().parameters()))


@pytest.mark.parametrize("case", [Case("layered", "2bw", 3, 4), Case("layered", "pipedream", 2, 4, replicas=(2, 1))])
def test_processes_make_the_weights_of_their_own_stages(case: Case, pool: Pool) -> None:
    wanted, weights = expected_of(case)
    results = pool.run(3, train_from_nothing, case)

    for losses, state, held in results:
        assert losses[:-1] == wanted
        assert all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
        assert set(held) == state.keys() & dict(models.layered().named_parameters()).keys()
    assert len({losses[-1] for losses, _, _ in results}) == 1
    assert len(results[0][2]) < len(list(models.layered().parameters()))


def test_what_is_not_on_the_meta_device_keeps_its_values() -> None:
    def build() -> nn.Module:
        model = Positioned()
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, nn.Parameter(parameter.detach().to("meta")))
        return model.double()

    def init_fn(name: str, tensor: Tensor) -> None:
        assert name not in ("table", "steps")
        tensor.normal_()

    model = build()
    model.register_buffer("table", torch.arange(6.0, dtype=torch.float64).sin(), persistent=False)
    table = model.table.clone()
    weightless = capture_weightless(model, (torch.ones(2, 6, dtype=torch.float64),))
    weightless.materialize(range(len(weightless.chain.layers)), init_fn, 0)

    assert torch.equal(model.table, table)
    assert int(model.steps) == 0


def test_modules_reset_themselves() -> None:
    """Each tensor as its own module makes it, in the stream of its name: layers that are alike are not equal."""
    model = initialize(on_meta(models.Normalized), reset_parameters(on_meta(models.Normalized)), seed=2)
    block = model.blocks[0]

    assert float(block.linear.weight.detach().abs().max()) <= 6**-0.5
    assert not torch.equal(block.linear.weight, model.blocks[1].linear.weight)
    assert torch.equal(block.norm.weight, torch.ones(6, dtype=torch.float64))
    assert torch.equal(block.norm.running_var, torch.ones(6, dtype=torch.float64))
    assert int(block.norm.num_batches_tracked) == 0


class Scaled(nn.Module):
    """Initializes its children, as many transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.MultiheadAttention(4, 2)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=5.0)
            nn.init.constant_(module.bias, 7.0)


def test_a_model_initializes_its_modules() -> None:
    model = on_meta(Scaled)
    initialize(model, reset_parameters(model))

    assert float(model.first.weight.detach().abs().max()) > 2.0
    assert torch.equal(model.first.bias, torch.full((4,), 7.0, dtype=torch.float64))
    assert float(model.second.in_proj_weight.detach().abs().max()) > 0.0
    assert not is_weightless(model)


class Numerous(nn.Module):
    """Has many tensors of its own and in a list, and draws all of them at once."""

    def __init__(self, count: int = 20) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"own{index}", nn.Parameter(torch.empty(2)))
        self.listed = nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(count))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.ParameterList):
            for parameter in module:
                nn.init.normal_(parameter)


class Made(OperatorMode):
    """Counts the tensors that are made, and the draws on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        draws = func is torch.ops.aten.normal_.default and result.is_meta
        self.count += draws or func is torch.ops.aten.empty_like.default
        return result


def test_the_work_for_many_tensors_of_one_module_grows_with_their_number() -> None:
    model = on_meta(Numerous)
    reset = reset_parameters(model)
    with Made() as made:
        initialize(model, reset, seed=5)

    # Stand-ins for the tensors of the module, those in its list included, and those of the list; and the weights.
    assert made.count <= 4 * 40
    # Each is the first draw of its stream.
    alone = initialize(on_meta(Numerous), lambda name, tensor: tensor.normal_(), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_reset_that_was_used_before_the_model_had_weights_is_the_same() -> None:
    model = on_meta(Numerous)
    reset = reset_parameters(model)
    reset("own1", torch.zeros(2))
    fresh = on_meta(Numerous)
    initialize(model, reset, seed=5)
    initialize(fresh, reset_parameters(fresh), seed=5)

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_generators_and_marks_and_hooks_of_parameters_stay() -> None:
    model = on_meta(models.Perceptron)
    bias, seen = model.head.bias, []
    bias.no_decay = True
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    halved = bias.register_hook(lambda gradient: gradient / 2)
    noted = bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    initialize(model, draw)

    assert torch.equal(torch.rand(3), expected)
    assert model.head.bias.no_decay
    model.head.bias.sum().backward()
    assert torch.equal(seen[0], torch.full_like(model.head.bias, 0.5))
    halved.remove()
    noted.remove()
    model.head.bias.sum().backward()
    assert torch.equal(model.head.bias.grad, torch.full_like(model.head.bias, 1.5))
    assert len(seen) == 1


def test_a_buffer_that_is_assigned_anew_is_in_the_state_of_the_pipeline() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), Averaging(), nn.Linear(6, 3)))
    x = torch.randn(4, 6, dtype=torch.float64)
    pipe = penstock.Pipeline(
        model, (x[:2],), nn.functional.cross_entropy, models.momentum, schedule="gpipe", stages=2, microbatches=2,
        init_fn=draw,
    )  # fmt: skip
    pipe.step(x, torch.zeros(4, dtype=torch.int64))
    state = pipe.state_dict()["model"]

    assert state["1.average"].any()
    assert torch.equal(state["1.average"], model[1].average)


def test_what_is_written_through_a_view_is_known_without_weights() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(6, 6)))
    weightless = capture_weightless(model, (torch.ones(2, 6, dtype=torch.float64),))

    assert weightless.chain.stage(1, 4).mutates == {"0"}


def test_a_recurrent_module_uses_its_weights() -> None:
    """It keeps its parameters in a list, too."""
    model = on_meta(lambda: nn.LSTM(3, 4))
    initialize(model, reset_parameters(model))

    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))


def test_writing_the_data_of_a_tensor_counts() -> None:
    def init_fn(name: str, tensor: Tensor) -> None:
        tensor.data.zero_()

    model = initialize(on_meta(Positioned), init_fn)

    assert not any(bool(tensor.any()) for tensor in named_tensors(model).values())


def test_a_model_that_reads_numbers_is_refused_and_left_as_it_was() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y if float(y.sum()) > 0 else -y

    model = on_meta(lambda: nn.Sequential(Asking(), nn.Linear(6, 6)))
    kept = nn.Parameter(torch.ones(6, dtype=torch.float64))
    model[1].bias = kept
    with pytest.raises(CaptureError) as caught:
        capture_weightless(model, (torch.ones(2, 6, dtype=torch.float64),))

    text = str(caught.value)
    assert text.startswith("Sequential fails on the meta device, where tensors have no numbers. At\n    ")
    assert "return y if float(y.sum()) > 0 else -y\nRuntimeError: Tensor.item() cannot be called on meta" in text
    assert "reads none of their numbers, as `if mask.all()` and x.item() do" in text
    assert torch.equal(model[1].bias, kept)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + torch.arange(x.shape[-1])
        return x


def test_a_sliding_window_needs_its_cache_on_the_meta_device() -> None:
    """Without one, transformers reads the positions: it asks whether several sequences stand in one row."""
    config = transformers.MistralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, sliding_window=4, use_cache=False,
    )  # fmt: skip
    model, tokens = on_meta(lambda: transformers.MistralForCausalLM(config)), torch.arange(10).reshape(2, 5)

    with pytest.raises(CaptureError, match=r"pass use_cache=True and no attention_mask in sample="):
        capture_weightless(model, {"input_ids": tokens})
    assert len(capture_weightless(model, {"input_ids": tokens, "use_cache": True}).chain.layers) == 4


def test_weights_are_asked_for_where_there_are_none() -> None:
    assert asks_for_weights(on_meta(models.layered), draw)
    assert not asks_for_weights(models.layered(), None)


ELSEWHERE = (
    r"(?s)fails on the meta device, .*: x = block\(x\) \+ torch.arange\(x.shape\[-1\]\)\nRuntimeError: .*"
    r"makes tensors where its inputs are, as torch.arange\(n, device=x.device\)"
)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no weights and no init_fn=": (
        lambda: penstock.Pipeline(on_meta(models.layered), **Case("layered", "gpipe", 2, 4).options),
        "Pass init_fn=",
    ),
    "no weights": (
        lambda: asks_for_weights(on_meta(models.layered), None),
        r"0.linear.weight, 0.linear.bias, .* and 20 more: on the meta device",
    ),
    "weights and init_fn=": (
        lambda: asks_for_weights(models.layered(), draw),
        "no parameter or buffer of the model is on the meta device",
    ),
    "a sample without a device": (
        lambda: capture_weightless(on_meta(models.Perceptron), (torch.ones(2, 6, device="meta"),)),
        "nothing says where the weights are to be",
    ),
    "tensors on another device": (lambda: capture_weightless(on_meta(Counting), (torch.ones(2, 6),)), ELSEWHERE),
    "in a list of layers": (
        lambda: capture_weightless(on_meta(lambda: nn.ModuleList([Counting(), Counting()])), (torch.ones(2, 6),)),
        ELSEWHERE,
    ),
    "what is left unwritten": (
        lambda: initialize(model := on_meta(Positioned), reset_parameters(model)),
        r"scale \(parameter of shape \(6,\)\), table \(buffer .*, steps \(buffer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_weights_are_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises(PenstockError, match=text):
        call()


@pytest.mark.slow
def test_a_transformer_initializes_itself() -> None:
    """Tied weights, and buffers outside of the state dict that its constructor computes."""
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )

    def build() -> nn.Module:
        with torch.device("meta"):
            return transformers.GPT2LMHeadModel(config)

    tokens = torch.arange(10).reshape(2, 5)
    model, alone = build(), build()
    weightless = capture_weightless(model, {"input_ids": tokens})
    count = len(weightless.chain.layers)
    chain = weightless.materialize(range(count), reset_parameters(model), 0).evaluation()
    model.eval()
    expected = initialize(alone, reset_parameters(alone)).eval()(input_ids=tokens)

    assert torch.equal(chain.stage(0, count)((), {"kwargs['input_ids']": tokens})[0], expected.logits)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 0.01 < float(model.transformer.wte.weight.detach().std()) < 0.03  # the 0.02 of its configuration
    assert [layer.random for layer in weightless.chain.layers] == [True] * (count - 1) + [False]
