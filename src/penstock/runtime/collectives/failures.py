"""The first failure of a run, reported to every rank.

A rank that fails writes what happened to the store at which the processes met. The others look there all the time, so
an error ends all of them within seconds and each shows its cause, also where the failed process catches its exception
and lives on. A rank that leaves in good order writes that, before it closes its connections. A process that was killed
cannot write: a connection that breaks without a word is all the evidence there is, and on one host the operating
system's word.
"""

import errno
import os
import resource
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import PenstockError, TransportError
from penstock.process_states import ProcessIdentity, ProcessState
from penstock.runtime.collectives.one_screen import sentence_of
from penstock.runtime.collectives.store_watch import FAILURE, READERS, StoreUnreachable, StoreWatch
from penstock.runtime.files.plain_values import decode_plain, encode_plain

SAME_CALLS = "Make the same calls in the same order on every rank, also those whose result only one rank needs"
_ANSWER_SECONDS = 1.0
"""How long a rank that knows of a failure waits for a store that has been silent."""
_SLOW_ANSWER_SECONDS = 5.0
"""How long it waits for one that has answered until now, on a machine that may be busy."""
_CAUSE_SECONDS = 1.0
"""How long the error of a script may come after the script has closed its pipeline."""
_LOOK_SECONDS = 0.25
"""How often the operating system is asked for other processes."""
_LINGER_SECONDS = 2.0
"""How long a rank that has reported a failure stays for those that have not read it."""
_LONGEST_LINGER = 5.0
"""How many times as long it stays for those that are known to run, on a machine that may be busy."""
_SPARE = 8
"""The number of files that Gloo opens beside a connection to each rank, and some more."""


class WaitObserver:
    """Sees what this process waits for. This one does nothing; the transport does not know what another one does."""

    def waiting(self, context: str, peers: Sequence[int]) -> None:
        """Called every fraction of a second while this process waits in `context` for one of `peers`."""

    def failing(self, reason: str) -> None:
        """Called when the pipeline of this process has failed. `reason`: the error and the place."""

    def explain(self) -> str:
        """Called before the error of a timeout is raised. Returns the end of its message; it may take seconds."""
        return ""


