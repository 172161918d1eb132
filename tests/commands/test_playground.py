"""The playground: its page asks the library, and shows what that says."""

import threading
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

import penstock
from penstock.cli import main
from penstock.commands.playground_command import make_server, page
from penstock.values import SCHEDULES


def test_a_server_of_this_machine_answers_with_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    with make_server(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        with urlopen(address, timeout=60) as answer:
            first = answer.read().decode()
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        asked = urlencode({"schedule": "zb-v", "each": "2", "stages": "8", "link": "1e15", "message": "1"})
        with urlopen(address, asked.encode(), timeout=60) as answer:
            shown = answer.read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}../../etc/passwd", timeout=60)
        assert main(["playground", "--port", str(server.server_port)]) == 1
        server.shutdown()

    layer = penstock.LayerProfile("stage", 0.01, 0.02, 1, 5e8, 1e9, weight_seconds=0.01)
    plan = penstock.Plan.uniform(8, 8, "zb-v", 8, 2)
    timeline = penstock.simulate(
        plan, penstock.Profile((layer,) * 8, 1), penstock.Cluster.uniform(4, 1e15), split_seconds=0
    )
    assert server.server_address[0] == "127.0.0.1"
    assert f"{SCHEDULES[0]}: every invariant holds" in first and "<svg" in first
    assert str(penstock.verify(penstock.schedule(plan))) in shown and ">rank 3<" in shown
    assert f"{1e3 * timeline.seconds:.1f} ms, bubble {timeline.bubble:.1%}" in shown
    assert f"GB: {timeline.memory[0].peak_bytes / 1e9:.2f} " in shown
    assert "<option selected>zb-v</option>" in shown
    assert "expected a free port of 127.0.0.1" in capsys.readouterr().err


def test_rows_that_break_a_law_are_kept_and_the_law_is_named() -> None:
    rows = "0F0@0 0B0@0 0F1@0 0B1@0 0U1<0\n1F0@0 1B1@0 1F1@0 1B0@0 1U1<0"
    shown = page({"way": "rows", "rows": rows, "stages": "2", "microbatches": "2"})
    assert (
        "not proved: " in shown
        and "ascending order" in shown
        and "1U1&lt;0</textarea>" in shown
        and "<svg" not in shown
    )


def test_an_order_keeps_the_limit_or_the_page_says_why_not() -> None:
    shown = page({"way": "order", "memory": "8GB"})
    peaks = shown.partition("each rank in GB: ")[2].partition("<")[0].split()
    assert "every invariant holds" in shown and max(map(float, peaks)) <= 8.0
    shown = page({"way": "order", "memory": "1GB"})
    assert "<pre>" in shown and "<svg" not in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stages": "3<b>"}, "&#x27;3&lt;b&gt;&#x27; is no count: expected a whole number, 1 or more"),
        ({"stages": "1000"}, "stages: expected at most 64 here, found 1000"),
        ({"forward": "<b>"}, "forward: expected a number of milliseconds, found &#x27;&lt;b&gt;&#x27;"),
        ({"forward": "nan"}, "forward_seconds"),
        ({"link": "fast"}, "is not a bandwidth"),
        ({"stages": "1", "each": "2"}, "stages_per_rank"),
        ({"schedule": "<script>"}, "&lt;script&gt;"),
        ({"way": "rows", "rows": "</textarea><script>"}, "&lt;/textarea&gt;&lt;script&gt;"),
    ],
)
def test_a_wrong_entry_is_an_error_in_the_page_and_no_markup(given: dict[str, str], said: str) -> None:
    shown = page(given)
    assert said in shown and "<svg" not in shown
    assert "<b>" not in shown and "<script" not in shown
