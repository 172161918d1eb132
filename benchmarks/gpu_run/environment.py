"""Describes a machine with a GPU, its driver and its libraries: ``python benchmarks/gpu_run/environment.py FILE``.

A value that cannot be found is null, with the reason under "unknown".
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__: list[str] = []

RELEVANT = ("CUDA_", "NCCL_", "TORCH_", "PENSTOCK_", "CUBLAS_", "GLOO_", "PYTORCH_")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Findings:
    """What is known, and why the rest is not."""

    value: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, find: Callable[[], Any]) -> None:
        """Under `name` what `find` returns."""
        try:
            self.value[name] = find()
        except Exception as error:  # whatever it is, the other answers are worth having
            self.value[name] = None
            first = (str(error).strip() or "no reason given").splitlines()[0]
            self.unknown[name] = f"{type(error).__name__}: {first}"[:200]


def reported(*command: str) -> str:
    """The output of `command`."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.rstrip()


def commit() -> str:
    """That of the sources, with a sign if files have changed since."""
    name = reported("git", "rev-parse", "--short=12", "HEAD")
    return f"{name}+changes" if reported("git", "status", "--porcelain", "--untracked-files=no") else name


def note_machine(findings: Findings) -> None:
    """What needs no torch."""
    findings.note("date", lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    findings.note("commit", commit)
    findings.note("python", platform.python_version)
    findings.note("system", platform.platform)
    findings.note("cpus", lambda: len(os.sched_getaffinity(0)))
    findings.note("memory_bytes", lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    findings.note("driver", lambda: reported("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    findings.note("topology", lambda: reported("nvidia-smi", "topo", "-m"))
    findings.note("cards", lambda: reported("nvidia-smi", "-L"))
    findings.note("modes", lambda: reported("nvidia-smi", "--query-gpu=compute_mode,mig.mode.current", "--format=csv"))
    findings.note("variables", lambda: {k: v for k, v in sorted(os.environ.items()) if k.startswith(RELEVANT)})


def note_torch(findings: Findings) -> None:
    """Versions, and the devices that PyTorch sees."""
    import torch

    def nccl() -> str:
        from torch.cuda import nccl as library

        return ".".join(str(number) for number in library.version())

    def devices() -> list[dict[str, Any]]:
        if not torch.cuda.is_available():
            return []
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            {
                "name": one.name,
                "memory_bytes": one.total_memory,
                "multiprocessors": one.multi_processor_count,
                "capability": f"{one.major}.{one.minor}",
            }
            for one in found
        ]

    findings.note("torch", lambda: str(torch.__version__))
    findings.note("cuda", lambda: torch.version.cuda)
    findings.note("cudnn", lambda: torch.backends.cudnn.version())
    findings.note("nccl", nccl)
    findings.note("devices", devices)


def main() -> None:
    findings = Findings()
    note_machine(findings)
    try:
        note_torch(findings)
    except ImportError as error:
        findings.unknown["torch"] = str(error)
        findings.value["devices"] = None
    value = {**findings.value, "unknown": findings.unknown}
    Path(sys.argv[1]).write_text(json.dumps(value, indent=1))
    print(json.dumps(value, indent=1).replace("\\n", "\n"))


if __name__ == "__main__":
    main()
