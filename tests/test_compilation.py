"""A compiled stage computes what the stage computes, with one graph for all versions of its weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.capturing import capture
from penstock.runtime.compilation import compile_chain
from training import Case, run_reference

reference = cache(run_reference)


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


@contextmanager
def compiling(**options: Any) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        apart = options.pop("apart", ())
        patch.setattr(
            "penstock.pipeline.capture", lambda model, sample: compile_chain(capture(model, sample), options, apart)
        )
        yield patch


def train(case: Case, counter: Counter, **options: Any) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    apart = range(8) if options.get("recompute") == "layers" else ()
    with compiling(backend=counter, fullgraph=True, apart=apart):
        pipe = penstock.Pipeline(case.build(), **case.options, **options)
    losses = []
    for number, (x, y) in enumerate(case.batches):
        losses.append(pipe.step(x, y).loss)
        if number in case.drain_after:
            pipe.drain()
    pipe.drain()
    return tuple(float(loss) for loss in losses), pipe.state_dict()["model"]


def assert_equals_oracle(case: Case, losses: tuple[float, ...], state: dict[str, Tensor]) -> None:
    assert losses == reference(case).losses
    for name, tensor in state.items():
        assert torch.equal(reference(case).state[name], tensor), name


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        (Case("perceptron", "1f1b", 4, 8), 4),
        (Case("perceptron", "2bw", 3, 4, drain_after=(2,)), 3),
        (Case("perceptron", "interleaved", 2, 4, stages_per_rank=2), 4),
        (Case("skipping", "vertical", 3, 4, "adamw"), 3),
        (Case("perceptron", "1f1b", 2, 4, replicas=(2, 1)), 2),
    ],
    ids=lambda value: f"{value.subject}-{value.schedule}" if isinstance(value, Case) else "",
)
def test_a_stage_is_one_graph_for_all_versions_and_replicas(case: Case, graphs: int, counter: Counter) -> None:
    assert_equals_oracle(case, *train(case, counter))

    assert counter.graphs == graphs
