"""Chooses the network interface of Gloo, where it would choose one that no other host reaches.

Gloo takes the address that the host's own name stands for. On many machines that is 127.0.0.1, since a line of
``/etc/hosts`` says so, and processes of two hosts then try to connect to themselves. In this case Penstock sets
`INTERFACE` to the interface over which this process reaches ``MASTER_ADDR``, unless it is set.
"""

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address

from penstock.torch_internals.distributed import INTERFACE

_READ_ADDRESS = 0x8915
"""Linux's request for the address of an interface."""
_NAME_BYTES = 16


def choose_interface(host: str, port: int) -> None:
    """Sets `INTERFACE` for a group that meets at `host`, if it is not set and Gloo would choose the loopback interface
    although `host` is reached over another one.
    """
    if os.environ.get(INTERFACE) or sys.platform != "linux" or not _is_loopback(_own_address()):
        return
    address = _address_towards(host, port)
    name = "" if address is None or _is_loopback(address) else _interface_of(address)
    if name:
        os.environ[INTERFACE] = name


def _own_address() -> str:
    """The address that this host's name stands for; empty if none."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _is_loopback(address: str) -> bool:
    return not address or ip_address(address).is_loopback


def _address_towards(host: str, port: int) -> str | None:
    """The address of this host from which it reaches `host`. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str:
    """The interface with the IPv4 `address`; empty if there is none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
                answer = fcntl.ioctl(asking.fileno(), _READ_ADDRESS, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
