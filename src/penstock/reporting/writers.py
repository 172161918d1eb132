"""Logs the loss and the statistics of a training to Weights & Biases, TensorBoard, or anything with their methods."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from penstock.arguments import integer
from penstock.errors import PenstockError
from penstock.reporting.stats import Stats
from penstock.runtime.batches.results import StepResult


@runtime_checkable
class DictWriter(Protocol):
    """Takes all numbers of a step at once, as a run of Weights & Biases does."""

    def log(self, data: dict[str, float], step: int) -> object:
        """Writes `data`."""


@runtime_checkable
class ScalarWriter(Protocol):
    """Takes one number after the other, as TensorBoard's ``SummaryWriter`` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Writes one number."""


class Measured(Protocol):
    """A `Pipeline`."""

    @property
    def stats(self) -> Callable[..., Stats]:
        """As that of `Pipeline`."""


def log_stats(
    pipe: Measured,
    writer: DictWriter | ScalarWriter | None,
    step: int,
    result: StepResult | None = None,
    *,
    every: int = 10,
    **options: Any,
) -> None:
    """Logs the statistics of `pipe` under ``penstock/<name>``, if `step` is a multiple of `every`.

    `writer` has a method ``log(dict, step)``, as a run of Weights & Biases, or ``add_scalar(name, number, step)``, as
    TensorBoard's ``SummaryWriter``. It is None on ranks that log nothing. With `result`, what `Pipeline.step` returned,
    the loss is logged as ``loss``, and metrics under their own names; reading them waits until the last stage has them.
    Other keywords are those of `Pipeline.stats`; with ``all_ranks=True`` every rank must make this call. Raises
    `PenstockError` for another writer.
    """
    every = integer(1).but("give the number of steps between two that are logged").check("log_stats(every=)", every)
    step = integer(0).but("give the number of the step").check("log_stats(step=)", step)
    if writer is not None and not isinstance(writer, DictWriter | ScalarWriter):
        raise PenstockError(
            f"writer: expected an object with log(dict, step) or add_scalar(name, number, step), found {writer!r}. "
            "Pass a run of Weights & Biases or a SummaryWriter of TensorBoard, or None on ranks that log nothing"
        )
    if step % every or (writer is None and not options.get("all_ranks")):
        return
    stats = pipe.stats(**options)
    if writer is None:
        return
    numbers = {f"penstock/{name}": number for name, number in stats.as_dict().items()}
    if result is not None:
        numbers = {"loss": float(result.loss), **result.metrics, **numbers}
    _write(writer, numbers, step)


def _write(writer: DictWriter | ScalarWriter, numbers: Mapping[str, float], step: int) -> None:
    if isinstance(writer, DictWriter):
        writer.log(dict(numbers), step=step)
        return
    for name, number in numbers.items():
        writer.add_scalar(name, number, global_step=step)
