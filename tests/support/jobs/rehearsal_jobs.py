"""A rehearsal in several processes."""

import torch
import torch.nn.functional as F

import penstock
from support.found_inputs import Chain, penalty, rows

__all__ = ["rehearse_in_processes"]


def rehearse_in_processes() -> tuple[str, str]:
    """What a rehearsal says of an equal training, and of a loss that reads the weights of all stages."""
    torch.manual_seed(0)
    x, t = rows(8, 8), rows(8, 8)
    found = penstock.rehearse(
        Chain(), [(x, t)] * 2, sample=(x[:2],), loss_fn=F.mse_loss, optimizer=torch.optim.Adam, microbatches=4
    )
    try:
        penstock.rehearse(lambda: penalty(2, "1f1b-flush"))
    except penstock.PenstockError as error:
        return str(found), str(error)
    return str(found), ""
