"""Penstock's own schedules, one file each; `METHODS` lists them all."""

from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders.breadth_first import BREADTH_FIRST
from penstock.scheduling.orders.forward_only import INFERENCE, STREAMED_INFERENCE
from penstock.scheduling.orders.gpipe import GPIPE
from penstock.scheduling.orders.interleaved import INTERLEAVED
from penstock.scheduling.orders.one_f_one_b_flush import ONE_F_ONE_B_FLUSH
from penstock.scheduling.orders.pipedream import PIPEDREAM
from penstock.scheduling.orders.spp import SPP
from penstock.scheduling.orders.two_bw import TWO_BW
from penstock.scheduling.orders.v_half import V_HALF
from penstock.scheduling.orders.v_min import V_MIN
from penstock.scheduling.orders.zb_h1 import ZB_H1
from penstock.scheduling.orders.zb_v import ZB_V

__all__ = [
    "AMBIGUOUS_NAMES",
    "BREADTH_FIRST",
    "DEFAULT_SCHEDULE",
    "GPIPE",
    "INFERENCE",
    "INTERLEAVED",
    "METHODS",
    "ONE_F_ONE_B_FLUSH",
    "PIPEDREAM",
    "SPP",
    "STREAMED_INFERENCE",
    "TWO_BW",
    "V_HALF",
    "V_MIN",
    "ZB_H1",
    "ZB_V",
]

METHODS: tuple[ScheduleDefinition, ...] = (
    GPIPE,
    ONE_F_ONE_B_FLUSH,
    INTERLEAVED,
    SPP,
    ZB_H1,
    ZB_V,
    V_HALF,
    V_MIN,
    BREADTH_FIRST,
    PIPEDREAM,
    TWO_BW,
)

DEFAULT_SCHEDULE = ONE_F_ONE_B_FLUSH.name

AMBIGUOUS_NAMES = {
    "1f1b": "'1f1b' has two meanings: PyTorch and Megatron mean one that flushes after every minibatch, here "
    f"{ONE_F_ONE_B_FLUSH.name!r}; PipeDream's paper means one that never flushes and trains on stale weights, here "
    f"{PIPEDREAM.name!r}. "
}
"""Names with several meanings, and the sentence that explains each to the user."""
