"""The shape of a transformer language model, the number of its parameters, and the operations that a batch takes.

The counts are those of [Narayanan 2021, section 4.5.1]. Symbols: l layers, h hidden size, s sequence length, V
vocabulary, B batch size in sequences.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from penstock.arguments import TEXT, check_fields, integer, number
from penstock.errors import PlanError
from penstock.values.documents import YamlNode, quoted_text, read_known, read_yaml, write_text

_DAY_SECONDS = 86400.0
_FORMAT = "penstock-transformer/1"


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model of equal transformer layers between an embedding and a head, which share the vocabulary table."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    """Tokens in one sample."""
    vocabulary: int = 51200
    name: str = ""

    def __post_init__(self) -> None:
        size = integer(1).but("give the shape of the model")
        check_fields(self, {**{field.name: size for field in fields(self)[:-1]}, "name": TEXT}, PlanError)
        if self.hidden % self.heads:
            raise PlanError(
                f"heads: expected a divisor of hidden = {self.hidden}, found {self.heads}: "
                "all heads have the same whole size"
            )

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written."""
        numbers = [f"{field.name}: {getattr(self, field.name)}" for field in fields(self)[:-1]]
        named = [f"name: {quoted_text(self.name)}"] if self.name else []
        write_text(path, "\n".join([f"format: {_FORMAT}", *numbers, *named]) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Transformer":
        """Reads what `save` wrote, perhaps edited. `PlanError` names the file, the field and the fix."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        numbers = [field.name for field in fields(cls)[:-1]]
        nodes = place.mapping(("format", *numbers[:3]), (*numbers[3:], "name"))
        known = read_known(nodes, {**dict.fromkeys(numbers, YamlNode.integer), "name": YamlNode.text})
        return place.build(lambda: cls(**known))

    @property
    def layer_parameters(self) -> int:
        """The parameters of one layer: 12 h^2 weights in four matrices, 7 h + 2 h biases and 4 h in two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the tables of tokens and positions: (V + s) h."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        """P = 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), equation 4.3; the head shares the embedding's table."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def batch_operations(self, batch_size: int, *, recompute: bool = True) -> float:
        """Floating-point operations of the matrix products in a batch of `batch_size` sequences; equation 4.2.

        The forward of a layer has 24 B s h^2 + 4 B s^2 h, its backward twice that. With `recompute` the forward runs
        twice: F = 96 B s l h^2 (1 + s / 6 h + V / 16 l h). Without, F = 72 B s l h^2 (1 + s / 6 h + V / 12 l h); the
        head's 6 B s h V, which are never recomputed, are then a larger share.
        """
        tokens = batch_size * self.sequence
        forward = tokens * self.hidden * (24 * self.hidden + 4 * self.sequence)
        return float((4 if recompute else 3) * self.layers * forward + 6 * tokens * self.hidden * self.vocabulary)

    def training_days(self, tokens: float, devices: int, device_operations: float) -> float:
        """8 T P / (n X) in days, equation 4.4, for X operations per second on each of n devices, with recomputation."""
        for name, value in (("tokens", tokens), ("devices", devices), ("device_operations", device_operations)):
            number(above=0).check(name, value, PlanError)
        return 8 * tokens * self.parameters / (devices * device_operations) / _DAY_SECONDS
