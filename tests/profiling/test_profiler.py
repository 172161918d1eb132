"""The profiler: exact bytes of known layers, exact medians of a scripted clock, and a model left as it was found."""

import math
from collections.abc import Callable, Sequence
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.errors import PenstockError, ProfileError
from penstock.profiling import ScriptedClock, WallClock, profile
from penstock.profiling.clocks import MOST_CALLS, calls_per_sample
from penstock.profiling.workspaces import recording
from penstock.training.optimizers import NamedParameters
from penstock.values.profiles import LayerProfile, Profile
from support.jobs.state_jobs import WIDTH, Coded

FLOAT = 4
LONG = 8


class Wired(nn.Module):
    """A module as a layer of a chain: its result becomes a tuple."""

    def __init__(self, module: nn.Module | Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.wrapped = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        result = self.wrapped(*inputs)
        return result if isinstance(result, tuple) else (result,)


def make_layer(name: str, module, inputs: str, outputs: str, **fields) -> Layer:
    return Layer(name, Wired(module), tuple(inputs.split()), tuple(outputs.split()), **fields)


def make_chain(layers: Sequence[Layer], sample: tuple[Tensor, ...], output: str) -> LayerChain:
    """A chain by hand; its inputs are ``x0``, ``x1``, ..."""
    names = tuple(f"x{index}" for index in range(len(sample)))
    structure = pytree.tree_structure((sample, {}))
    inputs = ModelInputs(names, structure, {}, frozenset(names), len(sample[0]))
    leaves = tuple(output.split())
    built = ModelOutput(pytree.tree_structure(leaves), leaves, (None,) * len(leaves))
    modules = nn.ModuleList(layer.module for layer in layers)
    parameters = dict(modules.named_parameters(remove_duplicate=False))
    return LayerChain(
        tuple(layers),
        inputs,
        built,
        parameters,
        dict(modules.named_buffers()),
        lambda: make_chain(layers, sample, output),
    )


def one(module, *sample: Tensor, **fields) -> LayerProfile:
    """The profile of `module` as the only layer of a chain, whose inputs need no gradient."""
    names = " ".join(f"x{index}" for index in range(len(sample)))
    layers = [make_layer("only", module, names, "y", **fields)]
    (layer,) = quick(make_chain(layers, sample, "y"), sample).layers
    return layer


def after_linear(module, width: int = 8) -> LayerProfile:
    """The profile of `module` behind a Linear, so that its input (4, width) needs a gradient."""
    sample = (torch.randn(4, 6),)
    layers = [make_layer("first", nn.Linear(6, width), "x0", "h"), make_layer("second", module, "h", "y")]
    return quick(make_chain(layers, sample, "y"), sample).layers[1]


def quick(model, sample, **arguments) -> Profile:
    clock = ScriptedClock(repeat(1.0))
    plain = {"iterations": 1, "warmup": 1, "optimizer": None, "progress": False, "clock": clock}
    return profile(model, sample, **{**plain, **arguments})


# Bytes


def test_a_linear_chain_has_the_bytes_that_one_counts_by_hand():
    sample = (torch.randn(4, 6),)
    layers = [
        make_layer("a", nn.Linear(6, 8), "x0", "h0"),
        make_layer("b", nn.Linear(8, 10, bias=False), "h0", "h1"),
        make_layer("c", nn.Linear(10, 2), "h1", "y"),
    ]
    found = quick(make_chain(layers, sample, "y"), sample, name="three")

    assert found == Profile(
        (
            # The workspace: the gradients of parameters before they are added to the sum, and that of the input.
            LayerProfile("a", 1.0, 1.0, 4 * 8 * FLOAT, 4 * 6 * FLOAT, (6 * 8 + 8) * FLOAT, (6 * 8 + 8) * FLOAT, 1.0),
            LayerProfile("b", 1.0, 1.0, 4 * 10 * FLOAT, 4 * 8 * FLOAT, 8 * 10 * FLOAT, (8 * 10 + 4 * 8) * FLOAT, 1.0),
            LayerProfile(
                "c", 1.0, 1.0, 4 * 2 * FLOAT, 4 * 10 * FLOAT, (10 * 2 + 2) * FLOAT, (10 * 2 + 2 + 4 * 10) * FLOAT, 1.0
            ),
        ),
        microbatch_size=4,
        name="three",
        device="cpu",
        # The clock says one second of everything: two halves take two.
        split_share=1.0,
    )


def test_a_skip_connection_rides_along_in_every_cut_that_it_crosses():
    sample = (torch.randn(4, 6),)
    layers = [
        make_layer("a", nn.Linear(6, 16), "x0", "skip"),
        make_layer("b", nn.Linear(16, 3), "skip", "h"),
        make_layer("c", nn.Linear(3, 16), "h", "g"),
        make_layer("d", torch.add, "g skip", "y"),
    ]
    found = quick(make_chain(layers, sample, "y"), sample)

    assert [layer.cut_bytes for layer in found.layers] == [
        4 * 16 * FLOAT,
        4 * (3 + 16) * FLOAT,
        4 * (16 + 16) * FLOAT,
        4 * 16 * FLOAT,
    ]


def test_the_inputs_of_the_model_cross_no_cut_but_may_be_its_output():
    sample = (torch.randn(4, 6), torch.ones(4, 2, dtype=torch.long))
    layers = [make_layer("a", nn.Linear(6, 3), "x0", "h"), make_layer("b", lambda h, mask: h * mask.sum(), "h x1", "y")]
    found = quick(make_chain(layers, sample, "y x1"), sample)

    assert [layer.cut_bytes for layer in found.layers] == [4 * 3 * FLOAT, 4 * 3 * FLOAT + 4 * 2 * LONG]


@pytest.mark.parametrize(
    ("module", "kept"),
    [
        (nn.Linear(8, 3), 4 * 8 * FLOAT),  # its input
        (nn.ReLU(), 4 * 8 * FLOAT),  # its output
        (nn.Tanh(), 4 * 8 * FLOAT),  # its output
        (nn.GELU(), 4 * 8 * FLOAT),  # its input
        (nn.LayerNorm(8), 4 * (8 + 2) * FLOAT),  # its input and two numbers a row
        (nn.Identity(), 0),
        (nn.Flatten(), 0),
        (lambda h: h + 1, 0),
        (lambda h: h * h, 4 * 8 * FLOAT),  # the same tensor twice
        (lambda h: h * h.sin(), 2 * 4 * 8 * FLOAT),  # h (for itself and for the sine) and its sine
        (lambda h: h.exp().log(), 4 * 8 * FLOAT),  # the exponential, saved as a result and as an input
        (lambda h: h[:, :2] * 2.0, 0),
        (lambda h: h[:, :2].square(), 4 * 8 * FLOAT),  # the view keeps all of its base
        (nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)), (4 * 8 + 4 * 5) * FLOAT),
        (lambda h: h.detach().exp(), 0),
        (lambda h: (h.exp(), h + 1)[1], 0),  # the exponential dies before the backward
    ],
)
def test_saved_bytes_are_what_autograd_keeps(module, kept):
    assert after_linear(module).saved_bytes == kept


