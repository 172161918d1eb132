"""Runs the command ``penstock`` as ``python -m penstock``."""

import sys

from penstock.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(program="python -m penstock"))
