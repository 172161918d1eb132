"""The search of the site answers the questions of users with the page that has the answer, first, and shows where."""

import json
import runpy
from functools import cache
from typing import Any

import pytest

from support.paths import ROOT

quickjs = pytest.importorskip("quickjs", reason="runs the script of the site")

QUESTIONS = {
    "weight stashing": "docs/schedules",
    "out of memory": "docs/problems",
    "QLoRA": "docs/migrating",
    "gradient clipping": "docs/training",
    "how do I resume from a checkpoint": "docs/checkpoints.html",
    "learning rate scheduler": "docs/training",
    "torch.compile": "docs/compile",
    "tensor parallelism": "docs/composition",
    "DeepSpeed": "docs/migrating",
    "the run hangs": "docs/doctor",
    "Slurm": "docs/howto",
    "Kubernetes": "docs/howto",
    "meta device": "docs/initialization.html",
    "bubble of zero bubble schedules": "docs/schedules",
    "LoRA with Hugging Face Trainer": "docs/huggingface",
    "Lightning": "docs/huggingface",
    "TensorBoard": "docs/observability",
    "fewer bytes on slow links": "docs/wire",
    "offload activations to the host": "docs/memory",
    "fp8": "docs/limits",
    "Windows": "docs/limits",
    "write my own schedule": "docs/howto",
    "which schedule": "docs/choosing",
    "bitsandbytes": "docs/migrating",
}
"""By question, the page; an answer is on the first screen of the section that is found."""


@cache
def site() -> Any:
    made = runpy.run_path(str(ROOT / "docs" / "site_search.py"))
    context = quickjs.Context()
    context.eval(made["script"](made["pages"](ROOT)))
    context.eval((ROOT / "docs" / "search.js").read_text())
    return context


def ask(question: str) -> list[dict[str, Any]]:
    said = json.dumps(question)
    found: list[dict[str, Any]] = json.loads(site().eval(f"JSON.stringify(rank(SECTIONS, {said}))"))
    return found


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_the_page_with_the_answer_is_first(question: str, page: str) -> None:
    found = ask(question)

    first = found[0]["section"]["url"]
    # With .html: the top of the page has the answer, and a section that has the words as well does not.
    assert page in (first, first.partition(".html")[0]), [each["section"]["url"] for each in found[:4]]
    text = json.dumps(found[0]["section"]["text"])
    shown = str(site().eval(f"excerpt({text}, {json.dumps(question)})"))
    assert shown or found[0]["section"]["title"]
    assert len(shown) < 250


def test_an_excerpt_shows_the_words() -> None:
    (first, *_) = ask("weight stashing")
    shown = str(site().eval(f"excerpt({json.dumps(first['section']['text'])}, 'weight stashing')"))

    assert "stash" in shown.lower()


def test_nothing_is_found_for_what_no_page_says() -> None:
    assert ask("xylophone") == []
    assert ask("the of and") == []
