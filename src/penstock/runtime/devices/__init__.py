"""Devices: streams, events, communicators, copies to and from the host, and which device is a process's own.

Imports nothing else of Penstock. Start reading in ``accelerators.py``, the protocol that a GPU's class keeps to;
``streams.py`` has the order between computation and updates.
"""

__all__: list[str] = []
