"""The benchmark of hosts: its networks leave nothing behind, and its table shows what was measured."""

import os
import signal
import subprocess
import sys
import time

from contenders.contenders import DDP
from hosts.compare import table
from hosts.lineup import AUTO
from hosts.networks import PREFIX, joined_hosts
from hosts.trials import Trial
from support.hosts import require_hosts
from support.paths import ROOT


def namespaces(process: int) -> list[str]:
    """The namespaces that `process` has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-{process}-")]


def test_three_hosts_reach_each_other_and_are_removed() -> None:
    require_hosts()
    with joined_hosts(3, 1e9) as network:
        assert len(namespaces(os.getpid())) == 4
        first, last = network.hosts[0], network.hosts[2]
        script = f"import socket; socket.create_connection(('{last.address}', 4000), 20)"
        listening = f"import socket; socket.create_server(('{last.address}', 4000)).accept()"
        with subprocess.Popen(last.command([sys.executable, "-c", listening])) as server:
            for _ in range(100):
                if not subprocess.run(first.command([sys.executable, "-c", script]), capture_output=True).returncode:
                    break
                time.sleep(0.05)
            assert server.wait(20) == 0
    assert namespaces(os.getpid()) == []


def test_hosts_are_removed_with_their_processes_when_their_maker_is_killed() -> None:
    require_hosts()
    script = (
        "import subprocess, sys; from hosts.networks import joined_hosts\n"
        "with joined_hosts(2, 1e9) as network:\n"
        "    running = subprocess.Popen(network.hosts[0].command(['sleep', '600']))\n"
        "    print(running.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT / "benchmarks",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        inside = int(maker.stdout.readline())
        assert len(namespaces(maker.pid)) == 2
        maker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while (namespaces(maker.pid) or os.path.exists(f"/proc/{inside}/exe")) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert namespaces(maker.pid) == []
    assert not os.path.exists(f"/proc/{inside}/exe")


def trial(auto: float) -> Trial:
    """Two rounds of three contenders."""
    walls = {DDP: [0.8, 0.8], "penstock gpipe": [0.4, 0.4], "penstock 2bw": [0.2, 0.2], AUTO: [auto, auto]}
    link = dict.fromkeys(
        ("bytes_per_second", "latency_seconds", "message_seconds", "message_seconds_per_byte", "action_seconds"), 1e-6
    )
    return Trial(walls, {"penstock gpipe": 0.5, AUTO: 0.44}, "zb-h1: 8 microbatches of 2\nstage", 0.4, link)


def test_the_table_compares_the_choice_with_what_trains_alike() -> None:
    """`2bw` is faster, and its updates are delayed."""
    lines = table(4e8, trial(0.5)).splitlines()

    assert [line[:28].strip() for line in lines[2:6]] == ["penstock 2bw", "penstock gpipe", AUTO, DDP]
    assert lines[3].split()[-3:] == ["500.0", "1.250", "2.00x"]
    assert lines[-1] == (
        f"{AUTO} takes +25.0% beside the fastest without delayed updates, penstock gpipe; predicted -12.0%, by the "
        "layers before the rounds -20.0%; 1.60x DDP"
    )
