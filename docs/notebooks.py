"""Makes Markdown of the notebooks in `examples/notebooks`: scripts in the percent format of jupytext, which run here.

    python docs/notebooks.py FILE        runs a notebook and prints it with its outputs

A cell shows what it prints and, as in Jupyter, the value of its last expression: a picture, or text.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
NAMES = ("first_pipeline", "schedules", "cluster", "stale_weights", "orders", "fleet")
"""In the order of the page."""


def cells(script: str) -> list[tuple[bool, str]]:
    """The cells of a notebook: whether each is text, and what is in it."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    found = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        is_text = kind.strip() == "[markdown]"
        found.append((is_text, re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE) if is_text else body.strip()))
    return found


def run(name: str) -> str:
    """The notebook with its outputs, a heading lower than in its file."""
    made, names = [], {"__name__": "__main__"}
    for is_text, body in cells((NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")):
        if is_text:
            made.append(re.sub("^#", "##", body, flags=re.MULTILINE))
            continue
        printed, picture = _execute(body, names)
        made.append(f"```python\n{body}\n```")
        made += [f"```text\n{printed.rstrip()}\n```"] if printed else []
        made += [f'```{{raw}} html\n<div style="overflow-x: auto">{picture}</div>\n```'] if picture else []
    return "\n\n".join(made) + "\n"


def _execute(body: str, names: dict[str, object]) -> tuple[str, str]:
    """Runs a cell; what it prints or shows as text, and its picture."""
    lines, picture = ast.parse(body), ""
    last = lines.body.pop() if isinstance(lines.body[-1], ast.Expr) else None
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(lines, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if hasattr(value, "_repr_svg_"):
            picture = value._repr_svg_()
        elif value is not None:
            print(repr(value))
    return output.getvalue(), picture


if __name__ == "__main__":
    print(run(Path(sys.argv[1]).stem))
