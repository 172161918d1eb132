"""The example's training keeps the contract of the executor: it saves and leaves when asked, and ends with the same
bits, whatever number of stages it went on with.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from penstock.fleet import FleetFile
from penstock.fleet.run_states import steps_done
from support.fork_server import ForkServer, finish
from support.paths import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STEPS = 60


def has_handler(status: str) -> bool:
    """Whether the process of this ``/proc`` entry has a handler for SIGUSR1."""
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def test_a_preempted_training_ends_with_the_same_bits_on_two_stages(fork_server: ForkServer, tmp_path: Path) -> None:
    fleet = FleetFile.load(ROOT / "examples" / "fleet" / "fleet.yaml")
    command = fleet.commands[0]
    assert command is not None

    def words(name: str) -> list[str]:
        return [str(ROOT / command.words[0]), *command.filled(tmp_path / name / "checkpoints", STEPS, 1)[1:]]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Enough steps that it still trains when the signal comes.
    forever = [str(10**9) if word == str(STEPS) else word for word in words("preempted")]
    preempted = fork_server.start(forever, environment, ROOT)
    caught = Path(f"/proc/{preempted._pid}/status")
    while not has_handler(caught.read_text()):
        time.sleep(0.01)
    os.kill(preempted._pid, signal.SIGUSR1)
    ((code, errors),) = finish([preempted])
    first = steps_done(tmp_path / "preempted" / "checkpoints")
    alone = finish([fork_server.start(words("alone"), environment, ROOT)])
    finish(fork_server.start_ranks(words("preempted"), 2, ROOT))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("preempted", "alone")]

    assert code == 138, errors
    assert 0 < first < STEPS
    assert alone[0][0] == 0
    assert results[0] == results[1]
