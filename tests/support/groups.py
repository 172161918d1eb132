"""Which tests stay together where several processes share the suite (pytest-xdist).

The tests of a file do, since they share what is expensive; but one process runs all tests that need the pool, which
would otherwise be there twice. The marks of ``--dist loadgroup`` would say so, but have no effect under pytest 9.2.
"""

import ast
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

__all__ = ["GroupScheduling"]


class GroupScheduling(LoadScopeScheduling):
    """Hands out the tests by file, and all that need the pool together; the largest group first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return "pool" if test.partition("[")[0] in _pooled(self.config.rootpath / file) else file


@cache
def _pooled(file: Path) -> frozenset[str]:
    """The tests and fixtures of a file that take the pool, or a fixture that does."""
    defined = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    taken = {node.name: {argument.arg for argument in node.args.args} for node in defined}
    found: frozenset[str] = frozenset({"pool"})
    while True:
        more = found | {name for name, arguments in taken.items() if arguments & found}
        if more == found:
            return found
        found = more
