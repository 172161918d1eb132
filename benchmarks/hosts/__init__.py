"""Hosts on one machine, joined by links of a chosen rate: what trains fastest on them, and what was predicted."""
