"""Runs of pipelines that are compiled, and whose stages are recorded."""

from collections.abc import Mapping
from typing import Any

from support.simulated.simulated_graph_capturer import GRAPHED, simulated_graph_capture
from support.training import Case, Outcome, run_pipeline
from support.transport_selection import sharing_memory

__all__ = ["run_compiled", "run_recorded", "run_recorded_over"]


def run_compiled(case: Case, compile: Mapping[str, Any]) -> Outcome:
    """The run with `compile`."""
    return run_pipeline(case, compile=compile)


def run_recorded(case: Case, compile: Mapping[str, Any] = GRAPHED) -> Outcome:
    """The run with recordings on the CPU, which it must have used."""
    with simulated_graph_capture() as made:
        outcome = run_compiled(case, compile)
    assert made
    assert all(recorder.replays > recorder.captures for recorder in made)
    return outcome


def run_recorded_over(case: Case, compile: Mapping[str, Any], shared: bool) -> Outcome:
    """The same, where shared memory carries the messages or, if not `shared`, Gloo."""
    with sharing_memory(shared):
        return run_recorded(case, compile)
