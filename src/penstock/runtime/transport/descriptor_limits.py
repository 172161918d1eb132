"""Tells where a connection breaks because this process may open no more files and sockets.

PyTorch then says anything: that the other end has closed the connection, or that an address cannot be resolved.
"""

import errno
import os
import resource

from penstock.errors import TransportError

_SPARE = 8
"""More than Gloo opens beside a connection to each rank."""


def descriptor_error(context: str, error: BaseException) -> TransportError | None:
    """The error for `context`, in which `error` was raised, if this process may open no more files; else None."""
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
