"""An object store on loopback: the protocol of S3 by moto, in a process of its own, and faults on demand in front.

A process of its own, since a stream that is dropped talks to the store while it holds the interpreter's lock: a
server in the same interpreter could never answer it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "bucket"
_CONTROL = "/-/faults"
_CODES = {"SlowDown": "503 Slow Down", "ExpiredToken": "400 Bad Request"}


class Faults:
    """A layer in front of a WSGI application that answers some of the requests itself, badly.

    A rule has ``do`` ("503", "404", "hang", "slow", "expired") and, to be narrower: ``method``, ``path`` (an
    expression that the path has to match), ``key`` (the access key that signed), ``every`` (each n-th that
    matches), ``skip`` (so many first are let pass), ``times`` (so often at most), ``once`` (only the first of each
    path), ``seconds``.
    """

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._log: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == _CONTROL:
            return self._control(environ, start)
        with self._lock:
            self._log.append(f"{method} {path}?{environ.get('QUERY_STRING', '')}".rstrip("?"))
            rule = next((r for r in self._rules if _hits(r, method, path, environ)), None)
        if rule is None:
            return self._application(environ, start)
        if environ.get("CONTENT_LENGTH"):
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = _Body(body)
        if rule["do"] in ("hang", "slow"):
            time.sleep(rule["seconds"])
            return self._application(environ, start)
        if rule["do"] == "404":
            return _answer(start, "404 Not Found", "NoSuchKey", method)
        code = "SlowDown" if rule["do"] == "503" else "ExpiredToken"
        return _answer(start, _CODES[code], code, method)

    def _control(self, environ: dict[str, Any], start: Any) -> Any:
        with self._lock:
            if environ["REQUEST_METHOD"] == "POST":
                body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                self._rules = [
                    {**rule, "seen": 0, "done": 0, "paths": []} for rule in json.loads(body)
                ]
                self._log = []
            document = {"log": self._log, "done": [rule["done"] for rule in self._rules]}
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(document).encode()]


def _hits(rule: dict[str, Any], method: str, path: str, environ: dict[str, Any]) -> bool:
    if rule.get("method", method) != method or not re.search(rule.get("path", ""), path):
        return False
    if "key" in rule and f"Credential={rule['key']}/" not in environ.get("HTTP_AUTHORIZATION", ""):
        return False
    if rule.get("once"):
        if path in rule["paths"]:
            return False
        rule["paths"].append(path)
    rule["seen"] += 1
    over = rule["seen"] - rule.get("skip", 0)
    if over <= 0 or over % rule.get("every", 1) or rule["done"] >= rule.get("times", 1 << 60):
        return False
    rule["done"] += 1
    return True


def _answer(start: Any, status: str, code: str, method: str) -> list[bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    start(status, [("Content-Type", "application/xml")])
    return [] if method == "HEAD" else [body.encode()]


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, count: int = -1) -> bytes:
        part = self._data if count < 0 else self._data[:count]
        self._data = self._data[len(part) :]
        return part


class ObjectStore:
    """What tests hold of the store.

    Args:
        port: where it listens on loopback.
    """

    def __init__(self, port: int) -> None:
        self._url, self._port = f"http://127.0.0.1:{port}", port

    def uri(self, path: str, **query: str) -> str:
        """The address of a folder in the bucket, as people would write it."""
        words = {
            "endpoint_override": self._url,
            "scheme": "http",
            "region": "us-east-1",
            **query,
        }
        return f"s3://{BUCKET}/{path}?{urllib.parse.urlencode(words)}"

    def fail(self, *rules: dict[str, Any]) -> None:
        """From now on these rules hold, and only these; forgets the log."""
        self._ask("POST", json.dumps(rules).encode())

    def make_bucket(self) -> None:
        """Makes the bucket; signed as far as the server looks."""
        signed = "AWS4-HMAC-SHA256 Credential=test/20300101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(f"{self._url}/{BUCKET}", method="PUT")
        request.add_header("Authorization", signed)
        urllib.request.urlopen(request, timeout=20).close()

    @property
    def log(self) -> list[str]:
        """Requests since the last change of the rules."""
        return list(self._ask("GET")["log"])

    @property
    def done(self) -> list[int]:
        """How often each rule took effect."""
        return list(self._ask("GET")["done"])

    def _ask(self, method: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self._url + _CONTROL, body, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Starts a store with one empty bucket; ends it."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
    )
    try:
        assert child.stdout is not None
        port = child.stdout.readline().strip()
        assert port, "the store did not start"
        store = ObjectStore(int(port))
        store.make_bucket()
        yield store
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _serve() -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    application = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
