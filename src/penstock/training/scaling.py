"""Dynamic loss scaling: a factor on the loss that keeps small gradients from vanishing in float16.

The rule is that of ``torch.amp.GradScaler``: an update whose gradients are not all finite is skipped and lowers the
scale; after `interval` finite updates in a row the scale grows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.arguments import Rule, check_fields, integer, number

_GIVE = "give one, or leave it out: the defaults are those of torch.amp.GradScaler"
_RULES: Mapping[str, Rule[Any]] = {
    "initial": number(above=0).but(_GIVE),
    "growth": number(1).but(_GIVE),
    "backoff": number(above=0, most=1).but(_GIVE),
    "interval": integer(0).but(_GIVE),
}


@dataclass(frozen=True, slots=True)
class LossScale:
    """The rule of a loss scale: `initial` is multiplied by `backoff` when gradients overflow and by `growth` after
    `interval` updates without.

    The defaults are those of ``torch.amp.GradScaler``. Powers of two change no bit of a gradient that does not
    overflow. `interval` 0 keeps the scale as it is.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        check_fields(self, _RULES)

    @property
    def is_constant(self) -> bool:
        """Whether the scale never changes."""
        return self.backoff == 1 and (self.growth == 1 or self.interval == 0)


SKIPPING = LossScale(1.0, growth=1.0, backoff=1.0, interval=0)
"""A loss scale that changes no number. An update whose gradients are not finite is skipped, as with any loss scale."""
OnNonfinite: TypeAlias = Literal["raise", "skip", "rollback"]
"""What a pipeline does about losses and gradients that are not finite."""

_SCALE = number(above=0).but("give one, or leave it out", '"dynamic", a finite number above 0, or a penstock.LossScale')


def read_loss_scale(option: LossScale | str | float | None) -> LossScale | None:
    """The rule that `loss_scale=` asks for: "dynamic" is the default `LossScale`, a number is a constant scale."""
    match option:
        case None | LossScale():
            return option
        case str() if option == "dynamic":
            return LossScale()
        case _:
            scale = _SCALE.check("loss_scale", option)
            return LossScale(float(scale), growth=1.0, backoff=1.0, interval=0)


class LossScaler:
    """Holds the loss scale of the last stage from update to update.

    An overflow lowers the scale only if the gradients were made with the present one: under a schedule with several
    updates in flight, others that overflow for the same reason are noticed later.
    """

    def __init__(self, rule: LossScale) -> None:
        self.scale = rule.initial
        self.good = 0
        """Updates in a row without overflow."""
        self._rule = rule
        self._used: dict[int, float] = {}

    def scale_of(self, update: int) -> float:
        """The scale of the losses for `update`, fixed by the first call for it."""
        return self._used.setdefault(update, self.scale)

    def update(self, update: int, overflow: bool) -> None:
        """Adapts the scale after `update`, which comes after those before it. `overflow`: whether it was skipped."""
        if overflow and self._used.get(update) == self.scale:
            self.scale *= self._rule.backoff
            self.good = 0
        elif not overflow:
            self.good += 1
            if self.good == self._rule.interval:
                grown = self.scale * self._rule.growth
                self.scale = grown if math.isfinite(grown) else self.scale
                self.good = 0
        self._used = {of: scale for of, scale in self._used.items() if of >= update}

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; {} if the scale never changes."""
        return {} if self._rule.is_constant else {"scale": self.scale, "good": self.good}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores `state`. {} changes nothing, and a scale that never changes stays as it is."""
        if self._rule.is_constant:
            return
        self.scale, self.good = state.get("scale", self.scale), int(state.get("good", self.good))

    def history(self, newest: int) -> dict[str, float]:
        """The scales of the losses for updates up to now, named by the update, where `newest` is 0."""
        return {str(update - newest): scale for update, scale in self._used.items()}

    def restart(self, history: Mapping[str, float] | None = None) -> None:
        """Begins to count updates anew. `history`: what `history` returned, for a run that continues another one."""
        self._used = {int(update): scale for update, scale in (history or {}).items()}
