"""Groups tests for pytest-xdist: one worker runs all tests of a group.

The tests of a file are a group, since they share fixtures. All tests that use the pool of processes are one group, so
that the pool exists once, and so are those that use the fork server. The marks of ``--dist loadgroup`` have no effect
under pytest 9.2, hence this scheduler.
"""

import ast
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

_SHARED = ("pool", "fork_server")
"""Fixtures that take seconds to make."""
_OF_PROCESSES, _SLOW = 5, 30
"""How many other tests a test that starts processes, and one that is marked as slow, take as long as."""


class GroupScheduling(LoadScopeScheduling):
    """Hands out the tests by file, and the tests that use one of `_SHARED` as one group.

    The group that takes the longest comes first: no worker is left with it when the others have ended.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, test = self._place(nodeid)
        return next((name for name in _SHARED if test in _users(file, name)), nodeid.partition("::")[0])

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda scope: sum(map(self._weight, self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _place(self, nodeid: str) -> tuple[Path, str]:
        file, _, test = nodeid.partition("::")
        return self.config.rootpath / file, test.partition("[")[0]

    def _weight(self, nodeid: str) -> int:
        file, test = self._place(nodeid)
        if test in _marked_slow(file):
            return _SLOW
        return _OF_PROCESSES if any(test in _users(file, name) for name in _SHARED) else 1


@cache
def _users(file: Path, fixture: str) -> frozenset[str]:
    """The tests and fixtures of a file that use `fixture`, directly or through another one."""
    taken = {node.name: {argument.arg for argument in node.args.args} for node in _functions(file)}
    found: frozenset[str] = frozenset({fixture})
    while True:
        more = found | {name for name, arguments in taken.items() if arguments & found}
        if more == found:
            return found
        found = more


@cache
def _marked_slow(file: Path) -> frozenset[str]:
    """The tests of a file that are marked as slow, by themselves or all together."""
    whole = any(isinstance(node, ast.Assign) and "pytest.mark.slow" in ast.unparse(node) for node in _parse(file).body)
    return frozenset(
        node.name
        for node in _functions(file)
        if whole or any("pytest.mark.slow" in ast.unparse(decorator) for decorator in node.decorator_list)
    )


def _functions(file: Path) -> list[ast.FunctionDef]:
    return [node for node in _parse(file).body if isinstance(node, ast.FunctionDef)]


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
