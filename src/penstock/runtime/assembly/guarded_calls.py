"""Around every call of a user: what is refused and hinted at, and an error of one process that reaches the others.

A refusal changes nothing: the call did not begin. If all processes refuse a call, all can go on. An error ends the
pipeline.

A hint is for a slip that is no error: the training runs, but seldom as it was meant. It says what was found, what
follows from it, and what to do. Rank 0 writes it, once in the life of a pipeline.

A pipeline that is dropped without a call of `close` is closed, too. Threads of the transport and hooks on the process
would otherwise keep descriptors, communicators and memory for as long as the process lives.
"""

import atexit
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.engine.engine import Engine
from penstock.runtime.parameters.model_claims import ModelClaim
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule

M = TypeVar("M", bound=Callable[..., Any])

_FINISH_SECONDS = 120.0
"""Longer than closing takes, where each wait has a limit of its own."""

_LOST = (
    "its messages and microbatches in flight are lost. Its parameters() are as the last finished update of this "
    "process left them. Close it, and build a new Pipeline with resume= or load a checkpoint: in the same processes, "
    "or after a new start"
)


def collective(method: M) -> M:
    """Marks a method of a pipeline that all ranks must call."""

    @wraps(method)
    def called(pipe: Any, *arguments: Any, **options: Any) -> Any:
        with pipe._guarded.calling(f"{method.__name__}()", pipe):
            return method(pipe, *arguments, **options)

    return cast("M", called)


class FailureGuard:
    def __init__(self, world: World) -> None:
        self._world = world
        self._process = os.getpid()
        self._failed = ""
        """The error that ended the pipeline, and its place."""
        self._running = threading.Lock()
        """Held while a call uses the stages."""
        self._place = ""
        """What that call does."""
        self.closed = False
        """Whether the pipeline was closed."""
        self.after_load: Callable[[], object] = bool
        """Called when the pipeline was given a new state."""
        self.all_refuse: Callable[[str], bool] | None = None
        """Called with the reason on every process that refuses a call. Returns whether all of them do. None while the
        pipeline is being built.
        """
        self.call: tuple[str, float, int] = "", time.perf_counter(), threading.get_ident()
        """Where the pipeline is called now, empty if it is not; since when; and the thread that called it last."""

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that is a rank, and has copies of its connections to other ranks."""
        return self._world.processes > 1 and os.getpid() != self._process

    @contextmanager
    def calling(self, name: str, pipe: Any) -> Iterator[None]:
        """Notes a call of `name` of `pipe`, which all ranks must make, for the errors of a rank that waits in it for
        ranks that do not make it.
        """
        watch = self._world.watch
        if watch is None or watch.call:
            yield
            return
        watch.call = name
        watch.begun = watch.begun[0] + 1, name
        try:
            yield
        finally:
            watch.call, watch.done = "", f"after step {pipe.steps}"

    @contextmanager
    def closing(self, opened: ExitStack, hint: Callable[[], object]) -> Iterator[bool]:
        """Yields whether the caller should drain before the pipeline is closed. Then gives the `hint`, unless the
        pipeline has failed, and closes what is `opened`. In a child that was forked it does nothing.
        """
        if self.forked:
            yield False
            return
        ends = not (self.closed or self.failed)
        try:
            yield ends and sys.exc_info()[0] is None
        finally:
            if ends:
                hint()
            self.closed = True
            opened.close()

    @contextmanager
    def __call__(self, place: str, harmless: bool = False) -> Iterator[None]:
        """Reports an error in this block to the other processes. The error ends the pipeline.

        A `harmless` block uses no stage. The pipeline stays as it was if all processes raise a `PenstockError` in it,
        or any error if there is one process. `PenstockError` if the pipeline has failed or was closed before, or is
        used by another call.
        """
        self.check_open()
        if not harmless and not self._running.acquire(blocking=False):
            self._refuse_second()
        self._world.enter(place)
        self.call = place, time.perf_counter(), threading.get_ident()
        try:
            if not harmless:
                self._place = place
            yield
        except BaseException as error:
            # A failure within a call of this block was reported there.
            if not self._failed and not (harmless and self._is_refusal(error)):
                self._failed = f"{type(error).__name__} {place}"
                if self.all_refuse is not None:
                    error.add_note(f"penstock: the pipeline has failed, and {_LOST}")
                self._world.report(place, error)
            raise
        finally:
            self.call = "", time.perf_counter(), threading.get_ident()
            self._world.enter("")
            if not harmless:
                self._running.release()

    def run(self, place: str, work: Callable[[], object]) -> None:
        """Calls `work` in such a block."""
        with self(place):
            work()

    def check_open(self) -> None:
        """Raises `PenstockError` if the pipeline has failed, was closed, is used by another call, or is a copy in a
        child.
        """
        if self.forked:
            raise PenstockError(
                f"process {os.getpid()} was forked by rank {self._world.rank} (process {self._process}) after the "
                "pipeline was built: expected calls in that process only, since it is the one that the other ranks are "
                "connected to. Make the call there, and give the child what it needs, such as copies of weights"
            )
        if self._failed:
            raise PenstockError(f"this pipeline failed before ({self._failed}), and {_LOST}")
        if self.closed:
            raise PenstockError(
                "this pipeline was closed: expected calls before close() only, or inside of its with block. Close it "
                "after the last call, or build a new Pipeline and load a state dict"
            )
        if self._running.locked():
            self._refuse_second()

    def _refuse_second(self) -> None:
        raise PenstockError(
            f"this pipeline is already in use ({self._place}): expected one call at a time, found a call from another "
            "thread, or from the model, the loss function or a hook within a call. Make it when that call has returned"
        )

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether all processes go on after `error`."""
        if self._world.processes == 1:
            return True
        return self.all_refuse is not None and isinstance(error, PenstockError) and self.all_refuse(str(error))


