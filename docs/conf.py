"""Settings of Sphinx for the site. `./scripts/site` builds it; CONTRIBUTING.md says how.

The sources are the pages that GitHub shows, so that links between pages, and from pages to scripts and results, are
relative paths that hold in both places: the root of the sources is that of the repository, and files that are no pages
become downloads. The sidebar is made of the tables of docs/README.md, and the reference of the docstrings.
"""

import contextlib
import inspect
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs"), str(ROOT / "benchmarks")]
import error_index  # noqa: E402
import notebooks  # noqa: E402
import site_search  # noqa: E402

import recipes  # noqa: E402
from penstock import cli  # noqa: E402

project = "Penstock"
author = "The Penstock authors"
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "studies/**.md", "tests/data/*.md", "src/**.md"]
# GitHub and the index of docs/README.md decide what is in the sidebar; a record may begin with any heading.
suppress_warnings = ["toc.not_included", "myst.header"]
exclude_patterns = [".*", "tests/[!d]*", "runs", "site", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 80
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

html_css_files = ["site.css"]
html_static_path = ["site.css", "search.js"]
templates_path = ["."]
html_theme = "furo"
html_title = "Penstock"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Makes the tables of docs/README.md the sidebar: a heading is a caption, and the pages of its table follow."""
    if name != root_doc:
        return
    for section in source[0].split("\n## ")[1:]:
        entries = re.findall(r"^\| \[(.*?)\]\((.*?)\.md\) \|", section, flags=re.MULTILINE)
        if entries:
            caption = section.partition("\n")[0]
            rows = "\n".join(f"{title.replace('`', '')} <{page}>" for title, page in entries)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{rows}\n```\n"


def add_docstrings(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the docstring of every name that begins an item of docs/reference.md below the item, and its source."""
    if name == "docs/reference":
        source[0] = re.sub(r"^- `([\w.]+)`$", _docstring, source[0], flags=re.MULTILINE)


def _docstring(item: re.Match[str]) -> str:
    module, _, attribute = item[1].rpartition(".")
    value = inspect.unwrap(getattr(import_module(module), attribute))
    kind = "function"
    if isinstance(value, type):
        kind = "exception" if issubclass(value, Exception) else "class"
    path = Path(inspect.getfile(value)).relative_to(ROOT).as_posix()
    return f"```{{eval-rst}}\n.. auto{kind}:: {item[1]}\n```\n\n[{path}](../{path})\n"


def add_errors(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the text of every error below docs/errors.md."""
    if name == "docs/errors":
        source[0] += "\n" + error_index.index(ROOT)


def add_helps(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the help of every command that docs/commands.md names below its table."""
    if name != "docs/commands":
        return
    os.environ["COLUMNS"] = "88"  # of the help
    for command in re.findall(r"^\| `penstock (\w+)`", source[0], flags=re.MULTILINE):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        source[0] += f"\n## {command}\n\n```text\n{text.getvalue()}```\n"


def add_notebooks(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the notebooks with their outputs below the table of docs/notebooks.md."""
    if name == "docs/notebooks":
        source[0] += "\n" + "\n".join(map(notebooks.run, notebooks.NAMES))


def add_recipes(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the lines in which the recipes differ below the table of docs/recipes.md."""
    if name == "docs/recipes":
        source[0] += "\n" + recipes.page()


READ: dict[str, str] = {}
"""By name, the pages as they were read in this build."""


def note_page(app: Sphinx, name: str, source: list[str]) -> None:
    READ[name] = source[0]


def add_sections(app: Sphinx, error: Exception | None) -> None:
    """Writes what the search reads. Pages that this build did not read have what GitHub shows."""
    if app.builder.name != "html" or error is not None:
        return
    script = site_search.script({**site_search.pages(ROOT), **READ})
    (Path(app.outdir) / "_static" / "sections.js").write_text(script, encoding="utf-8")


def read_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Makes links of the pages that a docstring names, and parameters of its lines ``name: what it is``."""
    try:
        names = {*inspect.signature(value).parameters} if callable(value) else set()
    except (TypeError, ValueError):
        return
    made: list[str] = []
    inside = False
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/docs/\1`", line) for line in lines]
    for line in lines:
        word, colon, _ = line.partition(": ")
        if colon and word.strip("*") in names:
            made += [] if inside else [""]
            made.append(f":param {line}")
            inside = True
            continue
        if inside and line and not line.startswith(" "):
            made.append("")
            inside = False
        made.append(line)
    lines[:] = made


def add_front_door(app: Sphinx, error: Exception | None) -> None:
    """Lets ``index.html`` lead to the first page, which is named after its source."""
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>\n'
    (Path(app.outdir) / "index.html").write_text(page)


FOREIGN = re.compile(r"""<(?:script|img|iframe)[^>]*\bsrc="(?:https?:)?//[^"]*|<link[^>]*\bhref="(?:https?:)?//[^"]*""")
"""What a page would fetch from another host; a link that a reader may follow is no such thing."""


def refuse_other_hosts(app: Sphinx, error: Exception | None) -> None:
    """Fails if a page fetches a font, a script, a style or a picture from another host."""
    for page in sorted(Path(app.outdir).rglob("*.html")):
        for found in FOREIGN.findall(page.read_text(encoding="utf-8")):
            logging.getLogger(__name__).warning("%s asks another host: %s", page, found)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("source-read", add_docstrings)
    app.connect("source-read", add_errors)
    app.connect("source-read", add_helps)
    app.connect("source-read", add_notebooks)
    app.connect("source-read", add_recipes)
    app.connect("source-read", note_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("build-finished", add_front_door)
    app.connect("build-finished", refuse_other_hosts)
    app.connect("build-finished", add_sections)
