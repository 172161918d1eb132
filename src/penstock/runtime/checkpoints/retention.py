"""Which checkpoints of a run stay when a new one has been saved."""

import logging
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import is_count
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.step_directories import remove, steps_in


@dataclass(frozen=True, slots=True)
class Retention:
    """The last `keep` checkpoints stay (all, if it is None), and those whose step `keep_every` divides."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and not is_count(value, 1):
                raise CheckpointError(f"{name}={value!r}: expected a whole number of at least 1, or None. Give one")

    def apply(self, run: Path, saved: int) -> None:
        """Removes from `run` what need not stay after step `saved`. An error here is only logged.

        Later steps, from a run that was given up, count as older than `saved`.
        """
        if self.keep is None:
            return
        steps = steps_in(run)
        order = sorted(steps, key=lambda found: (found[0] <= saved, found[0]), reverse=True)
        for step, path in order[self.keep :]:
            if self.keep_every is None or step % self.keep_every:
                try:
                    remove(path)
                except OSError as error:
                    logging.getLogger("penstock").warning("%s could not be removed: %s", path, error)
