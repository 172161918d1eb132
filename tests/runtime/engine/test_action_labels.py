"""The worker has a method for each kind of action, and labels actions in a trace of `torch.profiler`."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from torch.profiler import ProfilerActivity, profile

import penstock
from penstock.runtime.engine.worker import _METHODS
from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Step
from penstock.timelines.spans import trace_label
from support.training import Case


def test_every_kind_of_action_has_a_method() -> None:
    assert _METHODS.keys() == set(get_args(Action))


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "flush": (Case("perceptron", "1f1b-flush", 2, 3), {}),
    "split backwards and norms": (Case("perceptron", "zb-h1", 2, 3), {"clip_grad_norm": 1.0}),
    "replicas": (Case("perceptron", "gpipe", 2, 4, replicas=(1, 2)), {}),
}


def labels_of(work: Callable[[], object]) -> list[str]:
    """The labels of Penstock's, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        work()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("penstock ")]


@pytest.mark.parametrize("name", CASES)
def test_every_action_of_a_step_has_one_label(name: str) -> None:
    case, options = CASES[name]
    pipe = penstock.Pipeline(case.build(), **case.options, **options)
    pipe.step(*case.batches[0])
    labels = labels_of(lambda: pipe.step(*case.batches[1]))
    actions = [action for rank in range(pipe.schedule.ranks) for action in pipe.schedule.row(rank, Step(1))]

    assert sorted(labels) == sorted(trace_label(str(action)) for action in actions)


@pytest.mark.parametrize(("recompute", "expected"), [(True, 4), ("layers", 18)])
def test_what_is_computed_again_has_a_label(recompute: bool | str, expected: int) -> None:
    """Both microbatches of two stages, or of eight layers and the loss."""
    case = Case("perceptron", "gpipe", 2, 2)
    pipe = penstock.Pipeline(case.build(), **case.options, recompute=recompute)
    labels = labels_of(lambda: pipe.step(*case.batches[0]))

    assert labels.count("penstock recompute") == expected


@pytest.mark.parametrize(
    ("action", "label"),
    [
        ("1F3@0", "penstock forward stage 1 microbatch 3"),
        ("2B0@1", "penstock backward stage 2 microbatch 0"),
        ("2I0@1", "penstock input backward stage 2 microbatch 0"),
        ("2W0@1", "penstock weight backward stage 2 microbatch 0"),
        ("2U3<1", "penstock update stage 2 version 3"),
        ("2A3", "penstock reduce stage 2 version 3"),
        ("2S0>3", "penstock send stage 2 microbatch 0 to stage 3"),
        ("3R0<2", "penstock receive stage 3 microbatch 0 from stage 2"),
        ("0T1>3", "penstock send tied gradients stage 0 version 1 to stage 3"),
        ("1N3<2", "penstock receive norms stage 1 version 3 from stage 2"),
        ("2G1", "penstock fetch stage 2 version 1"),
        ("2Q1", "penstock release stage 2 version 1"),
    ],
)
def test_labels_in_words(action: str, label: str) -> None:
    assert trace_label(action) == label