def test_what_a_module_holds_is_not_saved_for_one_microbatch():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 8))
            self.plain = torch.ones(4, 8)
            self.scale = nn.Parameter(torch.ones(4, 8))

        def forward(self, h: Tensor) -> Tensor:
            return ((h + 0) * self.mask + 1) * self.plain + self.scale.t().sum() * 2

    assert after_linear(Masked()).saved_bytes == 0


def test_a_layer_of_frozen_parameters_keeps_nothing_and_has_no_backward():
    found = one(nn.Linear(6, 3).requires_grad_(False), torch.randn(4, 6))

    assert (found.saved_bytes, found.backward_seconds, found.forward_seconds) == (0, 0.0, 1.0)
    assert (found.parameter_bytes, found.frozen_bytes) == (0, (6 * 3 + 3) * FLOAT)


class Packed(nn.Module):
    """A frozen weight of codes, as libraries pack it: the scales are in an object in an attribute, and the layer keeps
    the codes in another one, too.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(width, width, dtype=torch.int8), requires_grad=False)
        nested = SimpleNamespace(scale=torch.ones(3), codes=None)
        vars(self.codes)["state"] = SimpleNamespace(scales=torch.ones(width), nested=nested, owner=nn.Linear(99, 99))
        self.state = {"codes": self.codes.data, "shape": (width, width)}
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float8_e4m3fn), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        state = vars(self.codes)["state"]
        return h @ (self.codes.to(h.dtype) * state.scales) + self.shift.float().sum()


def test_packed_weights_count_as_they_are_packed_with_their_scales() -> None:
    found = after_linear(nn.Sequential(Packed(), Packed(), nn.Linear(8, 8)))

    assert found.frozen_bytes == 2 * (8 * 8 + (8 + 3) * FLOAT + 2)
    assert found.parameter_bytes == (8 * 8 + 8) * FLOAT


def test_a_tensor_that_wraps_others_has_the_bytes_of_these() -> None:
    found = quick([nn.Linear(WIDTH, WIDTH).double(), Coded()], (torch.randn(4, WIDTH).double(),)).layers[1]

    assert (found.parameter_bytes, found.frozen_bytes) == (8 * (WIDTH * WIDTH + WIDTH), WIDTH * WIDTH + 8)


def test_a_view_of_a_large_memory_counts_by_itself() -> None:
    """As a weight in a file that is mapped into memory."""
    file = torch.zeros(1000)
    layer = nn.Linear(6, 3)
    layer.weight = nn.Parameter(file[100:118].view(3, 6), requires_grad=False)
    layer.bias = nn.Parameter(file[200:203], requires_grad=False)
    layer.register_buffer("same", file[100:118])

    assert one(layer, torch.randn(4, 6)).frozen_bytes == (18 + 3) * FLOAT


def test_integer_inputs_get_no_gradient_and_the_embedding_saves_them():
    found = one(nn.Embedding(10, 5), torch.randint(10, (4, 7)))

    assert found == LayerProfile("only", 1.0, 1.0, 4 * 7 * 5 * FLOAT, 4 * 7 * LONG, 10 * 5 * FLOAT, 10 * 5 * FLOAT, 1.0)


def test_the_workspace_of_a_forward_is_what_it_drops_again() -> None:
    class Detour(nn.Module):
        """Three temporaries, of which two are alive at a time; the third becomes the output."""

        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                wide = torch.cat([h, h, h, h])
                sums = wide.sum(0)
                del wide
            return h + sums

    found = after_linear(Detour())

    assert (found.saved_bytes, found.workspace_bytes) == (0, (4 * 4 * 8 + 8 - 4 * 8) * FLOAT)


def test_a_backward_takes_the_gradients_of_two_values_at_a_time() -> None:
    deep = nn.Sequential(*[nn.ReLU() for _ in range(5)])

    assert after_linear(deep).workspace_bytes == 2 * 4 * 8 * FLOAT


def test_the_loss_belongs_to_the_last_layer() -> None:
    sample, target = torch.randn(64, 6), torch.randint(50, (64,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 50))
    bare = quick(model, sample)
    found = quick(model, sample, loss_fn=nn.functional.cross_entropy, target=target)

    assert found.layers[0] == bare.layers[0]
    logits = 64 * 50 * FLOAT
    # The log-probabilities and the sum of the classes' weights are saved.
    assert found.layers[1].saved_bytes == bare.layers[1].saved_bytes + logits + FLOAT
    # The gradients of log-probabilities and logits are made beside each other, while the loss itself is freed.
    assert bare.layers[1].workspace_bytes < logits
    assert found.layers[1].workspace_bytes == 2 * logits - FLOAT
    assert found.layers[1].cut_bytes == bare.layers[1].cut_bytes == logits


def test_a_tied_parameter_is_charged_to_every_layer_that_holds_it_and_once_in_each():
    tied = nn.Linear(6, 6)
    sample = (torch.randn(4, 6),)
    layers = [make_layer("a", nn.Sequential(tied, tied), "x0", "h"), make_layer("b", tied, "h", "y")]
    found = quick(make_chain(layers, sample, "y"), sample)

    assert [layer.parameter_bytes for layer in found.layers] == [(6 * 6 + 6) * FLOAT] * 2


def test_the_sample_may_be_a_view_of_a_whole_data_set():
    data = torch.randn(1000, 6)

    assert one(nn.Linear(6, 3), data[8:12]).saved_bytes == 4 * 6 * FLOAT


class Shared(list[Any]):
    """A list that copies of a layer share with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        return self


