"""A local server of fixed answers, and a function that runs the command line against it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from typer.testing import CliRunner

from server.cli.main import app


class Api:
    """An HTTP server. handle: answers an httpx.Request.   requests: all requests so far."""

    def __init__(self, handle):
        self.requests = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                request = httpx.Request(
                    self.command, api.url + self.path, headers=dict(self.headers), content=body
                )
                api.requests.append(request)
                answer = handle(request)
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if "content-length" not in answer.headers:
                    self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.content)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def asked(self):
        """(method, path, body) of every request; the query is part of the path."""
        return [
            (r.method, r.url.raw_path.decode(), json.loads(r.content) if r.content else None)
            for r in self.requests
        ]

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def fixed(answers):
    """A handler with fixed answers. answers: (status, content) by (method, path); else a 404."""

    def handle(request):
        error = {"error": {"message": "Not here.", "code": "x"}}
        status, content = answers.get((request.method, request.url.path), (404, error))
        if isinstance(content, bytes):
            return httpx.Response(status, content=content)
        return httpx.Response(status, json=content)

    return handle


def list_of(*items):
    """An answer that lists these objects, on one page."""
    return 200, {"object": "list", "data": list(items), "has_more": False}


def make_run(url, monkeypatch, tmp_path):
    """A function that runs the command line in tmp_path."""
    monkeypatch.setenv("CHORALE_URL", url)
    monkeypatch.setenv("CHORALE_API_KEY", "tenant-key")
    monkeypatch.setenv("CHORALE_ADMIN_KEY", "admin-key")
    monkeypatch.setenv("HOME", str(tmp_path))  # unfinished pushes are remembered there
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **options):
        return CliRunner().invoke(app, arguments, **options)

    return run


def is_one_line(text, *parts):
    return text.count("\n") == 1 and all(part in text for part in parts)
