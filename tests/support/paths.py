"""Where the files of the project lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PIPEDREAM = ROOT / "tests" / "data" / "pipedream"
"""Layer graphs that PipeDream's authors measured."""
SCRIPTS = ROOT / "tests" / "support" / "scripts"
"""Programs that must be processes of their own."""
