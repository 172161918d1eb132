"""Jobs for the tests of trust: tokens, and what a closed pipeline leaves behind."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import TransportError
from penstock.pipeline import Pipeline
from penstock.runtime.batches.results import StepResult
from penstock.runtime.transport.default_groups import TOKEN
from penstock.runtime.transport.transport import Edge
from penstock.runtime.transport.worlds import join_world
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan
from support.transport_selection import sharing_memory

_SECONDS = 120.0
"""How long a process may take to release what it no longer uses."""
_WARM_UP = 2
"""This number of pipelines imports and makes what all later ones share."""


@contextmanager
def _token(text: str | None) -> Iterator[None]:
    """Sets the token of the environment to `text`; None for none."""
    before = os.environ.pop(TOKEN, None)
    if text is not None:
        os.environ[TOKEN] = text
    try:
        yield
    finally:
        os.environ.pop(TOKEN, None)
        if before is not None:
            os.environ[TOKEN] = before


def join_with_tokens(tokens: Sequence[str | None]) -> str:
    """Joins the world with this rank's token of `tokens`. Returns the error."""
    with _token(tokens[dist.get_rank()]):
        try:
            join_world().leave()
        except TransportError as error:
            return f"TransportError: {error}"
    return "joined"


def list_stored_texts(token: str | None) -> list[str]:
    """All keys and values of the store after this rank has sent a message with `token` in the environment."""
    rank, edge = dist.get_rank(), Edge(0, 1)
    with _token(token), sharing_memory(False):
        world = join_world()
        transport = world.connect([edge], torch.device("cpu"), 30.0)
        if rank == 0:
            transport.send(edge, "kind", (torch.zeros(1),))
        else:
            transport.post(edge, "kind").wait()
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        texts = [repr((key, store.get(key))) for key in store.list_keys() if store.check([key])]
        dist.barrier()
        transport.close()
        world.leave()
    return texts


class Held(NamedTuple):
    """What this process holds."""

    descriptors: int
    threads: int
    memories: int
    """The mappings of shared memory."""
    keys: int
    """The keys of the store."""

    def is_within(self, other: "Held") -> bool:
        """Whether this is no more than `other`. What an earlier test has left may be released at any time."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def _held() -> Held:
    with open("/proc/self/maps") as file:
        memories = sum("memfd:penstock" in line for line in file)
    keys = 0
    if dist.is_initialized():
        keys = len(dist.distributed_c10d._get_default_store().list_keys())
    return Held(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), memories, keys)


def _train(shared: bool, end: str, plan: Plan | None) -> StepResult | None:
    """Trains one step with a pipeline, and ends it: it is closed, closed with messages in flight, closed after an error
    in the loss, or dropped. Returns a loss that was read.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"plan": plan} if plan else {"schedule": "2bw", "microbatches": 2, "stages": 2}
    with sharing_memory(shared):
        pipe = Pipeline(model, (torch.zeros(2, 4),), _compute_loss, _make_optimizer, **options)
    result, target = None, torch.full((4, 4), -1.0 if end == "failed" else 1.0)
    try:
        result = pipe.step(torch.ones(4, 4), target)
        if end == "failed":
            pipe.drain()
    except (ArithmeticError, TransportError):
        assert end == "failed"
    if result is not None and end in ("closed", "dropped"):
        pipe.drain()
        assert float(result.loss) >= 0.0
    if end != "dropped":
        pipe.close()
        pipe.close()
    return result if end in ("closed", "dropped") else None


def _compute_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if bool(target.min() < 0):
        raise ArithmeticError("a target below 0")
    return nn.functional.mse_loss(output, target)


def _make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def open_and_close(pipelines: int, shared: bool, end: str, replicas: bool) -> tuple[Held, Held]:
    """Returns what this process holds after the first pipelines, and after `pipelines` more. It is in the end waited
    for until nothing more is released.
    """
    plan = None
    if replicas:
        plan = Plan(stages=(Stage(0, 2, (0, 1)),), schedule="1f1b-flush", microbatches=2, microbatch_size=2)
    results = [_train(shared, end, plan) for _ in range(_WARM_UP)]
    before = _settled(None)
    results += [_train(shared, end, plan) for _ in range(pipelines)]
    after = _settled(before)
    del results
    return before, after


def _settled(wanted: Held | None) -> Held:
    """What this process holds when it is no more than `wanted`, or when the time is up; without `wanted`, when it has
    not changed for a while.
    """
    deadline, same, last = time.monotonic() + _SECONDS, 0, _held()
    for turn in count():
        if time.monotonic() > deadline:
            break
        if turn % 20 == 0:
            # It looks through all that was ever imported, so not in every turn.
            gc.collect()
        time.sleep(0.05)
        now = _held()
        same, last = (same + 1 if now == last else 0), now
        if (wanted is not None and now.is_within(wanted)) or (wanted is None and same >= 20):
            break
    if dist.is_initialized():
        dist.barrier()
    return last
