"""The arithmetic of the benchmarks: what is ideal, what is compared with what, and where a step's time goes."""

from dataclasses import asdict
from itertools import pairwise

import pytest

from contenders.contenders import DDP, GLOO, ONE_PROCESS, ONE_STAGE, PEERS, Absent, Entry
from contenders.jobs import JOBS, Linears, Setting, even_cuts
from contenders.lineup import entries_of
from contenders.torch_contenders import METHODS as TORCH_METHODS
from contenders.torch_contenders import rank_of, sent_bytes
from measurement.comparisons import Row, rows_of, table
from measurement.ideals import fastest, flush_lengthening, ideal_seconds, lengthening, overhead, speedup
from measurement.rounds import Rounds, Times
from measurement.step_breakdown import Parts, parts_of
from penstock.scheduling import METHODS, Schedule
from penstock.timelines.timelines import Span


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 8), (3, 4), (4, 16)])
def test_the_simulator_gives_the_bubbles_of_the_papers(ranks: int, microbatches: int) -> None:
    for method in ("gpipe", "1f1b-flush"):
        expected = flush_lengthening(ranks, microbatches, 1)
        assert lengthening(Schedule(method, ranks, microbatches)) == pytest.approx(expected)
    interleaved = Schedule("interleaved", ranks, ranks * 4, 2)
    assert lengthening(interleaved) == pytest.approx(flush_lengthening(ranks, ranks * 4, 2))
    assert lengthening(Schedule("pipedream", ranks, microbatches)) == 1.0


def test_an_ideal_step_is_a_share_of_the_single_one() -> None:
    single, slowdowns = [8.0, 16.0, 8.0], [1.0, 1.25, 1.5]

    assert ideal_seconds(single, slowdowns, 2) == [4.0, 10.0, 6.0]
    # The bubble of an eighth is not slowed down.
    assert ideal_seconds(single, slowdowns, 2, 1.125) == [4.5, 11.0, 6.5]
    assert speedup([4.0, 10.0, 6.0], [8.0, 10.0, 8.0]) == 0.75
    assert overhead([4.0, 10.0, 6.0], [8.0, 10.0, 8.0], 16) == 2.0 / 16
    assert fastest({"slow": [3.0, 1.0, 3.0], "fast": [2.0, 2.0, 9.0]}) == "fast"
    assert fastest({}) is None


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("size", JOBS)
def test_stages_cut_a_job_evenly(size: str, processes: int) -> None:
    job = JOBS[size]
    layers = len(job.layers(job.build()))
    for stages in (processes, 2 * processes):
        if size in ("tiny", "nano") and stages == 8:
            with pytest.raises(ValueError, match="4 layers cannot be cut into 8 stages"):
                job.cuts(stages)
            continue
        cuts = job.cuts(stages)
        assert (cuts[0], cuts[-1], len(cuts)) == (0, layers, stages + 1)
        inner = [stop - start for start, stop in pairwise(cuts[1:-1])]
        assert len(set(inner)) <= 1
    assert even_cuts(7, 3) == [0, 3, 5, 7]


def test_every_schedule_of_both_libraries_takes_part() -> None:
    entries = entries_of(Setting(JOBS["big"], 2, 8))
    names = [entry.name for entry in entries]

    assert [entry for entry in entries if isinstance(entry, Absent)] == []
    ours = [f"penstock {method.name}{end}" for method in METHODS for end in ("", GLOO)]
    assert names == [ONE_PROCESS, ONE_STAGE, DDP, *TORCH_METHODS, *ours]
    assert set(PEERS.values()) <= set(TORCH_METHODS)
    peers = {entry.name: entry.peer for entry in entries if isinstance(entry, Entry) and entry.peer}
    assert peers["penstock 1f1b-flush"] == peers["penstock 1f1b-flush, gloo"] == "torch 1f1b"


def test_what_does_not_fit_is_left_out_with_its_reason() -> None:
    absent = {one.name: one.reason for one in entries_of(Setting(JOBS["nano"], 3, 4)) if isinstance(one, Absent)}

    assert absent["torch DDP"] == "4 microbatches do not divide by 3 processes"
    assert absent["torch interleaved"] == "4 layers cannot be cut into 6 stages"
    assert absent["torch dualpipev"] == "4 microbatches are fewer than 6 stages"
    assert "penstock interleaved" in absent
    assert "penstock 1f1b-flush" not in absent


def test_messages_are_counted_by_schedule_and_shape() -> None:
    setting = Setting(Linears(32, 4), 2, 8)
    cut = 2 * 32 * 4
    entries = {entry.name: entry for entry in entries_of(setting) if isinstance(entry, Entry)}

    assert entries["penstock 1f1b-flush"].sent_bytes == (8 * cut, 8 * cut) == entries["torch 1f1b"].sent_bytes
    assert entries["penstock 2bw"].sent_bytes == (8 * cut, 8 * cut)
    # Stages 0 to 3 on ranks 0, 1, 0, 1: three cuts, and both ways.
    assert entries["penstock interleaved"].sent_bytes == (24 * cut, 24 * cut) == entries["torch interleaved"].sent_bytes
    # On ranks 0, 1, 1, 0: the cut in the middle costs nothing.
    assert entries["torch zbv"].sent_bytes == (16 * cut, 16 * cut)
    assert [rank_of(stage, True, setting) for stage in range(4)] == [0, 1, 1, 0]
    assert sent_bytes([0, 0], setting) == (0, 0)
    # Two processes swap half of 4 * (32 * 32 + 32) numbers twice.
    assert entries[DDP].sent_bytes == (4 * 4 * 1056, 4 * 4 * 1056)
    assert entries["penstock 1f1b-flush"].actions == 16
    assert entries["penstock interleaved"].actions == 32
    assert entries["torch zbv"].actions == 48


