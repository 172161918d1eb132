"""How long a pipeline takes until it has made its first step, part by part.

The parts are the calls that `Pipeline` makes while it is built, each timed in the module that calls it. What is left
over is the rest: agreements between the processes mostly, in which a process also waits for slower ones.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import penstock
from penstock import pipeline
from penstock.runtime.assembly import scheduled_plans, started_engines

PARTS: dict[tuple[ModuleType, str], str] = {
    (pipeline, "capture_for_training"): "capture",
    (scheduled_plans, "make_schedule"): "schedule",
    (scheduled_plans, "verify"): "verify",
    (pipeline, "check_agreement"): "agreement",
    (started_engines, "buffered_stages"): "buffers",
    (started_engines, "connect_tensor_parallel"): "connections",
    (started_engines, "build_stages"): "stages",
    (started_engines, "make_workers"): "workers",
}
"""By the module that calls a function and the function's name there: what it is called here."""


def timed_start(build: Callable[[], penstock.Pipeline]) -> tuple[penstock.Pipeline, dict[str, float]]:
    """The pipeline that `build` makes, and the seconds of its parts; ``rest`` is what they leave over."""
    seconds = dict.fromkeys(PARTS.values(), 0.0)
    start = time.perf_counter()
    with _watched(seconds):
        pipe = build()
    seconds["rest"] = time.perf_counter() - start - sum(seconds.values())
    return pipe, seconds


@contextmanager
def _watched(seconds: dict[str, float]) -> Iterator[None]:
    """Calls of PARTS that are made inside add what they take to `seconds`."""
    watched = {place: getattr(*place) for place in PARTS}
    for (module, name), function in watched.items():
        setattr(module, name, _timed(function, PARTS[module, name], seconds))
    try:
        yield
    finally:
        for (module, name), function in watched.items():
            setattr(module, name, function)


def _timed(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    @wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[part] += time.perf_counter() - start

    return timed
