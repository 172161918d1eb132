"""Losses: those that a user's `loss_fn` returns, those that the model computes itself, and what they are means over."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.arguments import FLAG, TEXT, is_number, text_of
from penstock.errors import PenstockError

IGNORED = -100
"""The label that losses of PyTorch and of Hugging Face leave out of their mean."""

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""``loss_fn(output, target)``: the mean over the microbatch's samples as a tensor, or that and a dict of metrics."""


LossWeight: TypeAlias = Callable[[Any], Tensor | float]
"""``loss_weight(target)``: the number of items (tokens, for example) that the loss for `target` is the mean over."""

Weigh: TypeAlias = Callable[[Sequence[Any], Sequence[float]], list[float]]
"""The same for several targets with their numbers of samples: `amounts_of` with a `LossWeight`."""


def model_loss(output: Any, target: None = None) -> Any:
    """The loss that the model computed itself. Pass it as `loss_fn`, and the labels among the model's inputs.

    `output`: an object or a mapping with an entry ``loss``, as models of Hugging Face return it; a tuple whose first
    entry is the loss; or the loss. There is no target: ``pipe.step(batch)``. A `loss_weight` is called with the batch
    instead. Raises `PenstockError` if there is no loss in `output`.
    """
    match output:
        case Tensor():
            found: Any = output
        case Mapping():
            found = output.get("loss")
        case _ if getattr(output, "loss", None) is not None:
            found = output.loss
        case tuple() | list():
            found = next(iter(output), None)
        case _:
            found = None
    if not isinstance(found, Tensor):
        raise PenstockError(
            f"loss_fn=penstock.model_loss, and the model's output, {type(output).__name__}, has no loss: expected an "
            "entry 'loss', a tuple that begins with it, or one number. Models of Hugging Face compute it if the "
            "labels are among their inputs: sample={**batch, 'labels': labels}"
        )
    return found


def token_count(labels: str = "labels", *, shifted: bool) -> LossWeight:
    """A `loss_weight` for `model_loss` where it is a mean over tokens: the number of labels that are not -100.

    `labels`: their name in the batch, a dict. `shifted`: True if the model compares the output at a position with the
    next label, as causal language models do: then the first label of every sequence does not count. False if it
    compares it with the label at the same position (masked language models, encoder-decoders, token classification).
    """

    TEXT.check("token_count(labels=)", labels)
    shifted = FLAG.check("token_count(shifted=)", shifted)

    def count(batch: Any) -> Tensor:
        if not isinstance(batch, Mapping) or not isinstance(batch.get(labels), Tensor):
            raise PenstockError(
                f"token_count({labels!r}) counts the labels of a batch, found {type(batch).__name__} without a tensor "
                "of that name: pass batches as dicts, as in sample=, with loss_fn=penstock.model_loss"
            )
        found: Tensor = batch[labels]
        return (found[..., 1:] if shifted else found).ne(IGNORED).sum()

    return count


def amounts_of(
    weigh: LossWeight | None, targets: Sequence[Any], samples: Sequence[float], *, nonzero: bool = False
) -> list[float]:
    """The numbers of items that the losses for `targets` are means over: ``weigh(target)`` of each, or its samples.

    Raises `PenstockError` unless they are numbers of at least 0, and not 0 if they must be `nonzero`, since the mean
    that a model computes over nothing is not a number. Waits once for the device of the numbers.
    """
    if weigh is None:
        return list(samples)
    found = [weigh(target) for target in targets]
    tensors = [each for each in found if isinstance(each, Tensor) and each.numel() == 1]
    if any(tensor.requires_grad for tensor in tensors):
        raise PenstockError(
            "loss_weight(target) returned a number with gradients, which would be lost: expected a count that depends "
            "on the target only. Leave parameters out of it, or call .detach()"
        )
    numbers = [tensor.to(tensors[0].device, torch.float64).reshape(1) for tensor in tensors]
    read = iter(torch.cat(numbers).tolist() if numbers else ())
    amounts = [next(read) if isinstance(each, Tensor) and each.numel() == 1 else each for each in found]
    for amount in amounts:
        if not is_number(amount) or not 0 <= amount < math.inf:
            raise PenstockError(
                f"loss_weight(target) returned {amount!r}: expected one number of at least 0, such as the tokens that "
                "count"
            )
        if nonzero and not amount:
            raise PenstockError(
                "loss_weight(batch) is 0 for a microbatch, or for a replica's share of it: nothing in it counts, so "
                "the mean that the model computes is not a number. Leave such samples out, mix them with others, or "
                "use fewer microbatches"
            )
    return [float(amount) for amount in amounts]


