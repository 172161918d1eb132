"""The names and arguments of PyTorch's CUDA build that Penstock uses, by its real classes: without a GPU or a driver.

A build for CPUs lacks most of them. docs/gpus.md has the command.
"""

import inspect
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.paths import ROOT

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "penstock").rglob("*.py")}


def test_what_is_used_of_torch_cuda_exists() -> None:
    used = {name for text in SOURCES.values() for name in re.findall(r"torch\.cuda\.(\w+)", text)}

    assert {"Event", "Stream", "current_stream", "empty_cache"} <= used
    assert [name for name in sorted(used) if not hasattr(torch.cuda, name)] == []
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.cuda.Event.__new__, {"enable_timing": True, "blocking": True}),
        (torch.cuda.Stream.__new__, {"device": torch.device("cuda", 0)}),
        (torch.cuda.Event.record, {"stream": None}),
        (torch.cuda.Event.elapsed_time, {"end_event": None}),
        (torch.cuda.Stream.wait_event, {"event": None}),
        (torch.cuda.current_stream, {"device": None}),
        (torch.cuda.memory_allocated, {"device": None}),
        (torch.cuda.reset_peak_memory_stats, {"device": None}),
    ],
    ids=lambda each: getattr(each, "__qualname__", ""),
)
def test_arguments_are_taken(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))
    signature.bind(**({first: None} if first in ("self", "cls") else {}) | arguments)


def test_methods_of_streams_and_events() -> None:
    for name in ("query", "synchronize"):
        assert callable(getattr(torch.cuda.Event, name))
    for name in ("device", "cuda_stream", "wait_event"):
        assert hasattr(torch.cuda.Stream, name)


def test_options_of_nccl() -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.group_name, options.global_ranks_in_group = "edge", [0, 1]  # type: ignore[assignment]
    options.config.max_ctas = 2

    assert (options.group_name, list(options.global_ranks_in_group), options.config.max_ctas) == ("edge", [0, 1], 2)


@pytest.mark.parametrize(
    "name",
    [
        "abort",
        "alltoall_base",
        "eager_connect_single_device",
        "get_error",
        "recv",
        "send",
        "set_timeout",
        "shutdown",
        "supports_coalescing",
    ],
)
def test_methods_of_nccl(name: str) -> None:
    assert hasattr(dist.ProcessGroupNCCL, name)


def test_variables_of_nccl_are_read() -> None:
    """A variable that PyTorch does not know would be ignored in silence."""
    set_here = {name for text in SOURCES.values() for name in re.findall(r"\bTORCH_NCCL_\w+", text)}
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert len(set_here) >= 6
        assert [name for name in sorted(set_here) if content.find(name.encode()) < 0] == []
