"""The contenders of one launch, one after the other: each becomes a row, or the reason why there is none."""

import re
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch

from contenders.contenders import Absent
from gpu_benchmark.devices import sharing_of
from gpu_benchmark.figures import Missing, Row, ranks_of, row_of
from gpu_benchmark.lineup import Contender, Launch, Size, contenders_of
from gpu_benchmark.turns import FACTS, Bench, Facts
from gpu_benchmark.worker_processes import Crew, Failed

GRACE_SECONDS = 20
"""After the deadline, for what has begun before it."""


class Series:
    """Processes that last as long as none of them fails; then others take their place."""

    def __init__(
        self,
        launch: Launch,
        size: Size,
        device: torch.device,
        deadline: float,
        only: re.Pattern[str] | None = None,
    ) -> None:
        """`deadline`: of ``time.monotonic``; after it nothing is begun. `only`: is to be found in the names."""
        self.facts: Facts | None = None
        """Once there are processes."""
        self.contenders = contenders_of(launch, size, device, only)
        self._launch, self._size, self._device, self._deadline = launch, size, device, deadline
        self._sharing = sharing_of(device) if launch.processes > 1 else None
        self._crew: Crew | None = None

    def rows(self) -> Iterator[Row | Missing]:
        """One for each contender, as soon as it is known. Without contenders no process is started."""
        with tempfile.TemporaryDirectory() as folder:
            # Processes meet at a file, and never at that of others.
            meetings = (Path(folder) / str(number) for number in count())
            try:
                for contender in self.contenders:
                    yield self._row(contender, meetings)
            finally:
                self._dismiss()

    def _row(self, contender: Contender, meetings: Iterator[Path]) -> Row | Missing:
        launch = self._launch
        missing = partial(Missing, contender.name, launch.processes, ranks_of(launch, contender.entry))
        if isinstance(contender.entry, Absent):
            return missing(contender.entry.reason)
        left = self._deadline - time.monotonic()
        if left <= 0:
            return missing("left out: the deadline had passed")
        timeout = min(contender.variant.patience_seconds, left + GRACE_SECONDS)
        try:
            if self._crew is None:
                arguments = (launch, self._size, self._device, next(meetings))
                self._crew = Crew(launch.processes, Bench, arguments, copies=self._device.type == "cpu")
                self.facts = self._crew.ask(FACTS, timeout)[0]
            taken = self._crew.ask(contender.name, timeout)
        except Failed as failure:
            self._dismiss()
            return missing(str(failure))
        assert self.facts is not None
        return row_of(launch, self._size, contender, self.facts, taken, self._sharing)

    def _dismiss(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None