def check_amounts(amounts: Iterable[float]) -> None:
    """Raises `PenstockError` if a minibatch has no item that its loss could be the mean over."""
    if not sum(amounts):
        raise PenstockError(
            "loss_weight(target) is 0 for every microbatch of this minibatch: expected at least one item that its "
            "loss can be the mean over. Leave such batches out"
        )


def check_counted_alike(inputs: Mapping[str, Sequence[Tensor]], sizes: Sequence[int]) -> None:
    """Raises `PenstockError` if the samples of `inputs`, the batches of the model's inputs by name, hold more labels in
    some pieces than in others, relative to the `sizes` of the pieces: a mean over labels weighs these otherwise than a
    mean over samples.

    Labels are integers, and -100 does not count. Waits once for the device of the batches.
    """
    marks = {
        name: torch.cat([_ignored(batch) for batch in batches])
        for name, batches in inputs.items()
        if batches[0].dtype in (torch.int64, torch.int32) and not batches[0].is_meta
    }
    if not marks:
        return
    device = next(iter(marks.values())).device
    rows: list[list[int]] = torch.cat([each.to(device) for each in marks.values()], 1).tolist()
    for place, name in enumerate(marks):
        own = [row[2 * place : 2 * place + 2] for row in rows]
        pieces = [own[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        ignored = [[sum(column) for column in zip(*piece, strict=True)] for piece in pieces]
        if len({tuple(count / size for count in counts) for counts, size in zip(ignored, sizes, strict=True)}) > 1:
            raise PenstockError(
                f"the {sizes} samples of the microbatches (or of the replicas' shares) hold "
                f"{[counts[0] for counts in ignored]} labels of {IGNORED} in {name}, which do not count, and no "
                "loss_weight= says whether the model's loss is a mean over the labels that do. If it is, pass "
                "loss_weight=penstock.token_count('labels', shifted=True) for a causal language model and "
                "shifted=False for others. If it is a mean over samples, pass "
                "loss_weight=lambda batch: len(batch['labels'])"
            )


def _ignored(batch: Tensor) -> Tensor:
    """How many labels of each sample do not count, of all and of the first ones, which some losses leave out."""
    labels = batch if batch.dim() > 1 else batch[:, None]
    return torch.stack([part.eq(IGNORED).flatten(1).sum(1) for part in (labels, labels[..., :1])], 1)


def compute_loss(loss_fn: LossFunction, output: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the metrics by name, each a tensor of one number without history.

    Raises `PenstockError` if `loss_fn` returns something else.
    """
    found = loss_fn(output, target)
    if type(found) is Tensor and found.numel() == 1:
        return found, {}
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise PenstockError(
            "loss_fn(output, target) must return one number as a tensor, the mean over the microbatch's samples, or "
            f"that and a dict of metrics; it returned {shown}. Reduce it, for instance with .mean()"
        )
    if not isinstance(metrics, Mapping):
        raise PenstockError(
            f"loss_fn returned {metrics!r} beside the loss: expected a dict from name to number, the metrics"
        )
    return loss, {name: _as_number(name, value, loss.device) for name, value in metrics.items()}


def _as_number(name: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        number = value.detach().to(device, non_blocking=True)
    elif is_number(value):
        # Made on the device: a copy to a GPU would make its host wait.
        number = torch.full((), value, dtype=torch.float64, device=device)
    else:
        raise PenstockError(
            f"loss_fn returned the metric {name!r}: expected one number, the mean over the microbatch's samples, found "
            f"{text_of(value)}. Return a tensor or a number"
        )
    if not isinstance(name, str) or not name or len(name.splitlines()) > 1 or number.numel() != 1:
        raise PenstockError(
            f"loss_fn returned the metric {name!r} of shape {tuple(number.shape)}: expected a name of one line and one "
            "number, the mean over the microbatch's samples"
        )
    return number


class Microbatches(NamedTuple):
    """The batches of a step, one for each microbatch: ``pipe.step(penstock.Microbatches(inputs, targets))``.

    They may have different lengths (each padded to its own longest sequence) and different numbers of samples. Where
    lengths differ, `loss_weight` must say what the loss is a mean over. Each step may have another number of them; a
    schedule that does not flush is drained before the number changes. `ScheduleError` if the schedule cannot have it.
    """

    inputs: Sequence[Any]
    """For each microbatch what `Pipeline.step` takes as inputs."""
    targets: Sequence[Any] | None = None
    """For each microbatch its target; None if the model computes its loss itself."""
