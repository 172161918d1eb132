"""Jobs that go wrong in the processes of a pool, and one that says which process it runs in.

All begin with a barrier: who leaves a process group at once may leave while others still join it.
"""

import os
import time

__all__ = ["FragileArgument", "end", "find_process", "hang", "raise_error", "return_what_cannot_be_read"]


class FragileArgument:
    """Cannot be made again where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return _fail, ()


def _fail() -> None:
    raise ValueError("cannot be read here")


def _meet() -> int:
    """The rank."""
    import torch.distributed as dist

    dist.barrier()
    return dist.get_rank()


def find_process(_: object = None) -> int:
    """Its number."""
    _meet()
    return os.getpid()


def raise_error(failing: int) -> None:
    """Raises in one of the ranks."""
    if _meet() == failing:
        raise ValueError("the job is broken")


def end(code: int) -> None:
    """Ends the process without a word."""
    _meet()
    os._exit(code)


def hang(seconds: float) -> None:
    """Sleeps in all ranks."""
    _meet()
    time.sleep(seconds)


def return_what_cannot_be_read() -> FragileArgument:
    """An answer that its reader cannot make again."""
    _meet()
    return FragileArgument()
