"""Runs the command ``penstock`` as ``python -m penstock``."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(program="python -m penstock"))