class FailureBoard:
    """The place where the ranks of one pipeline report that they failed or leave; this process is `rank`.

    Only the thread of `watch` calls the store, so no method blocks for longer than a few seconds.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.watch = StoreWatch(store, rank)
        self._rank = rank
        self._ranks = ranks
        self.processes: Mapping[int, ProcessIdentity] = {}
        """The processes of the ranks, as far as they are known."""
        self._ended: set[int] = set()
        """Ranks that are known to have ended, and will read no report."""
        self._next_look = 0.0
        self._looking = threading.Lock()
        """The main thread and that of a save look for processes."""
        self.observer = WaitObserver()
        self.failed = False
        """Whether this rank has failed or knows of one that has."""
        self._finalizer = weakref.finalize(self, self.watch.stop)

    def report(self, place: str, trace: str, linger_seconds: float = _LINGER_SECONDS, *, sentence: str = "") -> None:
        """Reports to the other ranks that this one failed at `place`. Only the first report of a run counts.
        `sentence`: the error without its `trace`.

        Stays for up to `linger_seconds` until the others have read it, since the store may live in this process.
        """
        self.failed = True
        if self.watch.failure is not None:
            return
        record = encode_plain(
            {"rank": self._rank, "place": place, "sentence": sentence or trace, "traceback": trace}
        ).decode()
        # The process of a store that cannot be reached has ended or stands still. A report would reach no rank.
        with suppress(StoreUnreachable):
            first = self.watch.ask(lambda store: store.compare_set(FAILURE, "", record), self._patience)
            self.watch.look(self._patience)
            if decode_plain(first)["rank"] == self._rank:
                self._wait_for_readers(linger_seconds)

    def _wait_for_readers(self, seconds: float) -> None:
        began = time.monotonic()
        others = set(range(self._ranks)) - {self._rank}
        self.watch.observe(sorted(others))
        while (waited := time.monotonic() - began) < seconds * _LONGEST_LINGER:
            gone = {rank for rank in others if self._has_ended(rank) or self.has_left(rank)}
            readers = others - gone - self._ended
            if self.watch.ask(lambda store: store.add(READERS, 0), self._patience) >= len(readers):
                return
            if waited >= seconds and not any(self._state(rank) is ProcessState.RUNNING for rank in readers):
                return
            time.sleep(0.02)

    @property
    def _patience(self) -> float:
        """How long to wait for the store, in seconds."""
        return _ANSWER_SECONDS if self.watch.silent_seconds > _ANSWER_SECONDS else _SLOW_ANSWER_SECONDS

    def check(self) -> None:
        """Raises `TransportError` with the failed rank's traceback if another rank has reported a failure."""
        record = self.watch.failure
        if record is None or record["rank"] == self._rank:
            return
        self.failed = True
        rank = record["rank"]
        what = f"rank {rank} failed {record['place']}, so rank {self._rank} stops too"
        error = TransportError(
            f"{what}. Correct the error below, which is rank {rank}'s, and start again:\n{record['traceback']}"
        )
        error.repeats = f"{what}: {record['sentence']}"
        raise error

    def check_processes(self, ranks: Sequence[int], context: str) -> None:
        """Raises `TransportError` if the process of one of `ranks` has ended without a word. Only the operating system
        tells this, of processes on the same host. `context` says what this rank waits for.
        """
        with self._looking:
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + _LOOK_SECONDS
                self._look_for_processes(ranks, context)

    def _look_for_processes(self, ranks: Sequence[int], context: str) -> None:
        self.watch.observe(ranks)
        ended = {rank for rank in ranks if self._has_ended(rank)}
        # What it sent in the end may still be on its way.
        suspects, self._ended = ended & self._ended, self._ended | ended
        for rank in sorted(suspects):
            if self.watch.silent_seconds == 0:
                self.watch.look(_ANSWER_SECONDS)
                self.check()
            if not self.has_left(rank):
                self.failed = True
                raise TransportError(
                    f"rank {rank} has ended ({context}). It was probably killed (out of memory?): look at its log"
                )

    def find_cause(self, ranks: Sequence[int], context: str, error: Exception) -> TransportError:
        """Returns the error for a connection to one of `ranks` that broke with `error`. Raises the cause instead if a
        rank has reported one.
        """
        if (own := descriptor_error(context, error)) is not None:
            self.report("in a connection to other ranks", str(own))
            own.__cause__ = error
            return own
        self.watch.observe(ranks)
        deadline = time.monotonic() + _CAUSE_SECONDS
        while True:
            self.watch.look(self._patience)
            self.check()
            left = [rank for rank in ranks if self.has_left(rank)]
            # The error of a script may be reported after the script has closed its pipeline.
            if not left or self.watch.lost or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self.failed = True
        ended = [rank for rank in ranks if self._has_ended(rank)]
        self._ended.update(ended or (ranks if len(ranks) == 1 else ()))
        killed, gone = "was probably killed (out of memory?)", "left the training loop earlier"
        what = self.describe_left(left) or f"It {f'{killed} or {gone}' if self.watch.lost else killed}: look at its log"
        if self.watch.lost and self.watch.call:
            # The rank that held the store has ended before this one could read why.
            what = f"{what}. Rank {self._rank} is in {self.watch.call}, which all ranks must call"
        result = TransportError(
            f"{name_ranks(left or ended or ranks)} closed its connection to this rank ({context}). {what}. The "
            f"connection says: {error}"
        )
        result.__cause__ = error
        return result

    def describe(self, ranks: Sequence[int]) -> str:
        """What is known of `ranks`, in sentences, for an error; empty if nothing is."""
        if self.watch.lost:
            return " The store at which the processes have met is gone: its process has ended."
        if (seconds := self.watch.silent_seconds) > 0:
            return (
                f" The store at which the processes have met has not answered for {seconds:.1f} s: the process that "
                "holds it (torchrun's agent, or rank 0 without torchrun) stands still or cannot be reached."
            )
        states = self.watch.states
        known = [(rank, states[rank].describe(self.processes.get(rank))) for rank in ranks if rank in states]
        return "".join(f" Rank {rank} {text}." for rank, text in known)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` is known to take part no longer."""
        return rank in self.watch.states and self.watch.states[rank].left

    def describe_left(self, ranks: Sequence[int]) -> str:
        """What those of `ranks` that have left did not do, in a sentence for an error; empty if none has left."""
        left = [rank for rank in ranks if self.has_left(rank)]
        if not left:
            return ""
        text = "It left the training loop earlier: "
        if not self.watch.call:
            return f"{text}look at its log"
        return (
            f"{text}rank {self._rank} is in {self.watch.call}, which all ranks must call, and rank {left[0]} ended "
            f"{self.watch.states[left[0]].done} without it. Make the same calls on every rank, also those that "
            "only one rank needs, and as many steps"
        )

    def is_ahead(self, rank: int) -> bool:
        """Whether `rank` is known to have begun a later call of the pipeline than this one."""
        return rank in self.watch.states and self.watch.states[rank].begun[0] > self.watch.begun[0]

    def check_calls(self, ranks: Sequence[int]) -> None:
        """Raises `TransportError` if one of `ranks` is known to make another call in place of that of this rank."""
        for rank in ranks:
            if rank in self.watch.states:
                number, call = self.watch.states[rank].begun
                if number == self.watch.begun[0] and call != self.watch.begun[1]:
                    raise self.apart(rank, f"calls {self.watch.begun[1]}")

    def apart(self, rank: int, deed: str) -> TransportError:
        """The error where this rank does a `deed`, and `rank` is in another call."""
        self.failed = True
        return TransportError(
            f"the ranks are out of step: rank {self._rank} {deed}, which all ranks must do, and rank {rank} calls "
            f"{self.watch.states[rank].begun[1]}. {SAME_CALLS}"
        )

    def _state(self, rank: int) -> ProcessState:
        return self.processes[rank].state() if rank in self.processes else ProcessState.UNKNOWN

    def _has_ended(self, rank: int) -> bool:
        return self._state(rank) is ProcessState.GONE

    def leave(self) -> None:
        """Writes that this rank takes part no longer. Called before its connections are closed."""
        if not self.watch.left:
            self.watch.left = True
            self.watch.show(_ANSWER_SECONDS)

    def report_last_error(self) -> None:
        """Reports the error that ends the script of this process, if there is one that was not reported.

        Called at the exit of the process. Where the user has replaced ``sys.excepthook``, no other place sees it.
        """
        error = getattr(sys, "last_value", None)
        if not self.failed and error is not None and not isinstance(error, TransportError):
            trace = "".join(traceback.format_exception(error))
            self.report("outside the pipeline", trace, sentence=sentence_of(error))

    def close(self, last: Callable[[Store], None] | None = None) -> None:
        """Ends the thread that watches the store, after the call ``last(store)``."""
        self.watch.last = last
        self._finalizer()


def explained(error: BaseException, stage: int) -> BaseException:
    """`error`, or what it means if it is one of a connection inside of `stage`, which names a socket."""
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return error
    if isinstance(error, PenstockError):
        return error
    return TransportError(
        f"the connection to another process of stage {stage} broke in a collective of PyTorch's: that process failed, "
        f"died or left the training loop earlier. Look at its log. torch.distributed says: {error}"
    )


def descriptor_error(context: str, error: BaseException) -> TransportError | None:
    """The error for `context`, in which `error` was raised, if this process may open no more files; else None.

    PyTorch then says anything: that the other end has closed the connection, or that an address cannot be resolved.
    """
    if os.strerror(errno.EMFILE) not in str(error):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as refusal:
            if refusal.errno != errno.EMFILE:
                return None
        else:
            return None
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TransportError(
        f"this process may open no more files ({context}): expected room for the sockets and files of the connections "
        f"to other ranks, found a limit of {limit}, which it has reached. Raise the limit (ulimit -n, here up to "
        f"{'any number' if most == resource.RLIM_INFINITY else most}), or close what is open. The call says: {error}"
    )


def require_descriptors(connections: int) -> None:
    """Raises the `RuntimeError` of a failed call if this process may not open the files of that number of connections.
    Gloo would find that out in a thread of its own, where it ends the process.
    """
    opened: list[int] = []
    try:
        for _ in range(connections + _SPARE):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise RuntimeError(f"{connections} connections: {error}") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def name_ranks(ranks: Sequence[int]) -> str:
    """Names the ranks, one of which something is about."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "one of the ranks " + ", ".join(map(str, ranks))
