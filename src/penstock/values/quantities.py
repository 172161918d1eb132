"""Numbers with units, for people to read.

Inside Penstock all numbers are seconds, bytes, and bytes per second; only printed text has other units.
"""


def seconds_text(seconds: float) -> str:
    """``1.23 ms``: three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        # A number that rounds up to one of a unit is written in that unit.
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def bytes_text(size: float) -> str:
    """``1.23 MB``: three digits and a decimal unit."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * scale:
            return f"{_three_digits(size / scale)} {unit}"
    return "0" if size == 0 else f"{_three_digits(size)} B"


def bandwidth_text(bandwidth: float) -> str:
    """``12 GB/s``."""
    return f"{bytes_text(bandwidth)}/s"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
