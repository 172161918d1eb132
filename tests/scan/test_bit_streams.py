"""The paper's task: which of ten biased coins made a stream of bits (section 4.1). Both backwards learn it alike."""

import torch
from torch import Tensor, nn

from penstock.scan import ScanRNN

CLASSES, STEPS, WIDTH, SAMPLES = 10, 40, 12, 64


def train(kind: type[nn.RNN], **options: object) -> list[float]:
    torch.manual_seed(0)
    recurrence = kind(1, WIDTH, dtype=torch.float64, **options)
    head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    optimizer = torch.optim.Adam([*recurrence.parameters(), *head.parameters()], lr=0.01)
    losses = []
    for _ in range(60):
        classes = torch.randint(CLASSES, (SAMPLES,))
        bits: Tensor = torch.bernoulli((0.05 + 0.1 * classes).expand(STEPS, -1)).unsqueeze(-1).double()
        loss = nn.functional.cross_entropy(head(recurrence(bits)[1][0]), classes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_both_curves_are_the_same() -> None:
    expected = train(nn.RNN)
    for method in ("blelloch", "chunked"):
        found = train(ScanRNN, method=method)
        # Adam divides by the size of a gradient, so that a rounding of a tiny one counts.
        curves = [torch.tensor(losses, dtype=torch.float64) for losses in (found, expected)]
        torch.testing.assert_close(*curves, rtol=1e-5, atol=0)
    assert expected[-1] < expected[0] - 0.3