def test_a_layer_that_writes_its_input_in_place_is_measured_and_later_layers_see_what_it_wrote():
    def double(h: Tensor) -> Tensor:
        return h.mul_(2.0).sum(dim=1)

    seen = Shared()
    sample = (torch.ones(4, 6),)
    layers = [
        make_layer("a", nn.Linear(6, 6), "x0", "h"),
        make_layer("b", double, "h", "s", mutates=("h",)),
        make_layer("c", lambda h, s: seen.append(h.detach()) or h + s[:, None], "h s", "y"),
    ]
    found = quick(make_chain(layers, sample, "y"), sample)

    torch.testing.assert_close(seen[-1], 2 * layers[0].module(*sample)[0])
    assert [layer.backward_seconds for layer in found.layers] == [1.0, 1.0, 1.0]


def test_saved_tensors_that_autograd_lets_go_of_are_no_longer_recorded():
    weight = torch.randn(3, 3, requires_grad=True)
    with recording() as record:
        result = weight.exp()
    (kept,) = record.storages().values()

    assert kept == 9 * FLOAT
    del result
    assert record.storages() == {}


# Seconds


def test_forward_and_backward_are_the_medians_of_what_the_clock_says():
    script = [9.0, 9.0, 8.0, 8.0]  # two warm-ups, each a forward and a backward
    # Three iterations, one of them disturbed; the first and the last time both halves of a backward, too.
    script += [3.0, 0.5, 0.3, 0.2, 100.0, 0.7, 1.0, 0.6, 0.5, 0.4]
    sample = (torch.randn(4, 6),)
    chain = make_chain([make_layer("a", nn.Linear(6, 6), "x0", "y")], sample, "y")
    clock = ScriptedClock(script)
    found = profile(chain, sample, optimizer=None, iterations=3, warmup=2, clock=clock, progress=False)
    (layer,) = found.layers

    assert (layer.forward_seconds, layer.backward_seconds) == (3.0, 0.6)
    assert layer.weight_seconds == (0.2 + 0.4) / 2
    # The halves take 0.4 and 0.3 together.
    assert found.split_share == pytest.approx((0.4 + 0.3) / 0.6 - 1)
    assert list(clock.script) == []


