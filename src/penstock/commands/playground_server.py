"""The server of ``penstock show --serve``: one page, which runs in the browser alone, on 127.0.0.1."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

from penstock.errors import PenstockError


def make_server(port: int) -> ThreadingHTTPServer:
    """A server of the playground at `port` of 127.0.0.1; 0 is any free port. Raises `PenstockError` if it is taken."""
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except (OSError, OverflowError) as error:
        raise PenstockError(
            f"--serve {port}: expected a free port of 127.0.0.1, found: {error}; give another, or leave it out"
        ) from None


def serve(port: int) -> None:
    """Serves the playground until the user interrupts it."""
    with make_server(port) as server:
        print(f"the playground is at http://127.0.0.1:{server.server_port}/ until Ctrl+C", flush=True)
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, and no others."""

    def do_GET(self) -> None:
        """Sends the page, or 404 for another path."""
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        page = files("penstock.rendering").joinpath("playground.html").read_bytes()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: a line for each request would hide the address."""
