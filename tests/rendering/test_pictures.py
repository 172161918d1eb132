"""The pictures, held letter by letter, and a law: what the picture of a schedule shows is its program, no less."""

import re

import pytest
from hypothesis import given, settings

from penstock.errors import ScheduleError
from penstock.rendering import render
from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Forward, Update
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from support.schedule_strategies import schedules

PICTURES = {
    "gpipe": (
        Schedule("gpipe", 4, 4),
        """\
gpipe: 4 ranks, 4 microbatches a minibatch; 1 minibatch drawn
bubble: 42.9% of wall time
microbatches in flight, rank by rank: 4 4 4 4
weight versions, rank by rank: 1 1 1 1

rank 0  0  1  2  3  .  .  .  .  .  . [0][1][2][3]U
rank 1  .  0  1  2  3  .  .  .  . [0][1][2][3]U.
rank 2  .  .  0  1  2  3  .  . [0][1][2][3]U.  .
rank 3  .  .  .  0  1  2  3 [0][1][2][3]U.  .  .

 3  forward of microbatch 3   [3]  its backward   U  update   .  idle   (forward and backward drawn equally long)""",
    ),
    "a flush": (
        Schedule("1f1b-flush", 4, 8),
        """\
1f1b-flush: 4 ranks, 8 microbatches a minibatch; 1 minibatch drawn
bubble: 27.3% of wall time
microbatches in flight, rank by rank: 4 3 2 1
weight versions, rank by rank: 1 1 1 1

rank 0  0  1  2  3  .  .  . [0] 4 [1] 5 [2] 6 [3] 7 [4] . [5] . [6] . [7]U
rank 1  .  0  1  2  .  . [0] 3 [1] 4 [2] 5 [3] 6 [4] 7 [5] . [6] . [7]U.
rank 2  .  .  0  1  . [0] 2 [1] 3 [2] 4 [3] 5 [4] 6 [5] 7 [6] . [7]U.  .
rank 3  .  .  .  0 [0] 1 [1] 2 [2] 3 [3] 4 [4] 5 [5] 6 [6] 7 [7]U.  .  .

 7  forward of microbatch 7   [7]  its backward   U  update   .  idle   (forward and backward drawn equally long)""",
    ),
    "interleaved": (
        Schedule("interleaved", 4, 8, 2),
        """\
interleaved: 4 ranks, 2 stages per rank, 8 microbatches a minibatch; 1 minibatch drawn
bubble: 15.8% of wall time
microbatches in flight over its stages, rank by rank: 11 9 7 5
weight versions, rank by rank: 1 1 1 1

rank 0 stage 0  0  1  2  3              4  5  6     7     .  .
       stage 4              0  1  2  3          [0]   [1] .  .  4 [2] 5
rank 1 stage 1  .  0  1  2  3              4     5     6     7       [0]
       stage 5  .              0  1  2  3    [0]   [1]   [2]   [3] 4
rank 2 stage 2  .  .  0  1  2  3                    4     5     6 [0] 7
       stage 6  .  .              0  1  2 [0] 3 [1]   [2]   [3]
rank 3 stage 3  .  .  .  0  1  2  3                          4 [0] 5 [1]
       stage 7  .  .  .              0 [0] 1 [1] 2 [2] 3 [3]

rank 0 stage 0       [0]   [1][2][3] .     .     .     .    [4][5][6][7]U
       stage 4 [3] 6     7           . [4] . [5] . [6] . [7]            U
rank 1 stage 1    [1]   [2]   [3] .     .     .     .    [4][5][6][7]U.
       stage 5  5     6     7     . [4] . [5] . [6] . [7]            U.
rank 2 stage 2 [1]   [2]   [3]             .     .    [4][5][6][7]U.  .
       stage 6     4     5     6 [4] 7 [5] . [6] . [7]            U.  .
rank 3 stage 3  6 [2] 7 [3]                        [4][5][6][7]U.  .  .
       stage 7              4 [4] 5 [5] 6 [6] 7 [7]            U.  .  .

 7  forward of microbatch 7   [7]  its backward   U  update   .  idle   (forward and backward drawn equally long)""",
    ),
    "weight stashing": (
        Schedule("pipedream", 4, 1),
        """\
pipedream: 4 ranks, 1 microbatch a minibatch; 8 minibatches drawn
bubble: 0.0% of wall time while the pipe is full; 27.3% of this picture, with fill and drain
microbatches in flight, rank by rank: 4 3 2 1
weight versions, rank by rank: 4 3 2 1

rank 0  0    1    2    3    .    .    .   [0  ]U4   [1@0]U5   [2@0]U6   [3@0]U7   [4@1]U.   [5@2]U.   [6@3]U.   [7@4]U
rank 1  .    0    1    2    .    .   [0  ]U3   [1@0]U4   [2@0]U5   [3@1]U6   [4@2]U7   [5@3]U.   [6@4]U.   [7@5]U.
rank 2  .    .    0    1    .   [0  ]U2   [1@0]U3   [2@1]U4   [3@2]U5   [4@3]U6   [5@4]U7   [6@5]U.   [7@6]U.    .
rank 3  .    .    .    0   [0  ]U1   [1  ]U2   [2  ]U3   [3  ]U4   [4  ]U5   [5  ]U6   [6  ]U7   [7  ]U.    .    .

 7  forward of microbatch 7   [7]  its backward   U  update   .  idle   (forward and backward drawn equally long)
 1@0  with weights of version 0, not its stage's newest; without @, with the newest""",
    ),
    "weight stashing with vertical sync": (
        Schedule("pipedream", 4, 8, vertical_sync=True),
        """\
pipedream: 4 ranks, 8 microbatches a minibatch, vertical sync; 1 minibatch drawn
bubble: 0.0% of wall time while the pipe is full; 27.3% of this picture, with fill and drain
microbatches in flight, rank by rank: 4 3 2 1
weight versions, rank by rank: 4 4 4 4

rank 0  0    1    2    3    .    .    .   [0  ]U4   [1@0]U5   [2@0]U6   [3@0]U7   [4@1]U.   [5@2]U.   [6@3]U.   [7@4]U
rank 1  .    0    1    2    .    .   [0  ]U3@0 [1@0]U4@1 [2@0]U5@2 [3@0]U6@3 [4@1]U7@4 [5@2]U.   [6@3]U.   [7@4]U.
rank 2  .    .    0    1    .   [0  ]U2@0 [1@0]U3@0 [2@0]U4@1 [3@0]U5@2 [4@1]U6@3 [5@2]U7@4 [6@3]U.   [7@4]U.    .
rank 3  .    .    .    0   [0  ]U1@0 [1@0]U2@0 [2@0]U3@0 [3@0]U4@1 [4@1]U5@2 [5@2]U6@3 [6@3]U7@4 [7@4]U.    .    .

 7  forward of microbatch 7   [7]  its backward   U  update   .  idle   (forward and backward drawn equally long)
 1@0  with weights of version 0, not its stage's newest; without @, with the newest""",
    ),
    "2bw": (
        Schedule("2bw", 4, 8),
        """\
2bw: 4 ranks, 8 microbatches a minibatch; 2 minibatches drawn
bubble: 0.0% of wall time while the pipe is full; 15.8% of this picture, with fill and drain
microbatches in flight, rank by rank: 4 3 2 1
weight versions, rank by rank: 2 2 2 2

rank 0  0     1     2     3     .     .     .    [0   ] 4    [1   ] 5    [2   ] 6
rank 1  .     0     1     2     .     .    [0   ] 3    [1   ] 4    [2   ] 5    [3   ]
rank 2  .     .     0     1     .    [0   ] 2    [1   ] 3    [2   ] 4    [3   ] 5
rank 3  .     .     .     0    [0   ] 1    [1   ] 2    [2   ] 3    [3   ] 4    [4   ]

rank 0 [3   ] 7    [4   ] 8    [5   ] 9    [6   ] 10   [7   ]U11@0 [8@0 ] 12@0 [9@0 ]
rank 1  6    [4   ] 7    [5   ] 8    [6   ] 9    [7   ]U10@0 [8@0 ] 11@0 [9@0 ] 12@0
rank 2 [4   ] 6    [5   ] 7    [6   ] 8    [7   ]U9@0  [8@0 ] 10@0 [9@0 ] 11@0 [10@0]
rank 3  5    [5   ] 6    [6   ] 7    [7   ]U8@0  [8@0 ] 9@0  [9@0 ] 10@0 [10@0] 11@0

rank 0  13@0 [10@0] 14@0 [11@0] 15@0 [12@0] .    [13@0] .    [14@0] .    [15@0]U
rank 1 [10@0] 13@0 [11@0] 14@0 [12@0] 15@0 [13@0] .    [14@0] .    [15@0]U.
rank 2  12@0 [11@0] 13@0 [12@0] 14@0 [13@0] 15@0 [14@0] .    [15@0]U.     .
rank 3 [11@0] 12@0 [12@0] 13@0 [13@0] 14@0 [14@0] 15@0 [15@0]U.     .     .

 15  forward of microbatch 15   [15]  its backward   U  update   .  idle   (forward and backward drawn equally long)
 11@0  with weights of version 0, not its stage's newest; without @, with the newest""",
    ),
    "one rank": (
        Schedule("pipedream", 1, 2),
        """\
pipedream: 1 rank, 2 microbatches a minibatch; 1 minibatch drawn
bubble: 0.0% of wall time while the pipe is full; 0.0% of this picture, with fill and drain
microbatches in flight, rank by rank: 1
weight versions, rank by rank: 1

rank 0  0 [0]U1 [1]U

 1  forward of microbatch 1   [1]  its backward   U  update   (forward and backward drawn equally long)""",
    ),
    "inference": (
        inference(4, 1, 4),
        """\
inference: 4 ranks, 4 microbatches a minibatch; 1 minibatch drawn
bubble: 42.9% of wall time

rank 0  0  1  2  3  .  .  .
rank 1  .  0  1  2  3  .  .
rank 2  .  .  0  1  2  3  .
rank 3  .  .  .  0  1  2  3

 3  forward of microbatch 3   .  idle   (forward and backward drawn equally long)""",
    ),
    "two minibatches": (
        Schedule("1f1b-flush", 4, 4),
        """\
1f1b-flush: 4 ranks, 4 microbatches a minibatch; 2 minibatches drawn
bubble: 42.9% of wall time
microbatches in flight, rank by rank: 4 3 2 1
weight versions, rank by rank: 1 1 1 1

rank 0  0  1  2  3  .  .  . [0] . [1] . [2] . [3]U4  5  6  7  .  .  . [4] . [5] . [6] . [7]U
rank 1  .  0  1  2  .  . [0] 3 [1] . [2] . [3]U.  .  4  5  6  .  . [4] 7 [5] . [6] . [7]U.
rank 2  .  .  0  1  . [0] 2 [1] 3 [2] . [3]U.  .  .  .  4  5  . [4] 6 [5] 7 [6] . [7]U.  .
rank 3  .  .  .  0 [0] 1 [1] 2 [2] 3 [3]U.  .  .  .  .  .  4 [4] 5 [5] 6 [6] 7 [7]U.  .  .

 7  forward of microbatch 7   [7]  its backward   U  update   .  idle   (forward and backward drawn equally long)""",
    ),
    "replicas, with the stage of every rank": (
        Schedule.placed("1f1b-flush", Placement(((0, 1), (2,))), 4),
        """\
1f1b-flush: 3 ranks, replicas 2-1, 4 microbatches a minibatch; 1 minibatch drawn
bubble: 46.7% of wall time
microbatches in flight, rank by rank: 2 2 1
weight versions, rank by rank: 1 1 1

rank 0 stage 0  0  2  . [0] .  .  . [2]++++++U
rank 1 stage 0  1  3  .  .  . [1] .  .  . [3]U
rank 2 stage 1  .  0 [0] 1 [1] 2 [2] 3 [3]U.

 3  forward of microbatch 3   [3]  its backward   U  update   +  sum of gradients   .  idle
 (forward and backward drawn equally long)""",
    ),
    "zb h1": (
        Schedule("zb-h1", 3, 4),
        """\
zb-h1: 3 ranks, 4 microbatches a minibatch; 1 minibatch drawn
bubble: 14.3% of wall time
microbatches in flight, rank by rank: 3 3 3
weight versions, rank by rank: 1 1 1

rank 0  0  1  2  .  . [0   ] 3 [1   ][2   ][3   ]U
rank 1  .  0  1  . [0] 2 [1]{0} 3 [2]{1}[3]{2}{3}U
rank 2  .  .  0 [0] 1 [1] 2 [2]{0} 3 [3]{1}{2}{3}U

 3  forward of microbatch 3   [3]  its backward or input backward   {3}  its weight backward   U  update   .  idle
 (forward, input backward and weight backward drawn equally long)""",
    ),
    "zb v": (
        Schedule("zb-v", 2, 3, 2),
        """\
zb-v: 2 ranks, 2 stages per rank, 3 microbatches a minibatch; 1 minibatch drawn
bubble: 5.3% of wall time
microbatches in flight over its stages, rank by rank: 4 4
weight versions, rank by rank: 1 1

rank 0 stage 0  0  1  2                   [0   ]         [1   ][2   ]U.
       stage 3           0 [0]{0} 1 [1]{1}       2 [2]{2}            U.
rank 1 stage 1  .  0     1           2 [0]{0}         [1]   [2]{1}   {2}U
       stage 2  .     0     1 [0   ]          2 [1   ]   [2]      {2}   U

 2  forward of microbatch 2   [2]  its backward or input backward   {2}  its weight backward   U  update   .  idle
 (forward, input backward and weight backward drawn equally long)""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_a_schedule(name: str) -> None:
    schedule, picture = PICTURES[name]

    assert render(schedule, minibatches=2 if name == "two minibatches" else None) == picture


def test_picture_of_a_timeline_is_drawn_to_scale() -> None:
    spans = (
        *(Span(0, f"0F{k}@0", 2.0 * k, 2.0 * k + 2) for k in range(2)),
        Span(0, "0S0>1", 2, 3),
        Span(0, "0S1>1", 4, 5),
        Span(0, "0R0<1", 4, 11),
        *(Span(0, f"0B{k}@0", 11.0 + 5 * k, 15.0 + 5 * k) for k in range(2)),
        Span(0, "0U1<0", 20, 21),
        *(Span(1, f"1F{k}@0", 3.0 + 7 * k, 5.0 + 7 * k) for k in range(2)),
        *(Span(1, f"1B{k}@0", 5.0 + 7 * k, 10.0 + 7 * k) for k in range(2)),
        Span(1, "1U1<0", 17, 17),
    )

    assert (
        render(Timeline(spans, 2))
        == """\
timeline: 2 ranks, 21 s
bubble: 35.7% of wall time
busy, rank by rank: 62% 67%

rank 0  0  1  .  .  .  [0   ]. [1   ]UU
rank 1  .   0  [0    ] 1 [1     ]U .  .

 1  forward of microbatch 1   [1]  its backward   U  update   .  idle   (one column is 667 ms)"""
    )


def test_what_is_too_short_for_its_number_is_hatched() -> None:
    spans = [Span(0, f"0F{k}@0", 4.0 * k, 4.0 * k + 4) for k in range(3)]
    tiny = [Span(0, "0F3@0", 12, 12.5), Span(0, "0B0@0", 12.5, 14), Span(0, "0B1@0", 14, 18)]
    picture = render(Timeline((*spans, *tiny), 1)).splitlines()

    assert picture[4] == "rank 0  0     1     2    -==[1   ]"
    assert picture[6].endswith("- =  too short for a number   (one column is 667 ms)")


def test_update_between_two_backwards_is_seen() -> None:
    spans = (Span(0, "0F0@0", 0, 1), Span(0, "0B0@0", 1, 2), Span(0, "0U1<0", 2, 2), Span(0, "0B1@0", 2, 3))

    assert render(Timeline(spans, 1)).splitlines()[4] == "rank 0  0   [0  U[1@0]"


def test_measurement_that_begins_in_the_middle_of_a_run_takes_its_first_version_as_the_newest() -> None:
    spans = (Span(0, "0F7@3", 5, 6), Span(0, "0B7@3", 6, 7), Span(0, "0U4<3", 7, 7), Span(0, "0F8@3", 7, 8))

    assert render(Timeline(spans, 1)).splitlines()[4] == "rank 0  7   [7  ]U8@3"


def test_timeline_without_time() -> None:
    assert render(Timeline((), 2)) == "timeline: 2 ranks, 0\nbubble: 0.0% of wall time\nnothing in it takes any time"


def test_rank_that_does_nothing_has_a_row() -> None:
    lines = render(Timeline((Span(1, "1F0@0", 0, 1),), 2)).splitlines()

    assert lines[4:6] == ["rank 0  .", "rank 1  0"]


def test_long_pictures_are_cut_short() -> None:
    picture = render(Schedule("1f1b-flush", 4, 8), minibatches=100, width=80)

    assert picture.count("\nrank 0 ") == 4
    assert "\n\n... cut short: the first 3.3% is drawn\n\n" in picture


def test_a_pause_a_billion_times_as_long_as_a_forward_takes_no_memory() -> None:
    spans = (Span(0, "0F0@0", 0, 1e-6), Span(0, "0F1@0", 1e3, 1e3 + 1e-6))

    assert "cut short" in render(Timeline(spans, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 39}, "render(width=): expected a whole number, 40 or more, found 39: give a larger width"),
        ({"minibatches": 0}, "minibatches: expected a whole number, 1 or more, found 0: give how many"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        render(Schedule("gpipe", 2, 2), **options)

    assert str(caught.value) == message


def read_back(picture: str) -> dict[int, list[str]]:
    """The computations of every stage in the order in which a picture shows them, as texts of actions."""
    rows: dict[int, str] = {}
    rank = 0
    for line in picture.splitlines():
        row = re.match(r"(?:rank (\d+)| {6,7}) (?:stage (\d+) +)?", line)
        if row is not None and (row[1] or row[2]):
            rank = int(row[1] or rank)
            stage = int(row[2] or rank)
            rows[stage] = rows.get(stage, "") + line[row.end() :].replace(".", " ") + " "
    shown: dict[int, list[str]] = {}
    for stage, text in rows.items():
        newest, actions = 0, []
        for bracket, number, version in re.findall(r"([\[{]?)(\d+|U)(?:@(\d+))?", text):
            if number == "U":
                newest += 1
                actions.append(f"U{newest}")
            else:
                kind = {"": "F", "[": "B", "{": "W"}[bracket]
                actions.append(f"{kind}{number}@{version or newest}")
        shown[stage] = actions
    return shown


@settings(max_examples=40, deadline=None)
@given(schedules(most_ranks=4, most_microbatches=6))
def test_picture_of_a_schedule_shows_its_program(schedule: Schedule) -> None:
    program: dict[int, list[str]] = {stage: [] for stage in range(schedule.stages)}
    for action in (action for row in schedule.program(2) for action in row):
        if isinstance(action, Update):
            program[action.stage].append(f"U{action.version}")
        elif isinstance(action, Forward | Backward | BackwardInput | BackwardWeight):
            kind = {Forward: "F", BackwardWeight: "W"}.get(type(action), "B")
            program[action.stage].append(f"{kind}{action.microbatch}@{action.version}")
    picture = render(schedule, minibatches=2, width=240)

    assert max(map(len, picture.splitlines())) <= 240
    assert "cut short" not in picture
    assert read_back(picture) == program


def test_replicas_have_versions_of_their_own() -> None:
    """An update of one replica does not make the weights of the other old."""
    spans = (
        *(Span(rank, "0F0@0", rank, rank + 1.0) for rank in range(2)),
        Span(0, "0U1<0", 1, 1),
        Span(0, "0B0@0", 3, 4),
        Span(1, "0B0@0", 3, 4),
    )
    lines = render(Timeline(spans, 2)).splitlines()

    assert [line.split() for line in lines[4:6]] == [
        ["rank", "0", "stage", "0", "0", "U", ".", ".", ".", "[0@0]"],
        ["rank", "1", "stage", "0", ".", ".", "0", ".", ".", "[0", "]"],
    ]


def test_sum_of_gradients_is_drawn_where_it_takes_time() -> None:
    spans = (Span(0, "0F0@0", 0, 1), Span(0, "0B0@0", 1, 2), Span(0, "0A1", 2, 4), Span(0, "0U1<0", 4, 4))
    lines = render(Timeline(spans, 1)).splitlines()

    assert lines[4] == "rank 0  0 [0]++++++U"
    assert "+  sum of gradients" in lines[6]


def test_sum_of_gradients_lies_below_a_computation() -> None:
    spans = (Span(0, "0F0@0", 0, 1), Span(0, "0A1", 1, 3), Span(0, "0B0@0", 1, 2))

    assert render(Timeline(spans, 1)).splitlines()[4] == "rank 0  0 [0]+++"


def test_a_thousand_ranks_are_not_all_drawn() -> None:
    spans = tuple(Span(rank, f"{rank}F0@0", rank, rank + 1.0) for rank in range(1000))
    lines = render(Timeline(spans, 1000)).splitlines()

    assert lines[2] == "busy, rank by rank: 0% each"
    assert sum(line.startswith("rank ") for line in lines) in (64, 128, 192, 256)
    assert "... ranks 64 to 999 are not drawn" in lines


def test_the_weights_of_streamed_stages_have_a_row() -> None:
    every = frozenset(range(2))
    made = Schedule("breadth-first", 1, 1, 2, recomputed=every, streamed=every, places=1)

    assert [line.rstrip() for line in render(made).splitlines()[5:]] == [
        "rank 0 stage 0  0       [0][0]U",
        "       stage 1     0 [0]      U",
        "       host    ^s0^s1   ^s0   v",
        "",
        " 0  forward of microbatch 0   [0]  its backward   ^s0  fetch of stage 0   vs0  release of stage 0   U  update",
        " (forward and backward drawn equally long)",
    ]
