"""The shape of a transformer language model: how many parameters it has, and how many operations a batch takes.

The counts are those of [Narayanan 2021, section 4.5.1]. Symbols: l layers, h hidden size, s sequence length, V
vocabulary, B batch size in sequences.
"""

import math
from dataclasses import dataclass, fields

from penstock.errors import PlanError
from penstock.values.documents import is_count, text_of

__all__ = ["Transformer"]

_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Transformer:
    """Equal transformer layers between an embedding and a head that share the table of the vocabulary."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    """Tokens in one sample."""
    vocabulary: int = 51200
    name: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if not is_count(value, least=1):
                raise PlanError(
                    f"{field.name}: expected a whole number, 1 or more, found {text_of(value)}: "
                    "give the shape of the model"
                )
        if self.hidden % self.heads:
            raise PlanError(
                f"heads: expected a divisor of hidden = {self.hidden}, found {self.heads}: "
                "all heads have the same whole size"
            )

    @property
    def layer_parameters(self) -> int:
        """Of one layer: 12 h^2 weights in four matrices, 7 h + 2 h biases and 4 h of two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the tables of tokens and positions: (V + s) h."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        """P = 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), equation 4.3; the head's table is the embedding's."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def batch_operations(self, batch_size: int, *, recompute: bool = True) -> float:
        """Floating-point operations of the matrices in one batch of `batch_size` sequences; equation 4.2.

        The forward of a layer has 24 B s h^2 + 4 B s^2 h, its backward twice that. With `recompute` the forward runs
        twice: F = 96 B s l h^2 (1 + s / 6 h + V / 16 l h). Without, 72 B s l h^2 (1 + s / 6 h + V / 12 l h): the head's
        6 B s h V, which is never recomputed, is then a larger share.
        """
        tokens = batch_size * self.sequence
        forward = tokens * self.hidden * (24 * self.hidden + 4 * self.sequence)
        return float((4 if recompute else 3) * self.layers * forward + 6 * tokens * self.hidden * self.vocabulary)

    def training_days(self, tokens: float, devices: int, device_operations: float) -> float:
        """8 T P / (n X) in days, equation 4.4, for X operations per second on each of n devices, with recomputation."""
        for name, value in (("tokens", tokens), ("devices", devices), ("device_operations", device_operations)):
            if not 0 < value < math.inf:
                raise PlanError(f"{name}: expected a finite number above 0, found {text_of(value)}: give one")
        return 8 * tokens * self.parameters / (devices * device_operations) / _DAY_SECONDS
