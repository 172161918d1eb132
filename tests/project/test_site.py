"""The site of the docs builds without a warning, shows every public name and asks no other host for anything."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock
from penstock.commands import COMMANDS
from support.fork_server import ForkServer
from support.paths import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="the extra docs is not installed")


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.processes
def test_site_is_read_without_a_warning(fork_server: ForkServer, tmp_path: Path) -> None:
    """All links, docstrings and pages; CI builds the site by ``./scripts/site``, which finds the same."""
    script = tmp_path / "build.py"
    script.write_text("import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))")
    options = ["--builder", "dummy", "--quiet", "--keep-going", "--fail-on-warning", "-c", str(ROOT / "docs")]
    child = fork_server.start([str(script), *options, str(ROOT), str(tmp_path / "site")], os.environ, tmp_path)
    printed, errors = child.communicate(timeout=300)

    assert (child.returncode, printed, errors) == (0, "", "")


CHROMIUM = pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no Chromium here"
)
SCREENSHOTS = ROOT / "scripts" / "screenshots"


@CHROMIUM
@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.processes
def test_pages_have_no_faults_in_chromium(tmp_path: Path) -> None:
    """Ten pages, light, dark and on a phone."""
    build = ["-m", "sphinx", "--quiet", "-c", str(ROOT / "docs"), "-d", str(tmp_path / "read"), str(ROOT)]
    subprocess.run([sys.executable, *build, str(tmp_path / "site")], check=True, timeout=300)
    looked = subprocess.run(
        [sys.executable, str(SCREENSHOTS), str(tmp_path / "site")], capture_output=True, text=True, timeout=300
    )

    assert (looked.returncode, looked.stderr) == (0, ""), looked.stdout
    assert len([*(tmp_path / "site" / "screenshots").glob("*.png")]) == 30


@CHROMIUM
@pytest.mark.sampled(0)
@pytest.mark.processes
def test_faults_of_a_page_are_found_in_chromium(tmp_path: Path) -> None:
    screenshots = runpy.run_path(str(SCREENSHOTS))
    page = tmp_path / "page.html"
    page.write_text("""
        <p style="color: #888; background: #777">pale</p><p style="width: 2000px">wide</p>
        <svg viewBox="0 0 100 50"><rect width="100" height="50" fill="#222"/><text x="9" y="20">dark</text></svg>
        <p>good</p><script>console.error("said"); document.title = missing.name</script>
    """)
    browser = screenshots["Browser"](screenshots["PROGRAM"], str(tmp_path / "profile"))
    browser.open(page.as_uri(), 390, "light")
    found = "\n".join(browser.faults("table"))
    browser.close()

    assert "good" not in found
    for fault in ("no table", "2008 pixels wide", "1.3: pale", "1.3: dark", "said", "missing is not defined"):
        assert fault in found


def test_every_public_name_and_command_is_on_the_site() -> None:
    names = re.findall(r"^- `penstock\.(\w+)`$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)

    commands = re.findall(r"^\| `penstock (\w+)` \|", (ROOT / "docs" / "commands.md").read_text(), flags=re.MULTILINE)

    assert sorted(names) == sorted(penstock.__all__)
    assert commands == [command.name for command in COMMANDS]


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        ('<a href="https://pytorch.org">PyTorch</a><script src="../_static/furo.js"></script>', False),
        ('<script src="https://cdn.example/search.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
    ],
)
def test_a_page_that_asks_another_host_is_refused(
    page: str, refused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "page.html").write_text(page)
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["refuse_other_hosts"](SimpleNamespace(outdir=tmp_path), None)

    assert any("asks another host" in record.message for record in caplog.records) is refused


def test_pictures_of_the_gallery_are_those_of_the_library() -> None:
    gallery = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    made = gallery["pictures"]()
    page = (ROOT / "docs" / "gallery.md").read_text()

    assert made == {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("schedule-*.svg")}
    assert re.findall(r"^!\[.*\]\(pictures/(.*)\)$", page, flags=re.MULTILINE) == [*made]


def test_errors_are_found_by_their_text() -> None:
    texts = runpy.run_path(str(ROOT / "docs" / "error_index.py"))["error_texts"](ROOT)
    problems = (ROOT / "docs" / "problems.md").read_text()
    named = re.findall(r"^\| `([^`]+)` \|", problems, flags=re.MULTILINE)

    assert len(texts) > 500
    assert named
    assert [words for words in named if not any(words in text.text for text in texts)] == []