class Forgetting(nn.Module):
    """A linear layer that is computed again in its backward, in the way that autograd can only do as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("layer", "seconds"),
    [
        (nn.Tanh(), 0.0),
        (nn.Linear(6, 6).requires_grad_(False), 0.0),
        (Forgetting(), 0.0),
        # A part of the backward takes no longer than all of it.
        (nn.Linear(6, 6), 3.0),
    ],
    ids=["nothing trained", "frozen", "not to be divided", "longer"],
)
def test_weight_parts_are_measured_where_there_are_any(layer: nn.Module, seconds: float) -> None:
    script = [1.0, 1.0, 1.0, 1.0, 2.0, 3.0] + ([] if seconds == 0 else [5.0, 4.0])
    sample = (torch.randn(4, 6),)
    layers = [make_layer("first", nn.Linear(6, 6), "x0", "h"), make_layer("second", layer, "h", "y")]
    clock = ScriptedClock([*script[:4], 2.0, 3.0, 2.5, 1.0, *script[4:]])
    found = quick(make_chain(layers, sample, "y"), sample, clock=clock)

    assert [layer.weight_seconds for layer in found.layers] == [1.0, seconds]
    # Backwards of 3 s each; a layer whose backward is not split takes no longer.
    assert found.split_share == pytest.approx((3.5 - 3 + (5 + 4 - 3 if seconds else 0)) / 6)
    assert list(clock.script) == []


def test_updates_are_timed_on_copies_of_what_a_layer_trains() -> None:
    script = [1.0] * 4 + [2.0, 3.0, 2.5, 1.0] + [2.0, 3.0]
    # The first update makes the optimizer's state. A layer that trains nothing has none.
    clock = ScriptedClock([*script, 90.0, 5.0, 70.0, 6.0])
    sample, seen = (torch.randn(4, 6),), list[str]()
    first, second = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
    first.bias.requires_grad_(False)
    before = first.weight.detach().clone()
    layers = [make_layer("first", first, "x0", "h"), make_layer("second", second, "h", "y")]

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        seen.extend(parameters.names)
        return torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5)

    found = quick(make_chain(layers, sample, "y"), sample, clock=clock, optimizer=make)
    assert [layer.update_seconds for layer in found.layers] == [6.0, 0.0] and list(clock.script) == []
    assert [name.startswith("first.") and name.endswith("weight") for name in seen] == [True]
    assert torch.equal(first.weight, before) and first.weight.grad is None


def test_an_optimizer_that_a_pipeline_refuses_is_refused() -> None:
    sample = (torch.randn(4, 6),)
    chain = make_chain([make_layer("only", nn.Linear(6, 6), "x0", "y")], sample, "y")
    with pytest.raises(PenstockError, match=r"optimizer=: expected an optimizer whose step\(\) needs no arguments"):
        quick(chain, sample, optimizer=torch.optim.LBFGS)


def test_an_input_backward_keeps_the_gradients_that_a_weight_backward_needs():
    sample = (torch.randn(1024, 8),)
    block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    (layer,) = profile(make_chain([make_layer("a", block, "x0", "y")], sample, "y"), sample, progress=False).layers

    # The gradients of what GELU returns and of what it takes; a whole backward has freed what GELU returned by then.
    assert 2 <= layer.workspace_bytes / (1024 * 64 * 4) < 2.2


def test_short_calls_are_timed_in_groups():
    calls = Shared()
    sample = (torch.randn(4, 6),)
    chain = make_chain([make_layer("a", lambda x: calls.append("call") or x + 1, "x0", "y")], sample, "y")
    # The warm-up says 10 us a call: 20 calls are a group of 200 us.
    clock = ScriptedClock([10e-6, 220e-6, 180e-6, 240e-6])
    (layer,) = profile(chain, sample, iterations=3, warmup=1, clock=clock, progress=False).layers

    assert layer.forward_seconds == 220e-6 / 20
    assert len(calls) == 1 + 2 + 2 + 3 * 20  # warm-up, saved bytes, workspaces, iterations


@pytest.mark.parametrize(
    ("seconds", "calls"), [(1.0, 1), (201e-6, 1), (150e-6, 2), (50e-6, 4), (10e-6, 20), (1e-9, 100), (0.0, 100)]
)
def test_the_size_of_a_group(seconds, calls):
    assert calls_per_sample(seconds) == calls
    assert 1 <= calls <= MOST_CALLS


def test_the_real_clocks_give_finite_seconds_above_zero():
    sample = (torch.randn(4, 6),)
    chain = make_chain([make_layer("a", nn.Linear(6, 6), "x0", "y")], sample, "y")
    (layer,) = profile(chain, sample, iterations=2, warmup=1, progress=False).layers

    assert 0 < layer.forward_seconds < math.inf
    assert 0 < layer.backward_seconds < math.inf
    assert WallClock().seconds(lambda: None) >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_seconds_and_the_bytes_are_as_on_the_cpu():
    sample = (torch.randn(4, 6),)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    on_cpu = profile(model, sample, iterations=2, warmup=1, progress=False)
    on_gpu = profile(model, sample, iterations=2, warmup=1, progress=False, device="cuda")

    assert [layer.cut_bytes for layer in on_gpu.layers] == [layer.cut_bytes for layer in on_cpu.layers]
    assert all(0 < layer.forward_seconds < 1 for layer in on_gpu.layers)
    assert all(0 < layer.backward_seconds < 1 for layer in on_gpu.layers)
    assert on_gpu.device.startswith("cuda:")
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_on_a_gpu_the_allocator_measures_the_workspaces(autocast: torch.dtype | None) -> None:
    sample = (torch.randn(1024, 1024),)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    on_cpu = quick(model, sample, autocast=autocast)
    first, second = (quick(model, sample, autocast=autocast, device="cuda") for _ in range(2))

    for here, there in zip(on_cpu.layers, first.layers, strict=True):
        assert there.saved_bytes == here.saved_bytes
        # The sum over rows of a bias's gradient has a workspace of 8 MiB on an H200.
        assert here.workspace_bytes <= there.workspace_bytes <= here.workspace_bytes + 2**25
    # cuBLAS has its workspaces from the first profile on, and they are no layer's.
    assert first.library_bytes == second.library_bytes > 0
    assert 1 <= first.fragmentation < 100


# Autocast

BRAIN = 2


class Casts(TorchDispatchMode):
    """Counts how often weights of some shape are cast."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(result.shape) == self.shape:
            self.count += result.dtype == torch.bfloat16
        return result