def open_resources(owner: object, world: World) -> ExitStack:
    """Returns the stack for what `owner` opens in `world`. `owner.close` closes the stack, which leaves `world` last.
    Or a thread of its own closes it after `owner` has been collected.

    Closing delivers what was sent, which takes time, and a collection may come at any place of a program, also where it
    holds a lock. So the collection only puts the stack into a queue, which takes no lock of Python's. The process ends
    when all stacks in the queue are closed. Stacks that are collected later stay open: the transport ends itself then.
    """
    opened = ExitStack()
    opened.callback(world.leave)
    if world.processes > 1:
        finalizer = weakref.finalize(owner, _drop, _dropped(os.getpid()), opened)
        finalizer.atexit = False
    return opened


class _Dropped:
    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[ExitStack | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_close_all, args=(self.waiting,), name="penstock close", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until all are closed. A thread that were still closing would abort the end of the process."""
        self.waiting.put(None)
        self._thread.join(_FINISH_SECONDS)


@cache
def _dropped(process: int) -> _Dropped:
    """What the `process` has dropped. A child that was forked closes nothing of its parent's."""
    return _Dropped()


def _drop(dropped: _Dropped, opened: ExitStack) -> None:
    dropped.waiting.put(opened)
    if not hooks_allowed():
        return
    # Last registered, so that it comes before the exit handlers of transports, which may be those in the queue.
    atexit.unregister(dropped.finish)
    atexit.register(dropped.finish)


def _close_all(waiting: "queue.SimpleQueue[ExitStack | None]") -> None:
    while (opened := waiting.get()) is not None:
        # The pipeline that could raise it is gone.
        with suppress(Exception):
            opened.close()
        del opened


class StepConditions:
    """The conditions for steps of a pipeline on `modules` by its `optimizers`. `trains`: whether any process trains a
    parameter.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], trains: bool) -> None:
        self._claim = ModelClaim(modules, optimizers)
        self._trains, self._averaged = trains, False

    @contextmanager
    def averaged(self, change: Callable[[], None]) -> Iterator[None]:
        """Context manager in which the parameters hold averages. `change` is called where they begin and end."""
        change()
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = False
            change()

    def check(self) -> None:
        """Raises `PenstockError` if a step would train nothing, or other weights than those of this pipeline."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
            raise PenstockError(
                f"step() was called under {mode}: expected gradients to be enabled, since the step would train "
                "nothing. Call step() outside of that block, or evaluate() or predict() for a result without training"
            )
        if not self._trains:
            raise PenstockError(
                "step() would train nothing: expected an optimizer with at least one parameter that requires a "
                "gradient on some rank, found none. Unfreeze parameters before the pipeline is built, or return an "
                "optimizer over them; evaluate() and predict() need none"
            )
        self.check_weights("step")
        self._claim.check()

    def check_weights(self, call: str) -> None:
        """Raises `PenstockError` if the parameters hold averages, with which `call` would train, save or be undone."""
        if self._averaged:
            raise PenstockError(
                f"{call}() was called inside of averaged(): expected evaluations, predictions, state dicts and "
                f"save_weights() only, since the parameters hold averages there. Call {call}() after the block"
            )


def give_hints(modules: Sequence[nn.Module], schedule: Schedule, rank: int) -> None:
    """Hints at a model whose `modules` are in evaluation mode, and at steps of several updates."""
    if rank != 0:
        return
    log = logging.getLogger("penstock")
    if modules and not any(module.training for module in modules):
        log.warning(
            "the model is in evaluation mode, and its layers will train so: dropout does nothing and BatchNorm uses "
            "its old statistics. Call model.train() before the Pipeline is built, unless you mean it"
        )
    sizes = schedule.guarantees.microbatches_per_update
    if schedule.definition.updates_per_microbatch and schedule.microbatches > min(sizes):
        log.warning(
            "updates per step: %d under %s, one for %d microbatch(es), so learning rates and schedulers count more of "
            "them than steps. Give microbatches=1, or choose a schedule that flushes, for one update per step",
            schedule.microbatches // min(sizes),
            schedule.name,
            min(sizes),
        )


def remind_to_drain(pipe: object, engine: Engine, rank: int) -> "weakref.finalize[..., object]":
    """Hints, when `pipe` is gone or the process ends, that microbatches of `engine` were never finished. A call of what
    it returns does so now, and `detach` not at all.
    """
    # No strong reference: what is reminded of must not be kept alive by it.
    return weakref.finalize(pipe, _remind, weakref.ref(engine), rank)


def _remind(engine_of: weakref.ref[Engine], rank: int) -> None:
    engine = engine_of()
    # After an error that ended the program, nothing could have been drained.
    if engine is not None and engine.undrained and rank == 0 and getattr(sys, "last_value", None) is None:
        logging.getLogger("penstock").warning(
            "the pipeline ended with microbatches in flight: the backwards and updates of the last step(s) were not "
            "made. Call pipe.drain() after the last step, or use the pipeline in a with block"
        )
