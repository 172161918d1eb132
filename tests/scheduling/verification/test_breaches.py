"""The laws of programs: each broken on purpose, and caught with the action that breaks it.

That nothing wrong passes is the business of `test_verified_programs`.
"""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import verify_programs
from penstock.scheduling.written_programs import define_by_programs
from support.broken_programs import change, complaint, promising
from support.own_schedules import EAGER, offloading

FLUSH = Schedule("1f1b-flush", 2, 2)
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0
# rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0
STASH = Schedule("pipedream", 2, 1)
# 3 minibatches:
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 0R2<1 0B2@1 0U3<1
# rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1U1<0 1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0 1F2@2 1B2@2 1S2>0 1U3<2
SYNC = Schedule("pipedream", 2, 1, vertical_sync=True)
TWO_BW, LATE = Schedule("2bw", 2, 2), promising(Schedule("2bw", 2, 2, norms=True), pending_updates=(1, 2))
ALONE = Schedule("interleaved", 1, 1, 2)
# rank 0: 0F0@0 1F0@0 1B0@0 0B0@0 0U1<0 1U1<0
NOTHING, ONE = inference(2, 1, 2), inference(1, 1, 1)
H1 = Schedule("zb-h1", 2, 2)
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0
# rank 1: 1R0<0 1F0@0 1I0@0 1S0>0 1R1<0 1F1@0 1I1@0 1S1>0 1W0@0 1W1@0 1U1<0
H1_EARLY = promising(Schedule("zb-h1", 2, 1), in_flight=(1, 2), versions=(1, 2))
H1_TIED = Schedule("zb-h1", 2, 1, ties=((0, 1),))
H1_REPLICAS = Schedule.placed("zb-h1", Placement(((0,), (1, 2))), 2)
SHARING = replace(Schedule.placed("2bw", Placement(((0, 1), (2,))), 4, norms=True), gathers=True)
# rank 0: ... 0A1 0N1<1 0F6@0 0S6>1 0R4<1 0B4@0 0R6<1 0B6@0 0A2 0N2<1 0N1>1 0N2>1 0U1<0 0U2<0
# rank 1: ... 0A1 0N1<1 0F7@0 0S7>1 0R5<1 0B5@0 0R7<1 0B7@0 0A2 0N2<1 0N1>1 0N2>1 0U1<0 0U2<0
OFFLOADS = Schedule(define_by_programs("alone", "0F0@0 0H0 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 0U1<0"), 1, 2)
TURNS = Schedule.placed(offloading(EAGER), Placement(((0, 1),)), 2)
# rank 0: 0F0@0 0H0 0D0 0B0@0 0A1 0U1<0
# rank 1: 0F1@0 0H1 0D1 0B1@0 0A1 0U1<0
AGAIN = Schedule("1f1b-flush", 2, 2, recomputed=frozenset({0}))
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0C0@0 0R0<1 0B0@0 0C1@0 0R1<1 0B1@0 0U1<0
WAITING, FLYING = promising(H1, pending_weight_backwards=(0, 1)), promising(H1, in_flight=(2, 1))
SKIPPING, FARTHER = (Schedule("gpipe", stages, 2, skips=((0, stages - 1),)) for stages in (3, 4))
TIED = Schedule("gpipe", 3, 1, ties=((0, 2),))
NORMS, THREE = Schedule("2bw", 3, 3, norms=True), Schedule("pipedream", 3, 1)
REPLICAS = Schedule.placed("1f1b-flush", Placement(((0, 1), (2,))), 2)
# rank 0: 0F0@0 0S0>1 0R0<1 0B0@0 0A1 0U1<0
# rank 1: 0F1@0 0S1>1 0R1<1 0B1@0 0A1 0U1<0
# rank 2: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0

EVERY = frozenset({0, 1})
STREAMED = Schedule("breadth-first", 1, 2, 2, recomputed=EVERY, streamed=EVERY, places=1)
# rank 0: 0G0 0F0@0 0F1@0 0Q0 1G0 1F0@0 1B0@0 1F1@0 1B1@0 1Q0 0G0 0C0@0 0B0@0 0C1@0 0B1@0 0Q0 0U1<0 1U1<0
STREAMED_SUMS = Schedule.placed("gpipe", Placement(((0, 1),)), 2, recomputed=EVERY, streamed=frozenset({0}))
# rank 0: 0G0 0F0@0 0B0@0 0A1 0Q0 0U1<0
# rank 1: 0G0 0F1@0 0B1@0 0A1 0Q0 0U1<0
HALVES = define_by_programs("halves", "0F0@0 1F0@0 1I0@0 0I0@0 1W0@0 0W0@0 0U1<0 1U1<0")
STREAMED_HALVES = Schedule(HALVES, 1, 1, 2, recomputed=EVERY, streamed=EVERY, places=1)