def make_cast_chain(sample: tuple[Tensor, ...]) -> LayerChain:
    layers = [make_layer("a", nn.Linear(6, 8), "x0", "h"), make_layer("b", nn.Linear(8, 10), "h", "y")]
    return make_chain(layers, sample, "y")


def test_under_autocast_the_cast_weights_are_saved_with_every_microbatch() -> None:
    sample = (torch.randn(4, 6),)
    first, second = quick(make_cast_chain(sample), sample, autocast=torch.bfloat16).layers

    # The input of the model needs no gradient, and so the first layer's weights are not saved.
    assert (first.saved_bytes, second.saved_bytes) == (4 * 6 * BRAIN, (4 * 8 + 10 * 8) * BRAIN)
    assert (first.cut_bytes, second.cut_bytes) == (4 * 8 * BRAIN, 4 * 10 * BRAIN)
    assert (first.parameter_bytes, second.parameter_bytes) == ((6 * 8 + 8) * FLOAT, (8 * 10 + 10) * FLOAT)


def test_every_forward_casts_the_weights_as_that_of_every_microbatch_does() -> None:
    sample = (torch.randn(4, 6),)
    forwards = Shared()
    chain = make_cast_chain(sample)
    chain.layers[1].module.register_forward_hook(lambda *_: forwards.append("forward"))
    with Casts((10, 8)) as casts:
        # A pilot, two forwards that show what is saved, one for the workspace, and groups of 20 forwards of 10 us each.
        profile(
            chain,
            sample,
            autocast=torch.bfloat16,
            iterations=2,
            warmup=1,
            clock=ScriptedClock(repeat(10e-6)),
            progress=False,
        )

    assert len(forwards) >= 1 + 3 + 2 * 20
    assert casts.count == len(forwards)


