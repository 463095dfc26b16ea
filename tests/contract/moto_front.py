"""`moto_server`, which answers one call at a time, run as a script in a process of its own.

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

__all__ = ["OneAtATime"]


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


def _main() -> None:
    application = OneAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _main()
