"""The runtime on a GPU: ``pytest -m gpu`` where there is one."""

from dataclasses import replace

import pytest
import torch

import penstock
from hook_jobs import HOOKED, run_hooked
from processes import Pool
from training import Case, Outcome, run_pipeline, run_reference, stages_on_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case("normalized", "1f1b-flush", 2, 4, "adamw", device="cuda:0")
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "zb-v", "1f1b", "vertical", "2bw")


def case(schedule: str) -> Case:
    """The case under another schedule."""
    return replace(CASE, schedule=schedule, stages_per_rank=stages_on_a_rank(schedule))


def assert_close(expected: Outcome, actual: Outcome) -> None:
    """Equal but for the order in which CUDA kernels add, which is theirs to choose."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-9, atol=1e-9)
    for name, tensor in actual.state.items():
        torch.testing.assert_close(tensor.cpu(), expected.state[name].cpu(), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_process(schedule: str) -> None:
    assert_close(run_reference(case(schedule)), run_pipeline(case(schedule)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_share_the_device(pool: Pool, schedule: str) -> None:
    expected = run_reference(case(schedule))
    for part in pool.run(2, run_pipeline, case(schedule)):
        assert_close(expected, part)


@pytest.mark.parametrize("recipe", HOOKED)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_hooks_clipping_and_scaling(schedule: str, recipe: str) -> None:
    assert_close(run_reference(case(schedule), **HOOKED[recipe]), run_hooked(case(schedule), recipe))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_of_low_precision(schedule: str) -> None:
    """What autocast would cast anyway it is given cast: no number changes."""
    tried = replace(case(schedule), subject="perceptron")
    options = {"autocast": torch.bfloat16, "sample": (tried.options["sample"][0].float(),)}
    outcomes = []
    for dtype in (None, torch.bfloat16):
        pipe = penstock.Pipeline(tried.build().float(), **{**tried.options, **options, "version_dtype": dtype})
        outcomes.append([float(pipe.step(x.float(), y).loss) for x, y in tried.batches])
        pipe.close()
    assert outcomes[0] == outcomes[1]
