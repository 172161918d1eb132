"""Runs of the example that finetunes a language model, in processes of the pool."""

import contextlib
import io
import sys

from support.paths import ROOT

__all__ = ["run_example"]


def run_example(arguments: list[str]) -> str:
    """What ``python examples/finetune_causal_lm.py ARGUMENTS`` prints."""
    sys.path.insert(0, str(ROOT / "examples"))
    given, sys.argv = sys.argv, ["finetune_causal_lm.py", *arguments]
    printed = io.StringIO()
    try:
        import finetune_causal_lm

        with contextlib.redirect_stdout(printed):
            finetune_causal_lm.main()
    finally:
        sys.argv = given
        sys.path.remove(str(ROOT / "examples"))
    return printed.getvalue()
