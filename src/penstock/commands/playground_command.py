"""``penstock playground``: a page on 127.0.0.1 that asks the library to prove, time and draw a schedule."""

import argparse
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

from penstock.commands.command import Command
from penstock.commands.quantities import parse_bandwidth, parse_bytes, parse_count
from penstock.errors import PenstockError
from penstock.values import SCHEDULES, Cluster, LayerProfile, Plan, Profile, schedule

_FIELDS = {
    "stages": ("stages", "4"),
    "each": ("stages of a rank", "1"),
    "microbatches": ("microbatches", "8"),
    "forward": ("ms of a forward", "10"),
    "backward": ("ms of an input backward", "10"),
    "weight": ("ms of a weight backward", "10"),
    "weights": ("weights of a stage", "1GB"),
    "activations": ("activations of a microbatch", "500MB"),
    "message": ("bytes of a message", "10MB"),
    "link": ("link", "100GB/s"),
    "memory": ("limit of a rank", "8GB"),
}
"""What the form asks for: its label, and what stands in it at first."""
_WAYS = {"named": "Show the schedule", "order": "Find an order under the limit", "rows": "Show the rows below"}
_MOST = {"stages": 64, "microbatches": 256}  # More would take the browser and the search of orders too long.
_INPUT = '<label>{}<input name="{}" size="12" value="{}"></label>'
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; form-action 'self'">
<style>:root {{ color-scheme: light dark }} body {{ margin: 16px auto; max-width: 1400px; font: 14px/1.5 system-ui }}
fieldset {{ display: flex; flex-wrap: wrap; gap: 8px; border: 0; padding: 8px 0 }} label {{ display: grid }}
textarea {{ width: 100%; font: 13px monospace }} pre {{ white-space: pre-wrap }} svg {{ max-width: 100% }}</style>
<title>Penstock: playground of pipeline schedules</title><h1>Playground of pipeline schedules</h1>
<form method="post"><fieldset><label>schedule<select name="schedule">{names}</select></label>{fields}</fieldset>
{buttons}<section role="status">{answer}</section>
<h2>The rows of actions</h2><p>2F0@1 is the forward of microbatch 0 on stage 2 with weights of version 1. B is a
backward, I and W are its halves, U3&lt;1 makes version 3 from gradients of version 1. Messages are derived.</p>
<textarea name="rows" rows="10" spellcheck="false" aria-label="rows">{rows}</textarea></form></html>
"""


def page(given: Mapping[str, str]) -> str:
    """The page for what the form sent; an error of the library is a part of it."""
    values = {name: given.get(name, value) for name, (_, value) in _FIELDS.items()}
    rows, chosen = given.get("rows", ""), given.get("schedule", SCHEDULES[0])
    try:
        answer, rows = _answer(given.get("way", "named"), chosen, values, rows)
    except (PenstockError, argparse.ArgumentTypeError) as error:
        answer = f"<pre>{escape(str(error))}</pre>"
    names = "".join(f"<option{' selected' * (name == chosen)}>{name}</option>" for name in SCHEDULES)
    fields = "".join(_INPUT.format(_FIELDS[name][0], name, escape(value)) for name, value in values.items())
    buttons = "".join(f'<button name="way" value="{way}">{text}</button> ' for way, text in _WAYS.items())
    return _PAGE.format(names=names, fields=fields, buttons=buttons, answer=answer, rows=escape(rows))


def _answer(way: str, chosen: str, values: Mapping[str, str], rows: str) -> tuple[str, str]:
    """The proof, the figures and the picture; and the rows of the first step."""
    from penstock.planning.orders.search import find_order
    from penstock.scheduling import define_by_programs, verify
    from penstock.scheduling.actions import Compute, HostCopy, format_programs
    from penstock.simulating import critical_path, simulate

    stages, each, microbatches = (parse_count(values[name]) for name in ("stages", "each", "microbatches"))
    for name, most in _MOST.items():
        if int(values[name]) > most:
            raise PenstockError(f"{name}: expected at most {most} here, found {values[name]}: use penstock.simulate")
    forward, backward, weight = (_milliseconds(name, values[name]) for name in ("forward", "backward", "weight"))
    message, saved, held = (parse_bytes(values[name]) for name in ("message", "activations", "weights"))
    times = {"forward_seconds": forward, "backward_seconds": backward + weight, "weight_seconds": weight}
    layer = LayerProfile("stage", **times, cut_bytes=message, saved_bytes=saved, parameter_bytes=held)
    profile = Profile((layer,) * stages, microbatch_size=1)
    definition = define_by_programs("rows", rows) if way == "rows" else chosen
    plan = Plan.uniform(stages, stages, definition, microbatches, each)
    cluster = Cluster.uniform(stages // each, parse_bandwidth(values["link"]))
    if way == "order":
        plan = find_order(plan, profile, cluster, memory_bytes=parse_bytes(values["memory"])).plan
    planned = schedule(plan)
    first = [[action for action in row if isinstance(action, Compute | HostCopy)] for row in planned.step(0)]
    rows = rows if way == "rows" else format_programs(first)
    try:
        proved = str(verify(planned))
    except PenstockError as error:
        return f"<pre>not proved: {escape(str(error))}</pre>", rows
    timeline = simulate(plan, profile, cluster, split_seconds=0.0)
    peaks = " ".join(f"{memory.peak_bytes / 1e9:.2f}" for memory in timeline.memory)
    figures = f"{1e3 * timeline.seconds:.1f} ms, bubble {timeline.bubble:.1%}, peak memory of each rank in GB: {peaks}"
    return f"<pre>{escape(proved)}\n{figures}</pre>{timeline.svg(critical=critical_path(timeline))}", rows


def _milliseconds(name: str, text: str) -> float:
    try:
        return float(text) / 1e3
    except ValueError:
        raise PenstockError(
            f"{name}: expected a number of milliseconds, found {text!r}: write one such as 10"
        ) from None


class _Handler(BaseHTTPRequestHandler):
    """Sends the page as it is at first, or for what the form posts; 404 for another path."""

    def do_GET(self) -> None:
        self._send(page({})) if self.path == "/" else self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        sent = self.rfile.read(min(int(self.headers.get("Content-Length", "0")), 2**20)).decode(errors="replace")
        self._send(page(dict(parse_qsl(sent, keep_blank_values=True))))

    def _send(self, text: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: a line for each request would hide the address."""


def make_server(port: int) -> ThreadingHTTPServer:
    """A server of the page at `port` of 127.0.0.1; 0 is any free port. Raises `PenstockError` if it is taken."""
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except (OSError, OverflowError) as error:
        raise PenstockError(f"--port {port}: expected a free port of 127.0.0.1, found: {error}; give another") from None


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", metavar="PORT", type=int, default=0, help="default: a free one")


def _run(arguments: argparse.Namespace) -> None:
    with make_server(arguments.port) as server:
        print(f"the playground is at http://127.0.0.1:{server.server_port}/ until Ctrl+C", flush=True)
        server.serve_forever()


PLAYGROUND = Command(
    name="playground",
    summary="serve a page to change schedules and see them proved and drawn",
    description="Serves a page on 127.0.0.1: choose a schedule, times and links, change its rows of actions, or have "
    "an order found under a limit of memory; the library proves, simulates and draws it.",
    example="penstock playground --port 8000",
    declare=_declare,
    run=_run,
)