LAWS = {
    "place": "an action is of a stage of its rank and of a microbatch of the program",
    "once": "each microbatch goes forward and backward exactly once on each stage",
    "drained": "nothing is in flight after the drain: every forward had its backward",
    "ascending": "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike",
    "stashed": "a backward reads the version that its forward read",
    "flushed": "a forward reads the version made by the updates of all earlier minibatches",
    "delayed": "a forward reads the version made by the updates of all earlier minibatches but one",
    "newest": "a forward reads the newest version of its stage at that moment",
    "in sync": "a forward reads the version that the input stage read for this microbatch",
    "untrained": "a forward reads version 0, since nothing is trained",
    "inference": "an inference has forwards only",
    "update": "an update makes the next version from all backwards of its microbatches, and they read one version",
    "kept": "no version is overwritten while it is needed: stage 0 keeps 1",
    "in flight": "activations in flight stay within the guarantee: at most 1 on stage 1",
    "halves": "microbatches that wait for their weight backward stay within the guarantee: at most 1 on stage 1",
    "pending": "pending updates stay within the guarantee: at most 1 on stage 0",
    "neighbors": "messages pass only between neighbors or stages that share weights or a skip, on different ranks",
    "received": "every message is sent once and received once; none is left over after the drain",
    "order": "messages are received in the order in which they were sent, on each edge between two ranks",
    "data": "an action comes after what it needs",
    "offload": "stage 0 offloads and reloads a microbatch once, after its forward and before its backward",
    "recompute": "stage 0 recomputes a microbatch once, between its forward and its backward",
    "room": "no more streamed stages are on a rank at once than it has places",
    "moves": "weights of streamed stages, and of no others, are fetched where they are not and released where they are",
    "weights": "a stage computes with weights that are fetched and not released, of the version that it reads",
    "graphs": "what a forward saves for its backward is used up before the weights leave",
    "sums": "replicas sum the gradients of a stage before these leave with the weights",
    "at home": "an update of a streamed stage happens on the host, and between steps all weights are there",
    "waits": "no rank waits forever, when receives block and sends do not",
}
BREACHES = [
    ("no fetch", STREAMED, 1, "0G0 0F0@0 -> 0F0@0; 0F1@0 0Q0 -> 0F1@0", "weights", "0F0@0", "a fetch of version 0 of"),
    (
        "fetched late",
        STREAMED,
        1,
        "0Q0 1G0 1F0@0 -> 0Q0 1F0@0 1G0",
        "weights",
        "1F0@0",
        "a fetch of version 0 of stage",
    ),
    ("released early", STREAMED, 1, "1B1@0 1Q0 -> 1Q0 1B1@0", "graphs", "1Q0", "the backward of microbatch 1, or its"),
    ("released in a forward", STREAMED, 1, "0F1@0 0Q0 -> 0Q0 0F1@0", "weights", "0F1@0", "and no release since"),
    (
        "released again",
        STREAMED,
        1,
        "1F0@0 1B0@0 -> 1F0@0 1Q0 1G0 1B0@0",
        "graphs",
        "1Q0",
        "the backward of microbatch 0",
    ),
    (
        "recomputed, then released",
        STREAMED,
        1,
        "0C1@0 -> 0C1@0 0Q0 0G0",
        "graphs",
        "0Q0",
        "the backward of microbatch 1",
    ),
    ("no room", STREAMED, 1, "0F1@0 0Q0 1G0 -> 0F1@0 1G0 0Q0", "room", "1G0", "a release of one of 0: places=1"),
    ("fetched twice", STREAMED, 1, "1F1@0 -> 1G0 1F1@0", "moves", "1G0", "a release of stage 1 before"),
    ("released twice", STREAMED, 1, "1Q0 0G0 -> 1Q0 1Q0 0G0", "moves", "1Q0", "a fetch of version 0 of stage 1 before"),
    ("version of a fetch", STREAMED, 2, "1G1 -> 1G0", "weights", "1G0", "version 1, which the last update made"),
    ("version of a release", STREAMED, 2, "1Q1 -> 1Q0", "moves", "1Q0", "a fetch of version 0 of stage 1 before"),
    ("not streamed", FLUSH, 1, "0F0@0 -> 0G0 0F0@0", "moves", "0G0", "none of stage 0, which is not streamed"),
    (
        "resident at its update",
        STREAMED,
        1,
        "0B1@0 0Q0 0U1<0 -> 0B1@0 0U1<0 0Q0",
        "at home",
        "0U1<0",
        "a release of stage",
    ),
    (
        "resident at the end",
        replace(STREAMED, places=2),
        1,
        "1U1<0 -> 1U1<0 1G1",
        "at home",
        "end",
        "a release of stage 1",
    ),
    ("released between halves", STREAMED_HALVES, 1, "", "graphs", "1Q0", "the backward of microbatch 0, or its weight"),
    (
        "sum after the release",
        STREAMED_SUMS,
        1,
        "0B1@0 0A1 0Q0 -> 0B1@0 0Q0 0A1",
        "sums",
        "0A1",
        "it before the release",
    ),
    ("place", FLUSH, 1, "0F1@0 -> 1F1@0", "place", "1F1@0", "stages [0] on rank 0"),
    ("microbatch", FLUSH, 1, "0U1<0 -> 0F2@0 0U1<0", "place", "0F2@0", "microbatches 0 to 1"),
    ("forward twice", FLUSH, 1, "1F1@0 -> 1F1@0 1F1@0", "once", "1F1@0", "a microbatch that is not done yet"),
    ("backward twice", FLUSH, 1, "1B0@0 -> 1B0@0 1B0@0", "once", "1B0@0", "a microbatch that is not done yet"),
    ("forward missing", FLUSH, 1, "1F1@0 ->; 1B1@0 ->", "once", "end", "a forward of microbatch 1 on stage 1 before"),
    ("leak", STASH, 3, "0R2<1 0B2@1 0U3<1 ->; 1S2>0 ->", "drained", "0F2@1", "a backward of microbatch 2 on stage 0"),
    ("backwards", FLUSH, 1, "0R0<1 0B0@0 0R1<1 0B1@0 -> 0R1<1 0B1@0 0R0<1 0B0@0", "ascending", "0B1@0", "microbatch 0"),
    ("forwards", FLUSH, 1, "0F0@0 0S0>1 0F1@0 0S1>1 -> 0F1@0 0S1>1 0F0@0 0S0>1", "ascending", "0F1@0", "microbatch 0"),
    ("stash", STASH, 3, "0B1@0 -> 0B1@1", "stashed", "0B1@1", "version 0, which 0F1@0 read"),
    ("version of a flush", FLUSH, 2, "0F2@1 -> 0F2@0; 0B2@1 -> 0B2@0", "flushed", "0F2@0", "version 1 for microbatch"),
    ("version of 2bw", TWO_BW, 3, "1F4@1 -> 1F4@2; 1B4@1 -> 1B4@2", "delayed", "1F4@2", "version 1 for microbatch 4"),
    ("version of pipedream", STASH, 3, "0F2@1 -> 0F2@0; 0B2@1 -> 0B2@0", "newest", "0F2@0", "version 1 for microbatch"),
    ("version of vertical sync", SYNC, 3, "1F2@1 -> 1F2@2; 1B2@1 -> 1B2@2", "in sync", "1F2@2", "version 1 for"),
    ("version of an inference", NOTHING, 1, "1F1@0 -> 1F1@1", "untrained", "1F1@1", "version 0 for microbatch 1 on"),
    ("version of the future", FLUSH, 2, "0U1<0 ->; 0F3@1 0S3>1 -> 0F3@1 0S3>1 0U1<0", "flushed", "0F2@1", "a version"),
    ("training in an inference", NOTHING, 1, "1F1@0 -> 1F1@0 1B1@0", "inference", "1B1@0", "no backward and no update"),
    ("update that skips a version", STASH, 3, "0U2<0 -> 0U3<0", "update", "0U3<0", "version 2, the next of stage 0"),
    ("update too early", FLUSH, 1, "1B1@0 1S1>0 1U1<0 -> 1U1<0 1B1@0 1S1>0", "update", "1U1<0", "2 backwards of stage"),
    ("update from gradients of another version", STASH, 3, "0U3<1 -> 0U3<0", "update", "0U3<0", "gradients at version"),
    ("update missing", STASH, 3, "1U3<2 ->", "update", "end", "an update of stage 1 after its last backward"),
    ("slot overwritten", promising(STASH, versions=(1, 1)), 3, "", "kept", "0B1@0", "version 1 or newer: 0 gave its"),
    ("in flight", FLUSH, 1, "1B0@0 1S0>0 1R1<0 1F1@0 -> 1R1<0 1F1@0 1B0@0 1S0>0", "in flight", "1F1@0", "a backward"),
    ("pending updates", LATE, 3, "", "pending", "0B2@0", "the update of stage 0 to version 1 first"),
    ("message over a stage", Schedule("1f1b-flush", 3, 2), 1, "0S0>1 -> 0S0>2", "neighbors", "0S0>2", "a neighbor of"),
    ("message to oneself", ALONE, 1, "1F0@0 -> 1R0<0 1F0@0", "neighbors", "1R0<0", "a neighbor of stage 1 on another"),
    ("message never received", FLUSH, 1, "1R1<0 ->", "received", "0S1>1", "1R1<0 on rank 1"),
    ("message never sent", FLUSH, 1, "0S1>1 ->", "received", "1R1<0", "0S1>1 on rank 0"),
    ("message sent twice", FLUSH, 1, "0S1>1 -> 0S1>1 0S1>1", "received", "0S1>1", "a new message"),
    ("data before the receive", FLUSH, 1, "1R1<0 1F1@0 -> 1F1@0 1R1<0", "data", "1F1@0", "the receive of the"),
    ("data of a gradient", FLUSH, 1, "0R1<1 0B1@0 -> 0B1@0 0R1<1", "data", "0B1@0", "the receive of the gradient of"),
    ("data of one's own forward", FLUSH, 1, "1F0@0 1B0@0 -> 1B0@0 1F0@0", "data", "1B0@0", "the forward of microbatch"),
    ("data of a neighbour on the same rank", ALONE, 1, "0F0@0 1F0@0 -> 1F0@0 0F0@0", "data", "1F0@0", "the forward of"),
    ("sent before it is made", FLUSH, 1, "0F1@0 0S1>1 -> 0S1>1 0F1@0", "data", "0S1>1", "the forward of microbatch 1"),
    (
        "fifo",
        FLUSH,
        1,
        "1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 -> 1R1<0 1R0<0 1F0@0 1B0@0 1S0>0",
        "order",
        "1R1<0",
        "1R0<0, since",
    ),
    ("weight part twice", H1, 1, "1W0@0 -> 1W0@0 1W0@0", "once", "1W0@0", "a microbatch that is not done yet"),
    ("whole backward after an input part", H1, 1, "1W0@0 -> 1B0@0", "once", "1B0@0", "a microbatch that is not done"),
    ("weight part missing", H1, 1, "1W1@0 ->", "drained", "1F1@0", "the weight backward of microbatch 1 on stage 1"),
    ("input part missing", H1, 1, "1I1@0 ->", "drained", "1F1@0", "the input backward of microbatch 1 on stage 1"),
    ("weight part first", H1, 1, "1I1@0 1S1>0 1W0@0 1W1@0 -> 1W0@0 1W1@0 1I1@0 1S1>0", "data", "1W1@0", "the input"),
    ("gradient early", H1, 1, "1I1@0 1S1>0 -> 1S1>0 1I1@0", "data", "1S1>0", "the backward of microbatch 1 on stage 1"),
    ("order of weight parts", H1, 1, "1W0@0 1W1@0 -> 1W1@0 1W0@0", "ascending", "1W1@0", "microbatch 0 first"),
    ("whole backward", H1, 1, "1I1@0 1S1>0 1W0@0 1W1@0 -> 1B1@0 1S1>0 1W0@0", "ascending", "1B1@0", "microbatch 0"),
    ("version of a weight part", H1, 2, "1W3@1 -> 1W3@0", "stashed", "1W3@0", "version 1, which 1F3@1 read"),
    ("update before a weight part", H1, 1, "1W1@0 1U1<0 -> 1U1<0 1W1@0", "update", "1U1<0", "2 backwards of stage 1"),
    ("input early", H1_EARLY, 2, "1U1<0 1R1<0 1F1@1 1I1@1 -> 1R1<0 1F1@1 1I1@1 1U1<0", "flushed", "1F1@1", "a version"),
    ("in flight with parts", FLYING, 1, "", "in flight", "1F1@0", "a backward first: 1 in flight already"),
    ("waiting parts", WAITING, 1, "", "halves", "1I1@0", "a weight backward first: 1 wait already"),
    ("tied before weights", H1_TIED, 1, "1W0@0 1T1>0 -> 1T1>0 1W0@0", "data", "1T1>0", "the backward of microbatch 0"),
    ("offloaded twice", OFFLOADS, 1, "0F1@0 0H1 0D0 -> 0H0 0F1@0 0H1 0D0", "offload", "0H0", "a microbatch for which"),
    ("reloaded twice", OFFLOADS, 1, "0D0 0B0@0 -> 0D0 0D0 0B0@0", "offload", "0D0", "a microbatch for which it was"),
    ("never back", OFFLOADS, 1, "0D1 ->", "offload", "0H1", "a reload of microbatch 1"),
    ("never away", OFFLOADS, 1, "0H1 ->", "offload", "0D1", "an offload of microbatch 1"),
    ("before the forward", OFFLOADS, 1, "0F0@0 0H0 -> 0H0 0F0@0", "offload", "0H0", "its forward before"),
    ("back before it is away", OFFLOADS, 1, "0H0 0F1@0 0H1 0D0 -> 0D0 0F1@0 0H1 0H0", "offload", "0D0", "its offload"),
    ("back too late", OFFLOADS, 1, "0D0 0B0@0 -> 0B0@0 0D0", "offload", "0B0@0", "its reload before"),
    ("of another replica", TURNS, 1, "0F0@0 0H0 -> 0F0@0 0H1", "offload", "0H1", "a forward of microbatch 1"),
    ("recomputed twice", AGAIN, 1, "0C0@0 -> 0C0@0 0C0@0", "recompute", "0C0@0", "a microbatch that it has not"),
    ("recomputed too late", AGAIN, 1, "0C0@0 0R0<1 0B0@0 -> 0R0<1 0B0@0 0C0@0", "recompute", "0C0@0", "its forward"),
    (
        "recomputed too early",
        AGAIN,
        1,
        "0F1@0 0S1>1 0C0@0 0R0<1 0B0@0 0C1@0 -> 0C1@0 0F1@0 0S1>1 0C0@0 0R0<1 0B0@0",
        "recompute",
        "0C1@0",
        "its forward",
    ),
    ("recomputed with another version", AGAIN, 1, "0C1@0 -> 0C1@1", "recompute", "0C1@1", "version 0, which 0F1@0"),
    ("to a stage with another skip", FARTHER, 1, "0S0>3 -> 0S0>2", "neighbors", "0S0>2", "a neighbor of stage 0 on"),
    ("forward from afar", SKIPPING, 1, "2R1<0 2R1<1 2F1@0 -> 2R1<1 2F1@0 2R1<0", "data", "2F1@0", "the receive of the"),
    ("backward from afar", SKIPPING, 1, "0R0<2 0R0<1 0B0@0 -> 0R0<1 0B0@0 0R0<2", "data", "0B0@0", "the receive of"),
    ("lost from afar", SKIPPING, 1, "0R0<2 0R0<1 -> 0R0<1", "received", "2S0>0", "0R0<2 on rank 0"),
    ("from afar", SKIPPING, 1, "0S0>2 0F1@0 0S1>1 0S1>2 -> 0F1@0 0S1>1 0S1>2 0S0>2", "order", "2R0<0", "2R1<0, since"),
    ("stage of another rank offloaded", OFFLOADS, 1, "0H0 -> 1H0", "place", "1H0", "stages [0] on rank 0"),
    ("offload of no microbatch", OFFLOADS, 1, "0H0 -> 0H2", "place", "0H2", "microbatches 0 to 1"),
    ("offload in an inference", ONE, 1, "0F0@0 -> 0F0@0 0H0", "inference", "0H0", "no backward and no update"),
    ("recomputation in an inference", ONE, 1, "0F0@0 -> 0F0@0 0C0@0", "inference", "0C0@0", "no backward and no"),
    ("sum before weights", H1_REPLICAS, 1, "1W1@0 1A1 -> 1A1 1W1@0", "data", "1U1<0", "the all-reduce of all"),
    ("tied gradients after the update", TIED, 1, "0T1<2 0U1<0 -> 0U1<0 0T1<2", "data", "0U1<0", "the gradients of"),
    ("tied gradients before the backward", TIED, 1, "0B0@0 0T1>2 -> 0T1>2 0B0@0", "data", "0T1>2", "the backward of"),
    ("tied too late", TIED, 1, "0T1>2 0T1<2 0U1<0 -> 0T1<2 0U1<0 0T1>2", "data", "0T1>2", "it before the update of"),
    ("tied gradients not sent", TIED, 1, "2T1>0 2T1<0 -> 2T1<0", "received", "0T1<2", "2T1>0 on rank 2"),
    ("tied to none", TIED, 1, "1U1<0 -> 1T1>2 1U1<0", "neighbors", "1T1>2", "a stage on another rank that shares"),
    ("tied awaited", TIED, 1, "0T1>2 0T1<2 -> 0T1<2 0T1>2; 2T1>0 2T1<0 -> 2T1<0 2T1>0", "waits", "0T1<2", "rank 0"),
    ("norm received late", NORMS, 3, "2N1<1 2U1<0 2R6<1 -> 2R6<1 2N1<1 2U1<0", "order", "2R6<1", "2N1<1, since 1N1>2"),
    ("norm too early", NORMS, 3, "1S8>0 1N3<2 1N3>0 -> 1S8>0 1N3>0 1N3<2", "data", "1N3>0", "the norm for version 3"),
    ("norm received early", NORMS, 3, "0R2<1 0B2@0 0N1<1 -> 0N1<1 0R2<1 0B2@0", "order", "0N1<1", "0R2<1, since 1S2>0"),
    ("norm after the update", NORMS, 3, "2N3<1 2U2<0 2U3<1 -> 2U2<0 2U3<1 2N3<1", "data", "2U3<1", "the norm for"),
    ("norm of a schedule without", THREE, 3, "0B2@0 0U3<0 -> 0B2@0 0N3>1 0U3<0", "neighbors", "0N3>1", "a neighbor of"),
    ("stands still", SKIPPING, 1, "0S1>2 0R0<2 0R0<1 0B0@0 -> 0R0<2 0R0<1 0B0@0 0S1>2", "waits", "0R0<2", "rank 0"),
    ("sum left out", REPLICAS, 1, "0B0@0 0A1 0U1<0 -> 0B0@0 0U1<0", "data", "0U1<0", "the all-reduce of all gradients"),
    ("sum before the backward", REPLICAS, 1, "0B0@0 0A1 0U1<0 -> 0A1 0B0@0 0U1<0", "data", "0U1<0", "the all-reduce"),
    ("sum without replicas", REPLICAS, 1, "1S1>0 1U1<0 -> 1S1>0 1A1 1U1<0", "neighbors", "1A1", "none: stage"),
    ("microbatch of the other replica", REPLICAS, 1, "0F0@0 0S0>1 -> 0F1@0 0S0>1", "once", "0F1@0", "it on rank 1"),
    (
        "an update that others reach behind the next sum",
        SHARING,
        2,
        "0N1<1 0F7@0 -> 0N1<1 0N1>1 0U1<0 0F7@0; 0B7@0 0A2 0N2<1 0N1>1 0N2>1 0U1<0 -> 0B7@0 0A2 0N2<1 0N2>1",
        "waits",
        "0A2",
        "rank 0 waits for rank 1 to reduce, rank 1 waits for rank 0 to update",
    ),
    ("sum for a version", REPLICAS, 1, "0A1 0U1<0\nrank 2: -> 0A2 0U1<0\nrank 2:", "data", "0U1<0", "the all-reduce"),
    ("version of a replica", REPLICAS, 1, "0U1<0\nrank 2: -> 0U1<1\nrank 2:", "update", "0U1<1", "gradients at"),
]


@pytest.mark.parametrize(("_", "schedule", "minibatches", "changes", "law", "action", "expected"), BREACHES)
def test_each_law_broken(
    _: str, schedule: Schedule, minibatches: int, changes: str, law: str, action: str, expected: str
) -> None:
    programs = change(schedule, minibatches, changes)
    first, row, *more = complaint(lambda: verify_programs(programs, schedule, minibatches))

    assert first == f"schedule {schedule.name!r} violates an invariant: {LAWS[law]}"
    assert row.startswith("  rank ") and f">>{action}<<" in row
    assert expected in more[-2] and more[-1].startswith("  fix: ")


def test_a_skip_that_the_schedule_does_not_have() -> None:
    bare = replace(SKIPPING, skips=())

    with pytest.raises(ScheduleError, match=r"(?s)messages pass only between neighbors.*>>0S0>2<<"):
        verify_programs(SKIPPING.program(1), bare, 1)
