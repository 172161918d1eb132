"""No code of Penstock runs what it reads from files or other processes: nothing is unpickled or evaluated."""

import ast

import pytest

from support.paths import ROOT

SOURCES = {
    str(path.relative_to(ROOT / "src")): path.read_text() for path in sorted((ROOT / "src" / "penstock").rglob("*.py"))
}
MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "xmlrpc"}
CALLS = {"eval", "exec", "exec_module", "load_module"}
YAML = {"full_load", "load", "load_all", "unsafe_load"}
EXPECTED = [
    # The expressions of size guards are PyTorch's, about the user's own model.
    "penstock/capturing/model_forms.py: eval",
    # A command runs the file of Python that it is given.
    "penstock/commands/subject_files.py: exec_module",
]


def loads(source: str) -> list[str]:
    """What in `source` may run code that it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS - {"eval", "exec"}:
                found.append(name)
            case ast.Attribute(attr=name) if name.endswith(("_object", "_object_list")):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                safe = [word for word in keywords if word.arg == "weights_only" and ast.unparse(word.value) == "True"]
                found += [] if safe else ["torch.load"]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr=name), keywords=keywords) if name in YAML:
                found += [] if any(word.arg == "Loader" for word in keywords) else [f"yaml.{name}"]
    return found


def test_nothing_that_is_read_is_run() -> None:
    assert sorted(f"{path}: {name}" for path, text in SOURCES.items() for name in loads(text)) == EXPECTED


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("dist.all_gather_object(a, b)", ["all_gather_object"]),
        ("dist.broadcast_object_list(a)", ["broadcast_object_list"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("yaml.load(text)", ["yaml.load"]),
        ("eval(text)", ["eval"]),
        ("module.eval()", []),
        ("torch.load(path, weights_only=True)", []),
        ("yaml.load(text, Loader=Safe)", []),
        ("json.loads(text)", []),
    ],
)
def test_code_that_runs_what_it_reads_is_found(source: str, found: list[str]) -> None:
    assert loads(source) == found
