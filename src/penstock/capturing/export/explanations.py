"""From an exception of `torch.export` to the line of the model that caused it.

Export explains itself in pages that speak of symbols and guards. The author of the model needs one line of his own
code, the reason in a sentence, and the way out.
"""

import linecache
import logging
import os
import re
import threading
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import thread
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType

import torch
from torch import nn

from penstock.capturing.export.opaque_blocks import OpaqueBlocks, Untraceable
from penstock.errors import CaptureError
from penstock.torch_internals.export import fixed_sizes_noted, replaced_attribute

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions") + os.sep
_ENCODERS = os.path.join(_TORCH, "nn", "modules", "transformer.py")
_PENSTOCK = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

_BATCH = "it fixes the batch size, which must stay free"

_REASONS = (
    (r"is invalid for input of size|must match the size", _BATCH),
    (r"expected to contain only concrete", "it draws random numbers by a generator= of its own, of a free size"),
    (r"data is not allocated yet", "it reads the numbers of a tensor, as pack_padded_sequence reads lengths"),
    (
        r"data-dependent|Could not guard|Could not extract specialized|GuardOnDataDependent",
        "its Python control flow depends on the values in a tensor",
    ),
    (r"marked .* as dynamic|specialized it to be a constant|Constraints violated", _BATCH),
    (
        r"\.numpy\(\)|numpy\(\) is not supported|can't call numpy|Cannot (convert|call numpy)",
        "it leaves PyTorch for NumPy",
    ),
)


@contextmanager
def explained(model: nn.Module, samples: str, blocks: OpaqueBlocks) -> Iterator[None]:
    """Turns what its body raises into a `CaptureError` that names the line of `model`.

    `samples` says which dimensions were taken to count samples, for an error that comes from that. `blocks`:
    those that are called in the trace.
    """
    loggers = map(logging.getLogger, ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"))
    fixed: dict[str, tuple[str, int, str]] = {}
    places: dict[str, int] = {}

    def note(size: str, frame: FrameType) -> None:
        for each, number in traceback.walk_stack(frame):
            file = each.f_code.co_filename
            if not _is_library(file):
                places.setdefault(size, len(blocks.traced))
                fixed.setdefault(size, (file, number, linecache.getline(file, number).strip()))
                return

    try:
        # Before it raises, export logs the graph so far, often several times.
        with ExitStack() as stack:
            for logger in loggers:
                stack.enter_context(replaced_attribute(logger, "disabled", True))
            stack.enter_context(fixed_sizes_noted(note))
            yield
    except CaptureError:
        raise
    except Exception as error:
        where = source_line(error.__traceback__) or _line_in_text(str(error)) or _fixed_line(str(error), fixed)
        reason = _reason(error, samples)
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
        if blocks.threaded or not files.isdisjoint((threading.__file__, thread.__file__)):
            raise CaptureError(
                f"{type(model).__name__} calls modules in threads of its own, which a trace does not follow. Call them "
                "one after the other in the thread that calls the model (operators use several cores in any case), do "
                "it inside of a block, or pass the model as nn.Sequential or as a list of layers, which run as they are"
            ) from error
        place = f"{where[0]}:{where[1]}: {where[2]}" if where else f"the code of {type(model).__name__} (no line known)"
        size = next((size for size in fixed if size in str(error)), None)
        raise Untraceable(
            None if size is None else places[size],
            f"{type(model).__name__} cannot be traced. At\n    {place}\nbecause {reason}. {_advice(error, reason)}, or "
            "pass the model as nn.Sequential or as a list of layers, which run as they are",
        ) from error


def source_line(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """File, line number and text of the innermost frame of `trace` that is neither PyTorch's nor Penstock's."""
    found = None
    for frame, number in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if not _is_library(file):
            found = (file, number)
    # The outermost frames are those of the caller of capture; they do not count when nothing of the model follows.
    inside = False
    for frame, _ in traceback.walk_tb(trace):
        inside = inside or frame.f_code.co_filename.startswith(_TORCH)
        if inside and found and (frame.f_code.co_filename == found[0]):
            return (*found, linecache.getline(*found).strip())
    return None


def _is_library(file: str) -> bool:
    return file.startswith((_TORCH, _PENSTOCK)) or file.startswith("<") or f"{os.sep}contextlib.py" in file


def _line_in_text(text: str) -> tuple[str, int, str] | None:
    """The last line of Python that is not PyTorch's among those that the message of an error quotes."""
    found = None
    for file, number in re.findall(r'File "([^"]+)", line (\d+)', text):
        if not _is_library(file):
            found = (file, int(number), linecache.getline(file, int(number)).strip())
    return found


def _fixed_line(text: str, fixed: Mapping[str, tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """The line that fixed one of the sizes that the message of an error names."""
    return next((line for size, line in fixed.items() if size in text), None)


def _advice(error: Exception, reason: str) -> str:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _ENCODERS in files:
        return "nn.TransformerEncoder asks there whether the mask is causal: pass is_causal=True or False beside mask="
    if any(file.startswith(_DISTRIBUTIONS) for file in files):
        return (
            "torch.distributions checks values there: call "
            "torch.distributions.Distribution.set_default_validate_args(False) first"
        )
    if reason.startswith(_BATCH):
        return (
            "Write x.shape[0] there, the samples of what it was given, in place of a number or len(x), and operators "
            "in place of a loop over samples; or move that line into a block, or into loss_fn if it computes a loss"
        )
    return (
        "Rewrite that line with tensor operations (torch.where, torch.cond), move it into a block, pass what it "
        "decides or makes as an argument of the model"
    )


def _reason(error: Exception, samples: str) -> str:
    text = str(error)
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            batch = f"; {samples}" if reason is _BATCH else ""
            return f"{reason} ({type(error).__name__}{batch})"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of its message, at most 200 letters, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200].rstrip(".") if lines else "no reason given"
