"""Dynamic loss scaling: a factor on the loss that keeps small gradients from vanishing in float16.

The rule is that of ``torch.amp.GradScaler``: an update whose gradients are not all finite is skipped and lowers the
scale; after `interval` updates in a row that are, the scale grows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError

__all__ = ["LossScale", "LossScaler", "read_loss_scale"]


@dataclass(frozen=True, slots=True)
class LossScale:
    """`initial` is multiplied by `backoff` when gradients overflow and by `growth` after `interval` updates without.

    The defaults are those of ``torch.amp.GradScaler``. Powers of two change no bit of a gradient that does not
    overflow. `interval` 0 keeps the scale as it is.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not (self.initial > 0 and self.growth >= 1 and 0 < self.backoff <= 1 and self.interval >= 0):
            raise PenstockError(
                f"{self}: expected initial above 0, growth of at least 1, backoff above 0 and at most 1, and interval "
                "0 or more"
            )


def read_loss_scale(wish: LossScale | str | float | None) -> LossScale | None:
    """What `loss_scale=` means: "dynamic" is the default `LossScale`, a number a scale that stays."""
    match wish:
        case None | LossScale():
            return wish
        case "dynamic":
            return LossScale()
        case int() | float() if not isinstance(wish, bool) and wish > 0:
            return LossScale(float(wish), growth=1.0, backoff=1.0, interval=0)
        case _:
            raise PenstockError(
                f'loss_scale={wish!r}: expected "dynamic", a number above 0, a penstock.LossScale, or None'
            )


class LossScaler:
    """The scale from update to update of one stage, the last one.

    An overflow lowers the scale only if the gradients were made with the present one: under a schedule with several
    updates in flight, the others that overflow for the same reason are noticed after it.
    """

    def __init__(self, rule: LossScale) -> None:
        self.scale = rule.initial
        self.good = 0
        """Updates in a row that did not overflow."""
        self._rule = rule
        self._used: dict[int, float] = {}

    def used(self, update: int) -> float:
        """The scale of the losses for `update`: that of the moment at which it is asked for first."""
        return self._used.setdefault(update, self.scale)

    def settle(self, overflown: list[int], keep: int) -> None:
        """After an update that knows of the updates `overflown`. Updates before `keep` are not spoken of again."""
        if any(self._used.get(update) == self.scale for update in overflown):
            self.scale *= self._rule.backoff
            self.good = 0
        elif not overflown:
            self.good += 1
            if self.good == self._rule.interval:
                grown = self.scale * self._rule.growth
                self.scale = grown if math.isfinite(grown) else self.scale
                self.good = 0
        for update in [update for update in self._used if update < keep]:
            del self._used[update]

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self.good}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from `state`; {} changes nothing."""
        self.scale, self.good = state.get("scale", self.scale), int(state.get("good", self.good))

    def restart(self) -> None:
        """Updates are counted anew."""
        self._used.clear()