def compared() -> list[Row]:
    """Two rounds, the second twice as slow as the first."""
    seconds = {ONE_PROCESS: 8.0, ONE_STAGE: 8.0, DDP: 5.0, "torch gpipe": 7.0, "torch 1f1b": 6.0}
    seconds |= {"penstock 1f1b-flush": 5.0, "penstock 2bw": 4.0}
    setting = Setting(JOBS["big"], 2, 8)
    entries = [entry for entry in entries_of(setting) if isinstance(entry, Entry) and entry.name in seconds]
    times = {name: Times([one, 2 * one], [2 * one, 4 * one]) for name, one in seconds.items()}
    found = Rounds(times, [1.0, 1.0], dict.fromkeys(seconds, 0.5))
    return rows_of("big", setting, entries, found, {"penstock 2bw": [3_000_000, 2_000_000]})


def test_rows_compare_round_by_round() -> None:
    rows = {row.name: row for row in compared()}

    flush, delayed, plain = rows["penstock 1f1b-flush"], rows["penstock 2bw"], rows[ONE_PROCESS]
    assert (flush.median_seconds, flush.least_seconds, flush.most_seconds) == (7.5, 5.0, 10.0)
    assert flush.processor_seconds == 15.0
    assert (flush.over_peer, flush.over_ddp, flush.over_best_flush) == (1.2, 1.0, 1.2)
    assert (flush.share_of_perfect, flush.share_of_ideal) == (0.8, pytest.approx(0.9))  # type: ignore[comparison-overlap]
    assert flush.overhead_seconds == pytest.approx((0.5 + 1.0) / 2 / 16)
    assert (delayed.over_peer, delayed.over_ddp, delayed.over_best_flush) == (None, 1.25, 1.5)
    assert (delayed.share_of_perfect, delayed.share_of_ideal) == (1.0, 1.0)
    assert (plain.over_plain, plain.share_of_perfect, plain.over_ddp) == (1.0, None, None)
    assert rows["torch 1f1b"].over_best_flush is None
    assert rows["torch gpipe"].over_best_flush == pytest.approx(6 / 7)
    assert (delayed.peak_bytes, flush.peak_bytes) == ([3_000_000, 2_000_000], None)


def test_the_table_says_so() -> None:
    lines = table(compared()).splitlines()

    words = "penstock 2bw 6000.00 4000.00 8000.00 12000.00 100% 100% 0 2.00x 1.25x 1.50x 3 1.05"
    assert " ".join(lines[-1].split()) == words


def spans_of_two_ranks(step: int) -> list[Span]:
    """One microbatch through two stages, in half a second from `step` on."""
    reported = [
        (0, f"0F{step}@{step}", 0.0, 0.1),
        (0, f"0S{step}>1", 0.1, 0.125),
        (0, f"0R{step}<1", 0.125, 0.35),
        (0, f"0B{step}@{step}", 0.375, 0.45),
        (0, f"0U{step + 1}<{step}", 0.45, 0.5),
        (1, f"1R{step}<0", 0.05, 0.15),
        (1, f"1F{step}@{step}", 0.15, 0.25),
        (1, f"1B{step}@{step}", 0.25, 0.3),
        (1, f"1S{step}>0", 0.3, 0.325),
        (1, f"1A{step + 1}", 0.325, 0.4),
        (1, f"1U{step + 1}<{step}", 0.4, 0.5),
    ]
    return [Span(rank, action, step + start, step + stop) for rank, action, start, stop in reported]


def test_a_step_is_divided_into_its_parts() -> None:
    spans = [span for step in range(2) for span in spans_of_two_ranks(step)]
    first, second = parts_of(spans, 0, 2, 1.0), parts_of(spans, 1, 2, 1.0)

    expected = Parts(0.1, 0.075, 0.05, 0.025, neighbour=0.2, message=0.025, other=0.0, between=0.025, around=0.5)
    assert asdict(first) == pytest.approx(asdict(expected))
    expected = Parts(0.1, 0.05, 0.1, 0.025, neighbour=0.075, message=0.025, other=0.075, between=0.0, around=0.55)
    assert asdict(second) == pytest.approx(asdict(expected))
    assert first.total == pytest.approx(1.0)
    assert second.total == pytest.approx(1.0)
    with pytest.raises(ValueError, match="rank 0 has 10 spans, which are not equally many in each of 3 steps"):
        parts_of(spans, 0, 3, 1.0)


def test_a_message_from_before_was_not_waited_for() -> None:
    spans = [span for span in spans_of_two_ranks(0) if span.action != "1S0>0"]

    assert parts_of(spans, 0, 1, 0.5).neighbour == 0.0
