"""`moto_server`, which answers one call at a time and lets keys expire, run as a script in a process of its own.

moto looks whether an object is there and stores it afterwards, in a thread for every connection: of two creations at
the same time, both may succeed. S3 never lets that happen, so here looking and storing are one. What a client sends is
received before its turn comes, so that a slow one holds nobody up.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.wsgi import get_input_stream

__all__ = ["ExpiringKeys", "OneAtATime"]

_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class OneAtATime:
    """An application that calls another, and never twice at once."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = get_input_stream(environ).read()
        # A body that came in chunks had no length; from here on it is whole.
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        with self._turn:
            return self._application(environ, start_response)


class ExpiringKeys:
    """An application of which a test may say which access key is valid from now on; the others are answered as S3
    answers expired ones. moto itself accepts any key.

    `PUT /_only_key/<bucket>/<id>` makes one key a bucket's only valid one; `GET /_refused/<bucket>` is answered once a
    request to the bucket was refused.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._valid: dict[str, str] = {}
        self._refused: dict[str, threading.Event] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/_only_key/"):
            _, _, bucket, key = path.split("/")
            self._refused[bucket] = threading.Event()
            self._valid[bucket] = key
        elif path.startswith("/_refused/"):
            if not self._refused[path.split("/")[2]].wait(60):
                start_response("504 Gateway Timeout", [])
                return []
        else:
            bucket = path.split("/")[1]
            key = self._valid.get(bucket)
            if key is None or f"Credential={key}/" in environ.get("HTTP_AUTHORIZATION", ""):
                return self._application(environ, start_response)
            get_input_stream(environ).read()
            self._refused[bucket].set()
            start_response("400 Bad Request", [("Content-Type", "application/xml")])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [_EXPIRED]
        start_response("200 OK", [("Content-Length", "0")])
        return []


def _main() -> None:
    application = ExpiringKeys(OneAtATime(DomainDispatcherApplication(create_backend_app)))
    run_simple("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _main()
