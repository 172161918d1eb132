"""Devices by name, as users give them."""

import torch

from penstock.arguments import text_of
from penstock.errors import PenstockError


def read_device(where: str, device: object, error: type[PenstockError] = PenstockError) -> torch.device:
    """The device that `device` is or names, with its index, once a tensor was made there; `error` if there is none.

    `where`: the function and the argument.
    """
    try:
        made: torch.Tensor = torch.empty(0, device=device)  # type: ignore[call-overload]  # else it raises
    except (RuntimeError, AssertionError, TypeError) as failure:
        reason = str(failure).partition("\n")[0]
        raise error(
            f"{where}: expected cpu, cuda or cuda:N that is there, found {text_of(device)}: {reason}. Give another one"
        ) from failure
    return made.device
