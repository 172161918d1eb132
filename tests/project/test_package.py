"""What a built wheel contains, and that the files around the code agree with `pyproject.toml`."""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import penstock
from penstock.cli import _RUN_ON
from support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a release has."""
    pytest.importorskip("hatchling", reason="the extra `test` brings it")
    folder = tmp_path_factory.mktemp("dist")
    release = [sys.executable, str(ROOT / "scripts" / "release"), "--dry-run", "--directory", str(folder)]
    done = subprocess.run(release, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    return folder


def test_a_release_says_what_it_has(dist: Path) -> None:
    sums = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    made = json.loads((dist / "provenance.json").read_text())

    assert {name for _, name in sums} == {path.name for path in [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]}
    assert len(sums) == 2
    for digest, name in sums:
        assert digest == hashlib.sha256((dist / name).read_bytes()).hexdigest()
        assert {"name": name, "digest": {"sha256": digest}} in made["subject"]
    assert "\n## [" not in (dist / "CHANGES.md").read_text()
    assert len((dist / "CHANGES.md").read_text()) > 100


def test_the_container_has_what_the_package_needs() -> None:
    lines = (ROOT / "packaging" / "Containerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}

    assert len(lines) <= 25
    assert copied >= {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"], "constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Iterator[ZipFile]:
    (path,) = dist.glob("*.whl")
    with ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return message_from_bytes(wheel.read(f"penstock-{penstock.__version__}.dist-info/METADATA"))


def test_wheel_contains_every_file_of_the_package_and_the_licence(wheel: ZipFile) -> None:
    source = ROOT / "src"
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    others = {name for name in wheel.namelist() if not name.startswith("penstock/")}
    licenses = f"penstock-{penstock.__version__}.dist-info/licenses"

    assert {"penstock/py.typed", "penstock/timelines/pages.js", "penstock/timelines/pages.css"} <= package
    assert {name for name in wheel.namelist() if name.startswith("penstock/")} == package
    assert {f"{licenses}/LICENSE", f"{licenses}/NOTICE"} <= others
    assert wheel.read(f"{licenses}/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_sdist_contains_what_the_wheel_is_made_of_and_its_tests(dist: Path, wheel: ZipFile) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {f"src/{name}" for name in wheel.namelist() if name.startswith("penstock/")} <= names
    assert {"pyproject.toml", "LICENSE", "NOTICE", "README.md", "tests/conftest.py", "scripts/test"} <= names
    assert not [name for name in names if name.startswith((".venv/", "runs/", "dist/", ".git/"))]


def test_the_command_is_an_entry_point(wheel: ZipFile) -> None:
    written = wheel.read(f"penstock-{penstock.__version__}.dist-info/entry_points.txt").decode()
    name, _, target = PROJECT["scripts"]["penstock"].partition(":")

    assert written == "[console_scripts]\npenstock = penstock.cli:main\n"
    assert callable(getattr(import_module(name), target))


def test_the_recipe_for_conda_asks_for_the_same() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    needed = {text.replace(" ", "") for text in recipe["requirements"]["run"]}

    assert recipe["context"]["version"] == penstock.__version__
    assert recipe["build"]["python"]["entry_points"] == ["penstock = penstock.cli:main"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]
    assert {text.replace("torch", "pytorch") for text in PROJECT["dependencies"]} == needed - {"python>=3.11"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_pixi_installs_what_the_recipe_for_conda_says() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    pixi = PYPROJECT["tool"]["pixi"]

    assert [f"{name} {versions}" for name, versions in pixi["dependencies"].items()] == recipe["requirements"]["run"]
    assert pixi["pypi-dependencies"] == {"penstock": {"path": ".", "editable": True}}
    # No pixi has run here: no table has another name than those that its manual has.
    assert set(pixi) == {"workspace", "dependencies", "pypi-dependencies", "tasks"}
    assert set(pixi["workspace"]) == {"channels", "platforms"}
    assert all((ROOT / command.split()[-1]).is_file() for command in pixi["tasks"].values())


def test_the_changelog_and_the_citation_have_the_version() -> None:
    released = re.findall(
        r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert released[0] == (penstock.__version__, str(citation["date-released"]))
    assert citation["version"] == penstock.__version__


def test_version_is_written_once(metadata: Message) -> None:
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert "version" in PROJECT["dynamic"]
    assert metadata["Version"] == penstock.__version__
    assert printed.stdout.startswith(f"penstock {penstock.__version__}\n"), printed.stderr


def test_licence_is_the_same_everywhere(metadata: Message) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert metadata["License-Expression"] == PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert PROJECT["authors"] == citation["authors"]
    for name in ("LICENSE", "NOTICE"):
        assert "The Penstock authors" in (ROOT / name).read_text()


def test_links_for_language_models_lead_to_files() -> None:
    text = (ROOT / "llms.txt").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)

    assert text.startswith("# Penstock\n\n> ")
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert set(re.findall(r"\bpenstock\.(\w+)", text)) - {"__all__"} <= set(penstock.__all__)


def test_ci_runs_the_core_which_is_there() -> None:
    named = (ROOT / "tests" / "core.txt").read_text().splitlines()
    flows = ROOT / ".github" / "workflows"
    nightly, test = (yaml.safe_load((flows / f"{name}.yml").read_text())["jobs"] for name in ("nightly", "test"))
    runs = [str([step.get("run") for step in job["steps"]]) for job in (nightly["torch"], test["core"])]

    assert [name for name in named if not (ROOT / name.partition("::")[0]).exists()] == []
    assert "tests/torch_internals" in named and all("@tests/core.txt" in run for run in runs)


def test_measured_profiles_have_their_licence() -> None:
    data = ROOT / "tests" / "data"

    assert {path.name for path in data.iterdir()} == {"README.md", "pipedream"}
    for name in [ROOT / "NOTICE", data / "README.md"]:
        assert "pipedream/LICENSE.txt" in name.read_text()
    assert (data / "pipedream" / "LICENSE.txt").read_text().startswith("MIT License")


def test_hosted_ci_runs_the_command_of_the_readme_on_what_is_supported() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    commands = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    known = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)}
    (torch,) = (text for text in PROJECT["dependencies"] if text.startswith("torch"))

    readme = (ROOT / "README.md").read_text()
    status = readme.partition("**Status:** ")[2].partition("\n\n")[0]
    for names in job["strategy"]["matrix"].values():
        assert [text for text in names if text not in status] == []
    said = " ".join(_RUN_ON.split())
    assert said.partition("2.11.")[0] in " ".join(status.split())

    assert [line for line in commands if line.split()[0] == "./scripts/test"]
    assert "\n./scripts/test " in readme
    assert set(job["strategy"]["matrix"]["python"]) == known
    assert torch.startswith(f"torch>={min(job['strategy']['matrix']['torch'])},")


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_have_what_the_host_asks_for(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert template.keys() <= {"blank_issues_enabled", "contact_links"}
        return

    assert {"name", "description", "body"} <= template.keys()
    inputs = [item for item in template["body"] if item["type"] != "markdown"]
    assert all(item["attributes"]["label"] for item in inputs)
    assert len({item["id"] for item in inputs}) == len(inputs)
