"""What a pipeline does about losses and gradients that are not finite: the rule that `on_nonfinite=` asks for."""

from typing import Literal, TypeAlias, get_args

from penstock.errors import PenstockError
from penstock.training.scaling import LossScale

OnNonfinite: TypeAlias = Literal["raise", "skip", "rollback"]
SKIPPING = LossScale(1.0, growth=1.0, backoff=1.0, interval=0)
"""A loss scale that changes no number. An update whose gradients are not finite is skipped, as with any loss scale."""


def check_on_nonfinite(option: object) -> None:
    """Raises `PenstockError` if `option` is no rule."""
    if option not in get_args(OnNonfinite):
        raise PenstockError(
            f"on_nonfinite={option!r}: expected 'raise' (a loss that is not finite is an error), 'skip' (an update "
            "whose gradients are not finite is left out on all stages) or 'rollback' (such a loss also takes the "
            "training back to its newest checkpoint). Pass one of them"
        )
