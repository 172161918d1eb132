"""Devices: streams, events, communicators, copies to and from the host, and the device of a process.

Imports nothing else of Penstock. Start reading in ``accelerators.py``, the protocol of a GPU; ``streams.py`` orders
computation and updates.
"""
