"""A fleet on Ray: a placement group for each lease, and in it an actor on each node, which starts the ranks there.

Ray knows which nodes are there, reserves their devices, starts actors, and finds nodes that die. A node has as many
workers of a kind as it has of the resource of that name: ``ray start --resources '{"V100": 8}'``, or CPU or GPU, which
Ray counts itself. Groups and actors outlive the executor; ranks die with their actor, and an actor with its node.
"""

import importlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.errors import PenstockError
from penstock.fleet.jobs import Kind
from penstock.fleet.lease_processes import LOST, Launch, LeaseProcesses, NodeRanks, Part

_NAMESPACE = "penstock"
_SECONDS = 10.0
"""The time in which a head answers, and in which actors kill their ranks."""


class RayNodes:
    """The nodes of a Ray cluster. `PenstockError` if Ray is not installed, or no head answers at `address`."""

    def __init__(self, address: str = "auto") -> None:
        """`address`: HOST:PORT of the head, or ``auto`` for that of this machine."""
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as missing:
            raise PenstockError(
                "RayNodes: expected ray, found none: install it with `pip install 'penstock[ray]'`"
            ) from missing
        if self._ray.is_initialized():
            return
        try:
            if address != "auto":
                # Ray takes minutes to say that no head answers.
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_SECONDS).close()
            self._ray.init(address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
        except (OSError, ValueError) as error:
            raise PenstockError(
                f"RayNodes(address=): expected the head of a Ray cluster at {address!r}, found none: start it with "
                f"`ray start --head`. {error}"
            ) from error

    def there(self, kinds: Sequence[Kind]) -> Mapping[str, Mapping[str, int]]:
        found: dict[str, dict[str, int]] = {kind.devices: {} for kind in kinds}
        for name, node in self.alive().items():
            for devices, nodes in found.items():
                nodes[name] = int(node["Resources"].get(devices, 0))
        return found

    def start(self, launch: Launch) -> LeaseProcesses:
        ray, nodes, parts = self._ray, self.alive(), launch.parts()
        # A node that has died meanwhile never gives what the group waits for, and the next look at the nodes ends it.
        group = ray.util.placement_group(
            [{launch.devices: part.workers, "GPU": _gpus(launch.devices, part, nodes)} for part in parts],
            name=launch.lease,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": part.node} for part in parts],
        )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors: list[Any] = []
        for part in parts:
            address = nodes.get(part.node, {}).get("NodeManagerAddress", "")
            actor = ray.remote(NodeRanks).options(
                name=f"{launch.lease}/{part.number}",
                namespace=_NAMESPACE,
                lifetime="detached",
                num_cpus=part.workers if launch.devices == "CPU" else 0,
                num_gpus=_gpus(launch.devices, part, nodes),
                resources={} if launch.devices in ("CPU", "GPU") else {launch.devices: part.workers},
                max_concurrency=8,
                scheduling_strategy=strategy(group, part.number),
            )
            master = actors[0].master.remote() if actors else (address, 0)
            actors.append(actor.remote(launch, part, master, cwd=os.getcwd(), bound=True))
        return _RayLease(self, parts, group, actors)

    def find(self, launch: Launch) -> LeaseProcesses | None:
        ray, parts = self._ray, launch.parts()
        with suppress(ValueError):
            group = ray.util.get_placement_group(launch.lease)
            try:
                actors = [ray.get_actor(f"{launch.lease}/{part.number}", _NAMESPACE) for part in parts]
            except ValueError:
                ray.util.remove_placement_group(group)
                return None
            return _RayLease(self, parts, group, actors)
        return None

    def alive(self) -> dict[str, dict[str, Any]]:
        """What Ray knows of each node that is there."""
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}


class _RayLease:
    """A placement group and its actors."""

    def __init__(self, nodes: RayNodes, parts: Sequence[Part], group: Any, actors: Sequence[Any]) -> None:
        self._nodes, self._ray, self._parts, self._group, self._actors = nodes, nodes._ray, parts, group, actors
        self._ends = [actor.wait.remote() for actor in actors]
        self._asked = False

    def exit_code(self) -> int | None:
        ended, running = self._ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        codes = [self._code(self._ends.index(end)) for end in ended]
        failed = next((code for code in codes if code), None)
        if failed == LOST or (failed is not None and not self._asked):
            return failed
        return None if running or None in codes else failed or 0

    def _code(self, number: int) -> int | None:
        """The exit code of one node. None if it does not answer, but may do so again."""
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(self._ends[number]))
        except errors.ActorUnavailableError:
            self._ends[number] = self._actors[number].wait.remote()
            return None
        except errors.RayError:
            return -signal.SIGKILL if self._parts[number].node in self._nodes.alive() else LOST

    def ask(self) -> None:
        self._asked = True
        for actor in self._actors:
            actor.ask.remote()

    def kill(self) -> None:
        kills = [actor.kill.remote() for actor in self._actors]
        self._ray.wait(kills, num_returns=len(kills), timeout=_SECONDS)
        self._ray.util.remove_placement_group(self._group)


def _gpus(devices: str, part: Part, nodes: Mapping[str, Mapping[str, Any]]) -> float:
    """The GPUs of a node that these workers of it are."""
    if devices == "CPU":
        return 0.0
    has = nodes.get(part.node, {}).get("Resources", {})
    return float(has.get("GPU", 0) / has.get(devices, 1) * part.workers)
