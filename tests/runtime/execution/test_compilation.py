"""A compiled stage computes what the stage computes, with one graph for all versions of its weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.execution.compilation import read_compilation
from support import models
from support.layers import Gathering, InPlace, Several
from support.processes import Pool
from support.random_models import Counting
from support.training import Case, run_reference

# PyTorch raises it in itself and hides it from itself, but for those who make errors of warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@dataclass(slots=True)
class Counter:
    """A backend of torch.compile that computes what autograd would, and counts graphs."""

    graphs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def counter() -> Iterator[Counter]:
    """A new one, and nothing compiled before or after."""
    torch.compiler.reset()
    yield Counter()
    torch.compiler.reset()


def train(case: Case, counter: Counter, **options: Any) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    compile = {"backend": counter, "fullgraph": True}
    pipe = penstock.Pipeline(case.build(), **case.options, **options, compile=compile)
    losses = []
    for number, (x, y) in enumerate(case.batches):
        losses.append(pipe.step(x, y).loss)
        if number in case.drain_after:
            pipe.drain()
    pipe.drain()
    return tuple(float(loss) for loss in losses), pipe.state_dict()["model"]


def assert_equals_oracle(case: Case, losses: tuple[float, ...], state: dict[str, Tensor]) -> None:
    assert losses == run_reference(case).losses
    for name, tensor in state.items():
        assert torch.equal(run_reference(case).state[name], tensor), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        (Case("perceptron", "pipedream", 4, 8), 4),
        (Case("perceptron", "2bw", 3, 4, drain_after=(2,)), 3),
        (Case("perceptron", "interleaved", 2, 4, stages_per_rank=2), 4),
        (Case("skipping", "vertical", 3, 4, "adamw"), 3),
        (Case("perceptron", "pipedream", 2, 4, replicas=(2, 1)), 2),
    ],
    ids=lambda value: f"{value.subject}-{value.schedule}" if isinstance(value, Case) else "",
)
def test_a_stage_is_one_graph_for_all_versions_and_replicas(case: Case, graphs: int, counter: Counter) -> None:
    assert_equals_oracle(case, *train(case, counter))

    assert counter.graphs == graphs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "recompute"),
    [
        (Case("perceptron", "zb-h1", 3, 4, "adamw"), None),
        (Case("layered", "zb-v", 2, 4, stages_per_rank=2), None),
        (Case("skipping", "v-half", 2, 4, stages_per_rank=2), True),
        (Case("normalized", "v-min", 2, 4, stages_per_rank=2), None),
        (Case("perceptron", "zb-h1", 2, 4, replicas=(2, 1)), True),
    ],
    ids=lambda value: f"{value.subject}-{value.schedule}" if isinstance(value, Case) else str(value),
)
def test_where_backwards_are_split_a_graph_is_one_layer(case: Case, recompute: Any, counter: Counter) -> None:
    """And nothing is compiled after the first two steps."""
    compile = {"backend": counter, "fullgraph": True}
    pipe = penstock.Pipeline(case.build(), **case.options, recompute=recompute, compile=compile)
    losses, graphs = [], []
    for x, y in case.batches:
        losses.append(float(pipe.step(x, y).loss))
        graphs.append(counter.graphs)

    assert graphs[1:] == [len(pipe._chain.layers)] * (len(graphs) - 1)
    assert_equals_oracle(case, tuple(losses), pipe.state_dict()["model"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "recompute", "graphs"),
    [
        # Each of the seven random layers is a part of its own; the linear one at the end is another.
        (Case("layered", "pipedream", 2, 4), True, 8),
        (Case("layered", "2bw", 2, 4), "layers", 8),
        (Case("normalized", "pipedream", 2, 4), None, 8),
    ],
    ids=lambda value: f"{value.subject}-{value.schedule}" if isinstance(value, Case) else str(value),
)
def test_random_layers_and_recomputation_keep_their_numbers(
    case: Case, recompute: object, graphs: int, counter: Counter
) -> None:
    assert_equals_oracle(case, *train(case, counter, recompute=recompute))

    assert counter.graphs == graphs


def pipeline(model: Any, batches: Sequence[Any], counter: Counter | None, **wishes: Any) -> penstock.Pipeline:
    """Compiled, if there is a counter."""
    chosen = {"stages": 2, "schedule": "2bw", "microbatches": 4, "compile": {"backend": counter} if counter else False}
    arguments: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": models.momentum}
    return penstock.Pipeline(model, (batches[0][0][:4],), **arguments, **{**chosen, **wishes})


def train_layers(
    layers: list[nn.Module], batches: list[tuple[Tensor, Tensor]], counter: Counter | None, **wishes: Any
) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, weights, and the loss of an evaluation."""
    pipe = pipeline(layers, batches, counter, **wishes)
    losses = [float(pipe.step(x, y).loss) for x, y in batches]
    pipe.drain()
    return losses, pipe.state_dict()["model"], float(pipe.evaluate(*batches[0]).loss)


def assert_alike(build: Callable[[], list[nn.Module]], sizes: list[int], counter: Counter, **wishes: Any) -> None:
    """Compiled or not, the numbers are the same."""
    found = []
    for chosen in (None, counter):
        torch.manual_seed(5)
        layers = [layer.double() for layer in build()]
        batches = [(x[:size], y[:size]) for (x, y), size in zip(models.LAYERED.batches, sizes, strict=False)]
        found.append(train_layers(layers, batches, chosen, **wishes))
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2]
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


