"""The picture of the present step, and the pages around it."""

import json

from penstock.doctor.diagnosis import diagnose
from penstock.doctor.reports import report_document, report_page, report_text
from penstock.doctor.step_pictures import draw_step
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule
from support.run_records import evidence_of, record_of

FLUSH = Schedule("1f1b-flush", ranks=3, microbatches=4)


def at(schedule: Schedule, rank: int, action: str) -> int:
    return [str(one) for one in schedule.row(rank, Step(2))].index(action)


EVIDENCE = evidence_of(
    FLUSH,
    [
        record_of(FLUSH, 0, at(FLUSH, 0, "0R8<1")),
        record_of(FLUSH, 1, at(FLUSH, 1, "1F8@2")),
        record_of(FLUSH, 2, at(FLUSH, 2, "2R8<1")),
    ],
)


def test_done_running_and_blocked_actions_differ() -> None:
    assert draw_step(EVIDENCE) == [
        "rank 0  F8   F9   F10           ?b8   f11  b9        b10       b11  u",
        "rank 1      >F8   f9        b8   f10  b9   f11  b10       b11  u",
        "rank 2           ?f8   b8   f9   b9   f10  b10  f11  b11  u",
    ]


def test_a_rank_without_a_program_is_left_out() -> None:
    records = [record_of(FLUSH, 0, 0), record_of(FLUSH, 1, 0, steps=0)]

    assert len(draw_step(evidence_of(FLUSH, records))) == 1


def test_a_step_of_an_asynchronous_schedule_begins_with_gradients_of_the_one_before() -> None:
    schedule = Schedule("pipedream", ranks=2, microbatches=2)
    records = [record_of(schedule, rank, 0) for rank in range(2)]
    lines = draw_step(evidence_of(schedule, records))

    assert all(line.lower().count("f") == 2 and line.lower().count("b") == 2 for line in lines)


def test_a_long_step_is_cut_around_the_present_action() -> None:
    schedule = Schedule("1f1b-flush", ranks=2, microbatches=200)
    middle = at(schedule, 0, "0F500@2")
    lines = draw_step(evidence_of(schedule, [record_of(schedule, 0, middle), record_of(schedule, 1, middle)]))

    assert all(len(line) < 120 and line.count("...") == 2 for line in lines)
    assert ">F500" in lines[0]


def test_the_text_has_the_verdict_the_ranks_and_the_stack() -> None:
    text = report_text(EVIDENCE, diagnose(EVIDENCE))

    assert "SLOW: rank 1 is slow: forward 8 of stage 1 (1F8@2) has lasted 30 s" in text
    assert "Blocked edge 1->0: rank 0 waits for 30 s for rank 1: receive 8 from stage 1 (0R8<1)." in text
    assert "1     101      host  computing  30 s  3      1 GB    1F8@2: forward 8 of stage 1" in text
    assert ">F8" in text
    assert "  /home/ada/train.py:31 in forward: x = self.slow(x)" in text


def test_names_cannot_steer_the_terminal_or_the_page() -> None:
    evil = "\x1b[2Jbad\r<script>"
    found = evidence_of(FLUSH, [record_of(FLUSH, 0, 0, failure=f"ValueError in a step: {evil}")])
    text, page = report_text(found, diagnose(found)), report_page(found, diagnose(found))

    assert "?[2Jbad?<script>" in text
    assert "\x1b" not in text + page
    assert "\r" not in text + page
    assert "<script>" not in page


def test_the_page_has_the_picture_and_all_stacks_and_the_document_is_json() -> None:
    found = diagnose(EVIDENCE)
    page, document = report_page(EVIDENCE, found), report_document(EVIDENCE, found)

    assert page.count("<svg") == 1
    assert page.count("<details>") == 3
    assert json.loads(json.dumps(document))["verdict"] == "slow"
    assert document["edge"] == {"source": 1, "target": 0, "action": "0R8<1", "seconds": 30.0}
