"""The store of one attempt of a job: what processes of an earlier attempt left in torchrun's store is not in it.

torchrun's agent keeps one store for all attempts (torch 2.11 to 2.13), and torch uses the same keys in each. So after a
restart a process finds the addresses of dead processes, and connects to them until its timeout. Here the ranks of an
attempt agree on a name which no other attempt has, and put it before all keys.

The ranks cannot count attempts: those of several hosts disagree about it, and an attempt may end before all have begun.
So each draws a token of its own:

  1. Rank 0 publishes its token. Every other rank answers it with its own.
  2. When all have answered, rank 0 publishes their tokens under its own.
  3. A rank goes on when its token is among those that are published under rank 0's. Before that it may have read, and
     answered, the token of an earlier rank 0; then it reads again.
"""

import json
import os
import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import TransportError

_NEWEST = "penstock/newest attempt"
_POLL_SECONDS = 0.02


def shares_store() -> bool:
    """Whether torchrun gives all attempts of this job one store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(store: Store, rank: int, ranks: int, deadline: float) -> Store:
    """The keys of this attempt in the `store` of all attempts. Collective.

    `TransportError` if the others do not come before `deadline`, in seconds of ``time.monotonic``.
    """
    name = _lead(store, ranks, deadline) if rank == 0 else _follow(store, rank, deadline)
    return PrefixStore(f"attempt {name}", store)


def _lead(store: Store, ranks: int, deadline: float) -> str:
    token = uuid.uuid4().hex
    store.set(_NEWEST, token)
    answers = [_answer(token, rank) for rank in range(1, ranks)]
    while not store.check(answers):
        missing = [rank for rank in range(1, ranks) if not store.check([_answer(token, rank)])]
        _sleep(deadline, f"rank 0 waited for rank(s) {', '.join(map(str, missing))}")
    store.set(_began(token), json.dumps([token, *(store.get(answer).decode() for answer in answers)]))
    return token


def _follow(store: Store, rank: int, deadline: float) -> str:
    own, answered = uuid.uuid4().hex, ""
    while True:
        if store.check([_NEWEST]):
            token = store.get(_NEWEST).decode()
            if token != answered:
                # An earlier process of this rank may have answered the same rank 0, which then does not know this one.
                store.set(_answer(token, rank), own)
                answered = token
            if store.check([_began(token)]) and own in json.loads(store.get(_began(token))):
                return token
        _sleep(deadline, f"rank {rank} waited for rank 0")


def _answer(token: str, rank: int) -> str:
    return f"penstock/answer {token}/{rank}"


def _began(token: str) -> str:
    return f"penstock/began {token}"


def _sleep(deadline: float, waiting: str) -> None:
    if time.monotonic() > deadline:
        run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        raise TransportError(
            f"joining the processes of attempt {run} of this job: {waiting} until the timeout. Expected all "
            "processes of torchrun to build their pipeline, found that some did not: look at their logs"
        )
    time.sleep(_POLL_SECONDS)
