"""Reads what the page of a timeline shows."""

import json
import re
from pathlib import Path
from typing import Any

from penstock.timelines.timelines import Timeline


def page_of(path: Path, timeline: Timeline, **options: Any) -> str:
    timeline.save_html(path / "page.html", **options)  # type: ignore[arg-type]
    return (path / "page.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict:  # type: ignore[type-arg]
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])  # type: ignore[no-any-return]
