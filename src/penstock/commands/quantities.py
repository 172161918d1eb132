"""Parses numbers with units, as a person types them.

Inside Penstock everything is seconds, bytes, and bytes per second; only the command line knows other units.
"""

import argparse
import re

_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*"
_SCALE = r"(?P<scale>[kKMGT]?|[KMGT]i)"
_LEAST = 1e3
"""No link is so slow: a smaller number without a unit was meant in another one."""
_BANDWIDTH = re.compile(_NUMBER + rf"(?:{_SCALE}(?P<unit>B/s|Bps|bit/s|b/s|bps))?")
_BYTES = re.compile(_NUMBER + rf"(?:{_SCALE}B)?")


def parse_bandwidth(text: str) -> float:
    """Bytes per second: ``12e9``, ``12GB/s``, ``10Gbps`` (bits)."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or float(match["number"]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a bandwidth: expected bytes per second (12e9), or with a unit: 12GB/s, 12GiB/s (bytes), "
            "10Gbps, 10Gbit/s (bits)"
        )
    if match["unit"] is None and float(match["number"]) < _LEAST:
        raise argparse.ArgumentTypeError(
            f"{text!r} would be {text.strip()} bytes per second: expected a unit, such as {text.strip()}Gbps (bits) or "
            f"{text.strip()}GB/s (bytes)"
        )
    per_byte = 8 if match["unit"] in ("bit/s", "b/s", "bps") else 1
    return float(match["number"]) * _SCALES[match["scale"] or ""] / per_byte


def parse_bytes(text: str) -> float:
    """Bytes: ``16e9``, ``16GB``, ``16GiB``."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match["number"]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: expected 16e9, 16GB or 16GiB")
    return float(match["number"]) * _SCALES[match["scale"] or ""]


def parse_count(text: str) -> int:
    """A whole number, 1 or more."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: expected a whole number, 1 or more")
    return int(text)


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers, 1 or more, separated by commas."""
    return tuple(parse_count(part.strip()) for part in text.split(","))
