"""Groups tests for pytest-xdist: one worker runs all tests of a group.

The tests of a file are a group, since they share fixtures. All tests that use the pool of processes are one group, so
that the pool exists once, and so are those that use the fork server. The marks of ``--dist loadgroup`` have no effect
under pytest 9.2, hence this scheduler.
"""

import ast
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_SHARED = ("pool", "fork_server")
"""Fixtures that take seconds to make."""


class GroupScheduling(LoadScopeScheduling):
    """Hands out the tests by file, and the tests that use one of `_SHARED` as one group; the largest group first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        used = (name for name in _SHARED if test.partition("[")[0] in _users(self.config.rootpath / file, name))
        return next(used, file)


@cache
def _users(file: Path, fixture: str) -> frozenset[str]:
    """The tests and fixtures of a file that use `fixture`, directly or through another one."""
    defined = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    taken = {node.name: {argument.arg for argument in node.args.args} for node in defined}
    found: frozenset[str] = frozenset({fixture})
    while True:
        more = found | {name for name, arguments in taken.items() if arguments & found}
        if more == found:
            return found
        found = more
