"""Tasks that a launcher has started become ranks or are refused, and never train alone without a word."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.errors import TransportError
from penstock.runtime.transport.default_groups import launched_rank

SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
VARIABLES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    *("PMI_SIZE", "PMI_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    *("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "PALS_RANKID"),
)


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def build() -> penstock.Pipeline:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return penstock.Pipeline(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(1, 2),), F.mse_loss, optimizer)


def test_a_worker_that_imports_the_script_is_no_rank() -> None:
    with pytest.raises(TransportError, match=r"if __name__ == '__main__':"):
        exec("build()", {"__name__": "__mp_main__", "build": build})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (SRUN, "task 1 of the 2 that a launcher has started (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "task 0 of the 2"),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}, "task 3 of the 4"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "(PMI_RANK, PMI_SIZE)"),
        ({"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "0"}, "(FLUX_TASK_RANK, FLUX_JOB_SIZE)"),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"}, "task 0 of the 2"),
        ({"JSM_NAMESPACE_RANK": "1"}, "task 1 of the tasks that a launcher has started (JSM_NAMESPACE_RANK)"),
        ({"PALS_RANKID": "3"}, "WORLD_SIZE=their number, MASTER_ADDR"),
        ({"SLURM_PROCID": "5"}, "set RANK=$SLURM_PROCID"),
        ({"WORLD_SIZE": "2"}, "variable RANK: expected a whole number from 0 to 1, found none (WORLD_SIZE=2)"),
        ({**SRUN, "WORLD_SIZE": "2"}, "variable RANK: expected a whole number from 0 to 1, found none"),
        ({"RANK": "1"}, "variable WORLD_SIZE: expected a whole number of at least 1, found none (RANK=1)"),
        ({"RANK": "0"}, "variable WORLD_SIZE: expected a whole number of at least 1, found none"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "variable RANK: expected a whole number from 0 to 1, found 'zero'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "variable WORLD_SIZE: expected a whole number of at least 1, found 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "variable WORLD_SIZE: expected a whole number of at least 1, found '0'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "variable RANK: expected a whole number from 0 to 1, found '-1'"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "variable RANK: expected a whole number from 0 to 0, found '1'"),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, "found '1.0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "variable MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "found 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234"}, "variable MASTER_ADDR: expected the host of rank 0"),
    ],
)
def test_tasks_without_ranks_are_refused(
    environment: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match=re.escape(named)):
        build()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        # A sweep: each task is a training.
        {**SRUN, "WORLD_SIZE": "1"},
        # An allocation of several tasks in which one process is started.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "5"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "45871"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "1", "PMI_RANK": "0"},
        {"FLUX_JOB_SIZE": "4"},
        {"PALS_RANKID": "0"},
        {"JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_RANK": "0"},
        {"PALS_RANKID": "2", "WORLD_SIZE": "1"},
    ],
)
def test_one_process_stays_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with build() as pipe:
        assert pipe.rank == 0
    assert launched_rank() == (0, 1)


def test_tasks_with_ranks_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    assert launched_rank() == (1, 2)
