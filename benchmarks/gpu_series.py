"""The contenders of one launch, one after the other: each becomes a row, or the reason why there is none."""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
from contenders import Absent, Entry
from crews import Crew, Failed
from gpu_figures import Missing, Row, ranks_of, row_of
from gpu_lineup import Launch, Size, entries_of, setting_of
from gpu_turns import FACTS, Bench, Facts

PATIENCE_SECONDS = 60
"""For a contender, from building it to its last turn, and for the start of its processes."""
GRACE_SECONDS = 20
"""After the deadline, for what has begun before it."""


class Series:
    """Processes that last as long as none of them fails; then others take their place."""

    def __init__(self, launch: Launch, size: Size, device: torch.device, deadline: float) -> None:
        """`deadline`: of ``time.monotonic``; after it nothing is begun."""
        self.facts: Facts | None = None
        """Once there are processes."""
        self._launch, self._size, self._device, self._deadline = launch, size, device, deadline
        self._crew: Crew | None = None

    def rows(self) -> Iterator[Row | Missing]:
        """One for each contender, as soon as it is known."""
        setting = setting_of(self._size.model, self._size, self._device, self._launch.ranks)
        with tempfile.TemporaryDirectory() as folder:
            # Processes meet at a file, and never at that of others.
            meetings = (Path(folder) / str(number) for number in count())
            try:
                for entry in entries_of(self._launch, setting):
                    yield self._row(entry, meetings)
            finally:
                self._dismiss()

    def _row(self, entry: Entry | Absent, meetings: Iterator[Path]) -> Row | Missing:
        launch = self._launch
        missing = partial(Missing, entry.name, launch.processes, ranks_of(launch, entry))
        if isinstance(entry, Absent):
            return missing(entry.reason)
        left = self._deadline - time.monotonic()
        if left <= 0:
            return missing("left out: the deadline had passed")
        patience = min(PATIENCE_SECONDS, left + GRACE_SECONDS)
        try:
            if self._crew is None:
                arguments = (launch, self._size, self._device, next(meetings))
                self._crew = Crew(launch.processes, Bench, arguments, copies=self._device.type == "cpu")
                self.facts = self._crew.ask(FACTS, patience)[0]
            taken = self._crew.ask(entry.name, patience)
        except Failed as failure:
            self._dismiss()
            return missing(str(failure))
        assert self.facts is not None
        return row_of(launch, self._size, entry, self.facts, taken)

    def _dismiss(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None
