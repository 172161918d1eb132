"""What Penstock changes in its process, and that one variable forbids it."""

import pytest

import penstock
from penstock.errors import TransportError
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS
from support.jobs.process_hook_jobs import Changes, observe_changes
from support.processes import Pool
from support.training import Case


def test_hooks_are_set_while_a_pipeline_is_open(pool: Pool) -> None:
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    for during, after, _ in pool.run(2, observe_changes, "1"):
        assert during == Changes(connections, hooked=True, exit_functions=2)
        assert (after.environment, after.hooked) == (connections, False)


def test_hooks_can_be_switched_off(pool: Pool) -> None:
    losses = [losses for _, _, losses in pool.run(2, observe_changes, "1")]
    for during, after, found in pool.run(2, observe_changes, "0"):
        assert during == after == Changes({}, hooked=False, exit_functions=0)
        assert found in losses


def test_without_hooks_the_process_group_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), (PROCESS_HOOKS, "0")):
        monkeypatch.setenv(name, value)
    case = Case("layered", "1f1b-flush", 2, 4)

    with pytest.raises(TransportError, match=r"WORLD_SIZE is 2 .* Call torch\.distributed\.init_process_group\(\)"):
        penstock.Pipeline(case.build(), **case.options)
