"""The code in the docs runs, and their links and citations lead somewhere."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

import penstock
from penstock.cli import _parser
from support.fork_server import ForkServer, finish
from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "benchmarks" / "README.md")
ELSEWHERE = {"README", "composition", "huggingface", "inputs", "migrating", "scan", "trillion", "weights"}
"""Pages whose code other tests run."""


def read_blocks(file: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", file.read_text(), flags=re.MULTILINE | re.DOTALL)


RUN = [path.stem for path in sorted(DOCS.glob("*.md")) if read_blocks(path) and path.stem not in ELSEWHERE]


def test_every_option_is_shown() -> None:
    files = (DOCS.parent / "README.md", *DOCS.glob("*.md"))
    shown = "".join(block for file in files for block in read_blocks(file))
    options = set(inspect.signature(penstock.Pipeline.__init__).parameters) - {"self", "model"}

    assert {name for name in options if not re.search(rf"\b{name}=", shown)} == set()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by its checkpoints, in a single process
@pytest.mark.parametrize("name", RUN)
def test_python_in_the_docs_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces of a page follow each other, with what the ones before have made."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def make_model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))

    x, y, loss_fn = torch.randn(8, 6), torch.randint(6, (8,)), torch.nn.functional.cross_entropy
    model, sample, optimizer = make_model(), (x[:2],), lambda params: torch.optim.SGD(params, lr=0.1)
    pipe = penstock.Pipeline(model, sample, loss_fn, optimizer, stages=2)
    dataset, loader = torch.utils.data.TensorDataset(x, y), [(x, y)] * 2
    given = dict(x=x, y=y, loss_fn=loss_fn, model=model, sample=sample, optimizer=optimizer, pipe=pipe)
    given |= dict(torch=torch, penstock=penstock, dataset=dataset, loader=loader, make_model=make_model)
    for block in read_blocks(DOCS / f"{name}.md"):
        exec(block, given)


def test_command_lines_have_options_that_exist() -> None:
    pages = "".join(path.read_text() for path in PAGES)
    lines = re.findall(r"^ {,4}(?:torchrun [^\n]*?)?penstock (\w+ [^\n]*)$", pages, flags=re.MULTILINE)
    scripts = re.findall(r"^ {4}python ([\w/]+\.py)", pages, flags=re.MULTILINE)
    for line in lines:
        _parser("penstock").parse_args(shlex.split(line, comments=True))  # exits if it cannot

    assert len(lines) > 20
    assert [name for name in scripts if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}

    assert [name for name in sorted(pages) if f"]({name}) |" not in index] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_citation_is_in_the_bibliography() -> None:
    keys = re.findall(r"^\| \[([^]]+)\] \|", (DOCS / "bibliography.md").read_text(), flags=re.MULTILINE)
    sources = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    cited = {
        (str(path.relative_to(ROOT)), key)
        for path in [*PAGES, *sources]
        for key in re.findall(r"\[([A-Z][\w-]*(?: et al\.)? \d{4})[],;]", path.read_text())
    }

    assert sorted(set(keys), key=keys.index) == keys
    assert {"Narayanan 2021", "PipeDream 2019", "SPP 2022"} <= {key for _, key in cited} & set(keys)
    assert [(place, key) for place, key in sorted(cited) if key not in keys] == []


DIFFS = re.findall(
    r"^## (.*?)\n.*?^```diff\n(.*?)^```$", (DOCS / "migrating.md").read_text(), flags=re.MULTILINE | re.DOTALL
)


@pytest.mark.processes
def test_both_sides_of_each_move_train(fork_server: ForkServer, tmp_path: Path) -> None:
    """In one process; what splits or shards a stage, in two."""
    (start,) = read_blocks(DOCS / "migrating.md")
    alone, together = [], [tmp_path / "composition" / "train.py"]
    programs = {together[0]: "\n".join(["import torch", "import penstock", *read_blocks(DOCS / "composition.md")])}
    for number, (_, diff) in enumerate(DIFFS):
        for side, left_out in (("before", "+"), ("after", "-")):
            lines = [line[1:] for line in diff.splitlines() if not line.startswith(left_out)]
            path = tmp_path / f"{number} {side}" / "train.py"
            programs[path] = "\n".join([start, *lines])
            (together if side == "after" and "mesh" in diff else alone).append(path)
    for path, program in programs.items():
        path.parent.mkdir()
        path.write_text(program)
    runner = tmp_path / "run.py"
    runner.write_text("""
import os, runpy, sys
for path in sys.argv[1:]:
    os.chdir(os.path.dirname(path))
    runpy.run_path(path)
""")
    jobs = [*fork_server.start_ranks([str(runner), *map(str, alone)], 1, tmp_path)]
    jobs += fork_server.start_ranks([str(runner), *map(str, together)], 2, tmp_path)

    assert (len(alone), len(together)) == (7, 2)
    assert finish(jobs, seconds=120) == [(0, "")] * 3
