"""What a model's code asked about the sizes of its inputs, such as whether a length is even.

A trace took the branch that the sample's sizes lead to, so it holds only for sizes that lead to the same branch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from penstock.errors import CaptureError

_FUNCTIONS = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "math": math,
    # Its functions of sizes, such as sym_float, take numbers, too.
    "torch": torch,
}
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition on the sizes of inputs."""

    text: str
    """In Python, such as ``(args[0].shape[1] % 2) == 0``."""
    sizes: tuple[tuple[str, int], ...]
    """The inputs, and the indices of their dimensions, that `code` names ``size_0``, ``size_1`` and so on."""
    code: CodeType

    @classmethod
    def of(cls, expression: str, names: Sequence[str]) -> "SizeGuard":
        """Reads a guard of `torch.export` on a forward that takes ``*tensors``, the inputs `names`."""
        sizes: dict[tuple[str, int], None] = {}

        def named(found: re.Match[str]) -> str:
            size = names[int(found[1])], int(found[2])
            sizes.setdefault(size)
            return f"size_{list(sizes).index(size)}"

        code = _SIZE.sub(named, expression)
        text = _SIZE.sub(lambda found: f"{names[int(found[1])]}.shape[{found[2]}]", expression)
        return cls(text, tuple(sizes), compile(code, "<size guard>", "eval"))

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether inputs of `shapes` fulfil it. Raises `CaptureError` if that cannot be found out."""
        found: dict[str, Any] = {f"size_{i}": shapes[name][index] for i, (name, index) in enumerate(self.sizes)}
        try:
            return bool(eval(self.code, _FUNCTIONS, found))
        except (NameError, TypeError, AttributeError) as error:
            raise CaptureError(
                f"the model's code depends on sizes in a way that cannot be checked in later steps: {self.text} "
                f"({error}). Compute it in a block, or pass the model as a list of layers"
            ) from error