def test_the_loss_is_computed_under_autocast_and_the_backward_is_not() -> None:
    seen = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return Watching.apply((y - target).square().mean())

    quick(
        nn.Sequential(nn.Linear(6, 3)), torch.randn(4, 6), autocast=torch.bfloat16, loss_fn=loss, target=torch.ones(())
    )

    assert set(seen) == {("forward", True), ("backward", False)}


def test_a_model_is_traced_in_the_types_that_it_is_measured_in() -> None:
    class Typed(nn.Module):
        """Its outputs are larger where it computes in a smaller type."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x if x.dtype == torch.float32 else torch.cat([x, x])

    found = quick(Typed(), torch.randn(4, 6), autocast=torch.bfloat16)

    assert found.layers[-1].cut_bytes == 2 * 4 * 6 * BRAIN


# The model is left alone


class Rich(nn.Module):
    """Everything that a careless profiler would disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.drop(self.norm(self.first(x)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_generator_are_as_they_were(fails):
    torch.manual_seed(7)
    model = Rich()
    sample = (torch.randn(4, 6),)
    model(*sample).sum().backward()
    model.norm.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    flags = [part.training for part in model.modules()]
    stream = torch.get_rng_state()

    def end(y: Tensor) -> Tensor:
        if fails:
            raise ValueError("no")
        return y + 1

    layers = [make_layer("rich", model, "x0", "h", random=True), make_layer("end", end, "h", "y")]
    try:
        quick(make_chain(layers, sample, "y"), sample)
    except ProfileError:
        assert fails

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert all(p.grad is grads[name][0] and torch.equal(p.grad, grads[name][1]) for name, p in model.named_parameters())
    assert [part.training for part in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), stream)


def test_it_works_where_gradients_are_switched_off():
    with torch.no_grad():
        found = one(nn.Linear(6, 3), torch.randn(4, 6))

    assert found.backward_seconds == 1.0
    assert found.saved_bytes == 4 * 6 * FLOAT


# Through the front doors of capture


def test_a_sequential_model_in_evaluation_mode_is_profiled_in_training_mode_and_given_back():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sample = (torch.randn(4, 6),)
    stream = torch.get_rng_state()
    found = quick(model, sample)

    assert [layer.name for layer in found.layers] == ["0", "1", "2", "3"]
    # The mask of the dropout says that it was in training mode: it is one byte an element, or four.
    assert found.layers[1].saved_bytes in (4 * 8, 4 * 8 * FLOAT)
    assert (found.name, found.microbatch_size, found.device) == ("Sequential", 4, "cpu")
    assert not any(part.training for part in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_list_of_layers():
    found = quick([nn.Linear(6, 8), torch.relu], (torch.randn(4, 6),))

    assert [layer.cut_bytes for layer in found.layers] == [4 * 8 * FLOAT] * 2
    assert [layer.parameter_bytes for layer in found.layers] == [(6 * 8 + 8) * FLOAT, 0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        start = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head((hidden + start) * scale)


@pytest.mark.parametrize("keywords", [False, True])
def test_any_module_with_its_skips(keywords):
    tokens, scale = torch.randint(11, (4, 5)), torch.ones(4, 1, 1)
    sample = {"tokens": tokens, "scale": scale} if keywords else (tokens, scale)
    model = Residual()
    found = quick(model, sample)
    hidden = 4 * 5 * 8 * FLOAT

    # The embedding rides along to the last addition, wherever the cuts between the blocks fall.
    assert max(layer.cut_bytes for layer in found.layers) >= 2 * hidden
    assert found.layers[-1].cut_bytes == 4 * 5 * 11 * FLOAT
    assert found.parameter_bytes == sum(p.numel() * FLOAT for p in model.parameters())
    assert found.name == "Residual"


# Errors


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient today")


def linear(**options: Any) -> Profile:
    return quick(nn.Linear(6, 3), torch.randn(4, 6), **options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: after_linear(nn.Linear(5, 6)),
            r"layer 1 \(second\) raised RuntimeError in its forward: mat1 and mat2",
        ),
        (lambda: after_linear(Broken.apply), r"layer 1 \(second\) raised ArithmeticError in its backward: no gradient"),
        (lambda: linear(loss_fn=lambda output, target: output, target=None), "must return one number as a tensor"),
        (lambda: linear(autocast=torch.float32), r"autocast=.*: expected torch\.bfloat16 or torch\.float16"),
        (lambda: profile(nn.Linear(2, 2, device="meta"), (torch.ones(1, 2),)), "meta device"),
        (lambda: profile(nn.ReLU(), (torch.ones(1, 2),), device="meta"), "expected a cpu or cuda device, found 'meta'"),
    ],
)
def test_what_cannot_be_measured_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(PenstockError, match=says):
        call()


@pytest.mark.parametrize("call", range(1, 5))
def test_a_backward_that_runs_out_of_memory_is_an_error_in_all_its_forms(call: int):
    """Whole, or its part for the inputs alone, which a layer may not have."""
    calls = count()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            if next(calls) == call:
                raise torch.OutOfMemoryError("no room")
            return 2 * gradient

    class Doubling(nn.Linear):
        def forward(self, x):
            return Doubled.apply(super().forward(x))

    sample = (torch.randn(4, 6),)
    chain = make_chain([make_layer("full", Doubling(6, 6), "x0", "y")], sample, "y")
    with pytest.raises(ProfileError, match=r"layer 0 \(full\) ran out of device memory in its backward"):
        quick(chain, sample)