class Deciding(nn.Module):
    """Its code depends on the numbers, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.tanh(y) if float(y.detach().sum()) > 0 else torch.sin(y)


def unusual() -> list[nn.Module]:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    first.weight.requires_grad_(False)
    last.weight = first.weight
    return [first, InPlace(), nn.ReLU(inplace=True), Several(), Gathering(), last, nn.BatchNorm1d(6), nn.Linear(6, 3)]


def test_unusual_layers_keep_their_numbers(counter: Counter) -> None:
    assert_alike(unusual, [16, 16, 16], counter)

    # Two stages in training, two in evaluation.
    assert counter.graphs == 4


class Twice(nn.Module):
    """Calls a block twice whose evaluation differs from its training, with code of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList([nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))] * 2)
        self.head = nn.Sequential(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                shift = 0.3 * x
            x = x + shift
        result: Tensor = self.head(x)
        return result


def test_a_block_that_is_called_twice_evaluates_in_its_mode(counter: Counter) -> None:
    x, y = models.LAYERED.batches[0]
    for chosen in (None, counter):
        torch.manual_seed(5)
        model = Twice().double()
        pipe = pipeline(model, [(x, y)], chosen, schedule="1f1b-flush")
        pipe.step(x, y)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        loss = float(pipe.evaluate(x, y).loss)
        assert loss == pytest.approx(float(F.cross_entropy(model.eval()(x), y).detach()), rel=1e-14)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_state_that_a_repetition_would_change_twice_is_refused(recompute: Any, counter: Counter) -> None:
    layers = [nn.Linear(6, 6), Counting(), nn.Tanh(), nn.Linear(6, 3)]
    batches = [(x.float(), y) for x, y in models.LAYERED.batches]

    with pytest.raises(penstock.PenstockError, match=r"repeats changes \S*calls, which would then happen twice"):
        train_layers(layers, batches, counter, recompute=recompute)


def test_what_cannot_be_one_graph_runs_as_several(counter: Counter) -> None:
    assert_alike(lambda: [Deciding(), nn.Linear(6, 6), Deciding(), nn.Linear(6, 3)], [16, 16], counter)


def test_another_batch_size_takes_one_more_graph(counter: Counter) -> None:
    """The first other size makes the graph one for all sizes."""
    assert_alike(
        lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)], [16, 12, 8, 16, 13], counter, schedule="pipedream"
    )

    # Two of each stage in training, one in evaluation.
    assert counter.graphs == 6


def test_evaluations_between_steps_do_not_compile_again(counter: Counter) -> None:
    batches = models.LAYERED.batches
    pipe = pipeline([nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(), nn.Linear(6, 3).double()], batches, counter)
    for x, y in batches:
        pipe.step(x, y)
        pipe.evaluate(x, y)

    assert counter.graphs == 4


def test_options_are_read() -> None:
    assert read_compilation(False) is None
    for wish, options in (
        (True, {}),
        ({"mode": "default", "dynamic": True}, {"mode": "default", "dynamic": True}),
        ({"options": {"triton.cudagraphs": False, "a": 1}}, {"options": {"triton.cudagraphs": False, "a": 1}}),
    ):
        assert read_compilation(wish) == options
    for wish, words in (  # type: ignore[assignment]
        ("inductor", "expected True, False or the arguments"),
        ({"backend": "cudagraphs"}, "overwritten by the next run"),
        ({"mode": "reduce-overhead"}, "expected a mode without graphs"),
        ({"options": {"triton.cudagraphs": True}}, "max-autotune-no-cudagraphs"),
    ):
        with pytest.raises(penstock.PlanError, match=words):
            read_compilation(wish)  # type: ignore[arg-type]
    with pytest.raises(penstock.PlanError, match="compile= and parallelize="):
        read_compilation(True, parallelized=True)


def train_together(compiled: bool, directory: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Steps of several numbers of microbatches, by replicas that share the optimizer's state, which is on the host; a
    save in between. Returns the losses, the weights, and the graphs that were compiled after two steps.
    """
    torch.compiler.reset()
    counter, batches = Counter(), models.LAYERED.batches
    stages = (penstock.Stage(0, 5, (0, 1)), penstock.Stage(5, 8, (2,)))
    chosen: dict[str, Any] = {"plan": penstock.Plan(stages, "zb-h1", 4), "shard_optimizer": True, "state_on_host": True}
    chosen |= {"clip_grad_norm": 0.3, "compile": {"backend": counter, "dynamic": True} if compiled else False}
    subject = models.LAYERED
    with penstock.Pipeline(
        subject.build(), subject.sample, subject.loss_fn, models.adamw, check="off", **chosen
    ) as pipe:
        losses, graphs = [], 0
        for number, (x, y) in enumerate(batches):
            count = (4, 8, 4, 2)[number]
            losses.append(float(pipe.step(penstock.Microbatches(*(each.chunk(count) for each in (x, y)))).loss))
            if number == 1:
                graphs = counter.graphs
                pipe.save(directory)
        return losses, pipe.state_dict()["model"], counter.graphs - graphs


def test_counts_shared_state_and_compiled_layers_work_together(pool: Pool, tmp_path: Path) -> None:
    plain, compiled = (pool.run(3, train_together, on, str(tmp_path / str(on))) for on in (False, True))
    for (losses, state, _), (found, made, later) in zip(plain, compiled, strict=True):
        assert losses == found and later == 0
        assert all(torch.equal(tensor, made[name]) for name, tensor in state.items())
