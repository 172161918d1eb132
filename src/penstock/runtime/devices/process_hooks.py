"""Whether Penstock may change what belongs to the whole process, and the one switch that forbids it.

docs/semantics.md lists these changes.
"""

import os

PROCESS_HOOKS = "PENSTOCK_PROCESS_HOOKS"
"""The environment variable that, if it is 0, leaves the process to its owner: no hook at an uncaught error or at the
exit, no environment variables, no process group."""


def hooks_allowed() -> bool:
    """Whether the process may be changed."""
    return os.environ.get(PROCESS_HOOKS, "1") != "0"
