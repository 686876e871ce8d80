"""Servers on this machine: one of S3 (moto), and one of HTTP that fails as asked."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def s3() -> Iterator[dict[str, Any]]:
    """Run a server of S3, and give the storage options for it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *args: Any) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.port}"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Site:
    """Files of a server of HTTP, and how it fails. Paths that begin with "/circle" redirect to themselves.

    Attributes:
      files: content by path, such as "/x.bin".
      url: the address of the server.
      ranges: whether it answers requests of a part.
      fail: how many of the next GETs are answered with `status`.
      truncate: how many of the next GETs end after half of the promised bytes.
      stalled: whether GETs wait for `resume` after half of their bytes, and set `halfway`.
      slow: seconds that each sixteenth of an answer takes.
      etags: whether it tells versions apart.
      requests: (method, path, Range header) of each request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    ranges: bool = True
    fail: int = 0
    status: int = 503
    truncate: int = 0
    stalled: bool = False
    resume: threading.Event = field(default_factory=threading.Event)
    asked: threading.Condition = field(default_factory=threading.Condition)
    halfway: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    etags: bool = True
    slow: float = 0.0

    def wait_for(self, method: str, number: int) -> None:
        """Wait until there were some requests."""
        with self.asked:
            assert self.asked.wait_for(lambda: sum(each == method for each, _, _ in self.requests) >= number, 60)

    def gets(self, path: str) -> int:
        """Return the number of GETs of a file."""
        return sum(method == "GET" and each == path for method, each, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        site, path = self.site, self.path.partition("?")[0]
        with site.asked:
            site.requests.append((self.command, path, self.headers["Range"]))
            site.asked.notify_all()
        if with_body and site.fail > 0:
            site.fail -= 1
            self.send_error(site.status)
            return
        if path.startswith("/circle"):
            self.send_response(302)
            self.send_header("Location", path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if path not in site.files:
            self.send_error(404)
            return
        body = content = site.files[path]
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "") if site.ranges else None
        if part:
            body = content[int(part[1]) : int(part[2] or len(content)) + 1]
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        if site.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if part:
            self.send_header("Content-Range", f"bytes {part[1]}-{int(part[1]) + len(body) - 1}/{len(content)}")
        if site.etags:
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.end_headers()
        if not with_body:
            return
        with contextlib.suppress(ConnectionError):
            while site.slow and len(body) > len(content) // 16:
                self.wfile.write(body[: len(content) // 16])
                body = body[len(content) // 16 :]
                time.sleep(site.slow)
            self.wfile.write(body[: len(body) // 2])
            if site.truncate > 0:
                site.truncate -= 1
                self.close_connection = True
                return
            if site.stalled:
                self.wfile.flush()
                site.halfway.set()
                site.resume.wait(60)
            self.wfile.write(body[len(body) // 2 :])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # several files are listed at once


@contextlib.contextmanager
def http() -> Iterator[Site]:
    """Run a server of HTTP."""
    site = Site()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.resume.set()
        server.shutdown()
        thread.join()
        server.server_close()
