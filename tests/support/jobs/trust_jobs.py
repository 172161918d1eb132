"""Jobs for the tests of trust: tokens, strangers, and what a closed pipeline leaves behind."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.runtime.transport.run_keys import TOKEN
from penstock.runtime.transport.transport import Edge
from penstock.runtime.transport.worlds import join_world
from support.transport_selection import sharing_memory

__all__ = ["join_with_tokens", "list_stored_texts"]


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
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert isinstance(store, dist.FileStore)
        with open(store.path, "rb") as file:  # type: ignore[attr-defined]  # missing in its stub
            texts = [repr(file.read())]
        dist.barrier()
        transport.close()
        world.leave()
    return texts
