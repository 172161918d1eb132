"""Progress and colors: for a terminal only, and gone when the work is done."""

import io
import time
from pathlib import Path

import pytest

from penstock.progress import colored, elapsed_line, is_interactive, progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_says_what_is_under_way_and_wipes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(progress_line(["a", "bee"], str.upper, "profiling")) == ["a", "bee"]

    first = "profiling [........................] 0/2 A"
    second = "profiling [############............] 1/2 BEE"
    assert terminal.getvalue() == f"\r{first}\r{second}\r{' ' * len(second)}\r"


def test_the_progress_line_is_silent_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(progress_line(["a"], str.upper, "profiling", show=False)) == ["a"]
    monkeypatch.setenv("CI", "true")
    assert list(progress_line(["a"], str.upper, "profiling")) == ["a"]
    assert terminal.getvalue() == ""

    monkeypatch.delenv("CI")
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    assert list(progress_line(["a"], str.upper, "profiling")) == ["a"]
    assert file.getvalue() == ""


def test_the_progress_line_is_written_anywhere_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    assert list(progress_line(["a"], str.upper, "x", show=True)) == ["a"]
    assert "0/1 A" in capsys.readouterr().err


def test_a_stream_that_is_no_terminal_is_not_watched(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as stream:
        assert not is_interactive(stream)


def test_seconds_are_shown_while_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with elapsed_line("proving", after_seconds=0.0):
        while not terminal.getvalue():
            time.sleep(0.001)

    assert terminal.getvalue().startswith("\rproving 0 s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_no_seconds_of_short_work_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends at once is not worth a line; of several processes the first has the terminal."""
    monkeypatch.delenv("CI", raising=False)
    for stream, rank in ((Terminal(), "0"), (Terminal(), "1"), (io.StringIO(), "0")):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("RANK", rank)
        with elapsed_line("proving", after_seconds=600.0 if rank == "0" else 0.0):
            pass

        assert "proving" not in stream.getvalue()


def test_colors_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)

    assert colored("error", "31", Terminal()) == "\x1b[31merror\x1b[0m"
    assert colored("error", "31", io.StringIO()) == "error"
    monkeypatch.setenv("TERM", "dumb")
    assert colored("error", "31", Terminal()) == "error"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert colored("error", "31", Terminal()) == "error"
