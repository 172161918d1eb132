"""What the search of the site reads: the sections of all pages with their headings and their text, as one script.

A page that is opened from a folder may load scripts, and no other files: so the texts are a script, too. `search.js`
ranks them.
"""

import json
import re
from pathlib import Path

_FENCE = re.compile(r"^(```|~~~)", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections(name: str, source: str) -> list[dict[str, str]]:
    """By heading, what is in the page `name`, whose Markdown is `source`."""
    found, fenced = list[dict[str, str]](), False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        heading = None if fenced else re.match(r"(#{1,4}) (.+)", line)
        if heading or not found:
            title = _LINK.sub(r"\1", heading[2] if heading else name).replace("`", "")
            anchor = f"#{slug(title)}" if found else ""
            page = found[0]["title"] if found else title
            found.append({"page": page, "title": title, "url": f"{name}.html{anchor}", "text": ""})
        elif not _FENCE.match(line):
            found[-1]["text"] += _LINK.sub(r"\1", line).replace("`", "").replace("|", " ").strip() + "\n"
    return found


def script(sources: dict[str, str]) -> str:
    """The script for the pages of `sources`, by name."""
    every = [section for name, source in sorted(sources.items()) for section in sections(name, source)]
    return f"const SECTIONS = {json.dumps(every, ensure_ascii=False)};\n"


def pages(root: Path) -> dict[str, str]:
    """The Markdown of the README and the docs, without what is made when the site is built."""
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {file.relative_to(root).with_suffix("").as_posix(): file.read_text(encoding="utf-8") for file in files}
