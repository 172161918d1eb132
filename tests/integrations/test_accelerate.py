"""Accelerate beside a pipeline: what works, and that a loader which deals out batches to processes is refused."""

import json
from pathlib import Path

import pytest

from support.fork_server import ForkServer

SCRIPT = """
import json
import accelerate, torch
from torch import nn
import penstock

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
x, y = torch.randn(2, 16, 4, dtype=torch.float64)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)

accelerator = accelerate.Accelerator(cpu=True)
pipe = penstock.Pipeline(
    model, (x[:2],), nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.1), microbatches=2
)
losses = [float(pipe.step(*batch).loss) for batch in loader]
accelerator.wait_for_everyone()
ranks = accelerator.gather(torch.tensor([pipe.rank])).tolist()
found = "nothing is refused"
try:
    for batch in accelerator.prepare(loader):
        pipe.step(*batch)
except penstock.PenstockError as error:
    found = str(error)
print(json.dumps([losses, ranks, accelerator.is_main_process, found]), flush=True)
"""


@pytest.mark.sampled(0)
@pytest.mark.processes
def test_accelerate_gathers_beside_a_pipeline_and_must_not_deal_out_batches(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="the extra `test` brings it")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    printed = [
        [child.communicate(timeout=240) for child in fork_server.start_ranks([str(script)], count, tmp_path)]
        for count in (1, 2)
    ]
    (alone,), both = ([json.loads(text.splitlines()[-1]) for text, _ in each] for each in printed)

    assert alone[1:] == [[0], True, "nothing is refused"]
    assert [each[:3] for each in both] == [[alone[0], [0, 1], True], [alone[0], [0, 1], False]]
    assert all("a shuffle without a common seed" in each[3] for each in both), both
