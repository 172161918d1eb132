"""The counts in a state: how far a training has come, checked before another one takes them over."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.arguments import SEED, integer
from penstock.errors import CheckpointError

_COUNT = integer(0, 2**53)
_UPDATES = integer(0, 10**8)
"""A scheduler is turned as often, so that a number of more digits would keep it for hours."""
_AS_SAVED = "Load what Pipeline.state_dict() returned, or a checkpoint of Pipeline.save(...), without changes"


def check_progress(
    saved: Mapping[str, Any], *, hooks: Sequence[str], schedules: bool, scaler_here: bool, scales_loss: bool
) -> None:
    """Raises `CheckpointError` unless `saved`, the part ``pipeline`` of a state, is whole and fits.

    `hooks`: the classes of the update hooks of this training. `schedules`: it has learning-rate schedulers on this
    process. `scaler_here`: it scales the loss on this process; `scales_loss`: on any.
    """
    for name in ("steps", "microbatches"):
        if not _COUNT.accepts(saved.get(name)):
            _refuse(name, _COUNT.expected, saved)
    if not SEED.optional.accepts(saved.get("seed", "nothing")):
        _refuse("seed", f"{SEED.expected}, or None", saved)
    found = saved.get("hooks")
    if not isinstance(found, Sequence) or list(found) != list(hooks):
        raise CheckpointError(
            f"the state is of a training with the update hooks {found}: expected {list(hooks)}, those of this "
            "pipeline, in the same order, since each takes over its own state. Pass the same update_hooks="
        )
    if schedules and not _UPDATES.accepts(saved.get("updates")):
        _refuse("updates", f"{_UPDATES.expected}, those that the learning-rate scheduler has seen", saved)
    _check_scale(saved, scaler_here, scales_loss)


def _check_scale(saved: Mapping[str, Any], scaler_here: bool, scales_loss: bool) -> None:
    scale = saved.get("loss_scale")
    if scale is not None and not scales_loss:
        raise CheckpointError(
            "the state is of a training with loss_scale=, and this pipeline has none: expected the same. Pass the same "
            "loss_scale="
        )
    if scale is None and not scaler_here:
        return
    if not isinstance(scale, Mapping) or not all(
        isinstance(scale.get(name), int | float) and not isinstance(scale[name], bool) and scale[name] >= 0
        for name in ("scale", "good")
    ):
        _refuse("loss_scale", "the scale of the loss and the updates without overflow", saved)


def _refuse(name: str, expected: str, saved: Mapping[str, Any]) -> None:
    found = repr(saved[name])[:80] if name in saved else "nothing"
    raise CheckpointError(
        f"{name} in the part 'pipeline' of the state: expected {expected}, found {found}. {_AS_SAVED}"
    )
