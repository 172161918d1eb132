"""Which of the processes of a job this one is, by the environment that its launcher has set."""

import os

from penstock.errors import TransportError

START = "Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process"
"""What to do about a variable that is missing."""

_TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
}
"""By the variable with the number of tasks that srun, mpirun or flux has started, the one with the number of the task.
In an allocation in which one process is started the first is missing or 1."""
_TERMINAL = "SLURM_PTY_PORT"
"""Set by ``srun --pty``: only its first task has the terminal, and the others end."""


def launched_rank() -> tuple[int, int]:
    """The rank of this process and the number of processes, by ``RANK`` and ``WORLD_SIZE``; (0, 1) without both.

    `TransportError` if one of them is missing or is no such number, and if another launcher has started several tasks
    and neither is set: each would train alone.
    """
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        _refuse_tasks()
        return 0, 1
    processes = read_number("WORLD_SIZE", 1, None)
    if processes == 1 and not os.environ.get("RANK"):
        return 0, 1
    return read_number("RANK", 0, processes - 1), processes


def read_number(name: str, least: int, most: int | None) -> int:
    """The environment variable `name`. `TransportError` unless it is a number from `least` to `most`."""
    text = os.environ.get(name, "").strip()
    if text.isascii() and text.isdecimal() and least <= int(text[:9]) and (most is None or int(text[:9]) <= most):
        return int(text[:9])
    numbers = f"from {least} to {most}" if most is not None else f"of at least {least}"
    both = ", ".join(f"{key}={os.environ[key]}" for key in ("RANK", "WORLD_SIZE") if key in os.environ)
    raise TransportError(
        f"the environment variable {name}: expected a whole number {numbers}, found {repr(text) if text else 'none'} "
        f"({both}). {START}; unset RANK and WORLD_SIZE for a training of one process"
    )


def _refuse_tasks() -> None:
    """Raises `TransportError` if this process is one of several tasks."""
    if os.environ.get(_TERMINAL):
        return
    for size, number in _TASKS.items():
        tasks, task = os.environ.get(size, ""), os.environ.get(number, "")
        if tasks.isdecimal() and int(tasks[:9]) > 1 and task:
            raise TransportError(
                f"this process is task {task} of the {tasks} that a launcher has started ({number}, {size}), and RANK "
                "and WORLD_SIZE are not set: expected ranks of one training, found tasks that would train alone each. "
                f"Start one torchrun per host, or set RANK=${number}, WORLD_SIZE=${size}, MASTER_ADDR (task 0's "
                "host) and MASTER_PORT in every task. For a training of its own in each task, set WORLD_SIZE=1"
            )
