"""A plugin of pytest that ends a run whose device hangs or has failed, and reports what is known by then.

A wait for a device inside PyTorch cannot be interrupted, so the process ends itself. A thread prints the tests that
failed before and the stacks of all threads. If that thread cannot run, a timer of the interpreter ends the process a
little later. After an error on the device all later tests in the process would fail too, so the run ends at once.
"""

import faulthandler
import os
import sys
from collections.abc import Iterator
from threading import Timer
from typing import Any

import pytest

GRACE_SECONDS = 20.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-seconds", type=float, default=300.0, help="end the run if a test that needs a GPU takes longer (300)"
    )
    parser.addoption(
        "--pool-seconds",
        type=float,
        default=240.0,
        help="let a test fail whose processes of the pool take longer, and start these anew (240)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the watch now, while standard error is not captured yet."""
    config.pluginmanager.register(Deadlines(config))


class Deadlines:
    """Watches the tests that need a GPU."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: float = config.getoption("gpu_seconds")
        self._output = os.fdopen(os.dup(2), "w", buffering=1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("gpu") is None:
            return (yield)
        timer = Timer(self._seconds, self._end, [item.nodeid])
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=self._output)
        try:
            result = yield
            _check_device(item.nodeid)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
        return result

    def _end(self, test: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        for kind in ("failed", "error"):
            for report in reporter.stats.get(kind, ()) if reporter else ():
                print(f"\n{kind}: {report.nodeid}\n{report.longreprtext}", file=self._output)
        print(f"\n{test} took longer than {self._seconds:g} s, and ends the run here:", file=self._output)
        faulthandler.dump_traceback(file=self._output)
        os._exit(1)


def _check_device(test: str) -> None:
    """Ends the run if the device has failed."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device fails from {test} on: run the tests after it in a new process. {error}", returncode=1)
