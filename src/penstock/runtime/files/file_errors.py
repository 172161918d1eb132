"""What an error around files says: the file, what was found, and the way out."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import CheckpointError, TransportError

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free space or give"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Correct the permissions or give"),
}


@contextmanager
def files_explained(path: object = None) -> Iterator[None]:
    """Raises what its body raises as a `CheckpointError`, with the file and the way out; a `TransportError` as it is.
    `path`: the file, where the error has none.
    """
    try:
        yield
    except (CheckpointError, TransportError):
        raise
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path or 'the checkpoint'}: expected to write or read it, found: "
            f"{error.strerror or error}. {_ADVICE.get(error.errno or 0, 'Give')} another directory; older "
            "checkpoints are whole, and the pipeline can go on"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path or 'the checkpoint'}: expected to write or read it, found {type(error).__name__}: {error}. Older "
            "checkpoints are whole, and the pipeline can go on"
        ) from error
