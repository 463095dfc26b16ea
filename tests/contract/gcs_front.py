"""The XML face of Google Cloud Storage before `gcp-storage-emulator`, run as a script in a process of its own.

obstore speaks GCS's XML API; of that the emulator knows GET and PUT alone, without the ETag that obstore insists on. So
the front turns XML calls into the emulator's JSON ones. Real, in the emulator: buckets, the objects' bytes, listing,
copying, deleting. Emulated, here: ETags on answers, `x-goog-if-generation-match: 0` (all calls go one at a time, so
looking and then writing is atomic), delimiters in listings, ranges, multipart uploads (parts wait in memory until the
upload is completed). What this cannot tell: Google's authentication, throttling, and paging beyond one page.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import threading
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from gcp_storage_emulator import server as emulator  # type: ignore[import-untyped]

__all__ = ["Answer", "Front"]

_JSON = "/storage/v1/b"


class Answer(NamedTuple):
    """The answer to the client."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


class _Door(ThreadingHTTPServer):
    """A server with a listen backlog for as many connections as any test makes; with the usual five, more would wait a
    second."""

    request_queue_size = 128


class Front(BaseHTTPRequestHandler):
    """One connection of obstore's."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: apart, they wait 40 ms for an acknowledgement
    back: tuple[str, int]
    one_at_a_time = threading.Lock()
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: tests read the first line only."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.one_at_a_time:
            answer = self._route(body)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _route(self, body: bytes) -> Answer:
        url = urlsplit(self.path)
        if url.path.startswith("/storage/"):
            return self._ask(self.command, self.path, body, "application/json")
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if not key:
            return self._list(bucket, query)
        if "uploads" in query or "uploadId" in query:
            return self._multipart(bucket, key, query, body)
        if self.command == "PUT":
            source = self.headers.get("x-goog-copy-source")
            return self._copy(unquote(source), bucket, key) if source else self._put(bucket, key, body)
        if self.command == "DELETE":
            deleted = self._ask("DELETE", self._object(bucket, key)).status < 300
            return Answer(204) if deleted else self._absent(bucket)
        return self._get(bucket, key)

    def _ask(self, method: str, path: str, body: bytes = b"", content_type: str = "") -> Answer:
        """Ask the emulator."""
        connection = http.client.HTTPConnection(*self.back, timeout=30)
        try:
            headers = {"Content-Length": str(len(body))} | ({"Content-Type": content_type} if content_type else {})
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            return Answer(reply.status, reply.read())
        finally:
            connection.close()

    @staticmethod
    def _object(bucket: str, key: str) -> str:
        return f"{_JSON}/{quote(bucket)}/o/{quote(key, safe='')}"

    def _meta(self, bucket: str, key: str) -> dict[str, str] | None:
        found = self._ask("GET", self._object(bucket, key))
        return json.loads(found.body) if found.status == 200 else None

    def _put(self, bucket: str, key: str, body: bytes) -> Answer:
        if self.headers.get("x-goog-if-generation-match") == "0" and self._meta(bucket, key):
            return Answer(412, _error("PreconditionFailed"))
        path = f"/upload{_JSON}/{quote(bucket)}/o?uploadType=media&name={quote(key, safe='')}"
        if body:
            stored = self._ask("POST", path, body, "application/octet-stream")
        else:
            # The emulator fails on an empty body; in a form, empty content is fine.
            stored = self._ask("POST", path.replace("=media", "=multipart"), *_empty_form(key))
        if stored.status >= 300:
            return Answer(404, _error("NoSuchBucket"))
        return Answer(200, headers=_tags(json.loads(stored.body)))

    def _get(self, bucket: str, key: str) -> Answer:
        meta = self._meta(bucket, key)
        if meta is None:
            return self._absent(bucket)
        content = self._ask("GET", self._object(bucket, key) + "?alt=media").body
        headers = {"Last-Modified": "Sat, 01 Jan 2022 00:00:00 GMT", **_tags(meta)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if self.command == "HEAD":
            return Answer(200, headers={"Content-Length": str(len(content)), **headers})
        if not wanted:
            return Answer(200, content, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return Answer(416, _error("InvalidRange"))
        return Answer(
            206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}", **headers}
        )

    def _absent(self, bucket: str) -> Answer:
        there = self._ask("GET", f"{_JSON}/{quote(bucket)}").status == 200
        return Answer(404, _error("NoSuchKey" if there else "NoSuchBucket"))

    def _copy(self, source: str, bucket: str, key: str) -> Answer:
        from_bucket, _, from_key = source.lstrip("/").partition("/")
        target = f"/copyTo/b/{quote(bucket)}/o/{quote(key, safe='')}"
        copied = self._ask("POST", self._object(from_bucket, from_key) + target)
        if copied.status >= 300:
            return self._absent(bucket)
        return Answer(200, b"<CopyObjectResult/>", _tags(json.loads(copied.body)))

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found = self._ask("GET", f"{_JSON}/{quote(bucket)}/o?prefix={quote(prefix, safe='')}&maxResults=100000")
        if found.status != 200:
            return Answer(404, _error("NoSuchBucket"))
        items = {item["name"]: item for item in json.loads(found.body).get("items", ())}
        folders = {
            prefix + name[len(prefix) :].split(delimiter)[0] + delimiter
            for name in items
            if delimiter and delimiter in name[len(prefix) :]
        }
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2022-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_tags(item)['ETag'])}</ETag><Size>{item['size']}</Size></Contents>"
            for name, item in sorted(items.items())
            if not any(name.startswith(folder) for folder in folders)
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        return Answer(200, f"<ListBucketResult>{contents}{common}</ListBucketResult>".encode())

    def _multipart(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, xml.encode())
        upload = query["uploadId"]
        if self.command == "PUT":
            self.uploads[upload][int(query["partNumber"])] = body
            return Answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        parts = self.uploads.pop(upload, {})
        if self.command == "DELETE":
            return Answer(204)
        stored = self._put(bucket, key, b"".join(parts[number] for number in sorted(parts)))
        if stored.status != 200:
            return stored
        tag = escape(stored.headers.get("ETag", ""))
        xml = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        return stored._replace(body=xml.encode())


def _tags(meta: dict[str, str]) -> dict[str, str]:
    return {"ETag": f'"{meta["md5Hash"]}"', "x-goog-generation": meta["generation"]}


def _empty_form(key: str) -> tuple[bytes, str]:
    meta = json.dumps({"name": key}).encode()
    head = b"--x\r\nContent-Type: application/json\r\n\r\n"
    content = b"\r\n--x\r\nContent-Type: application/octet-stream\r\n\r\n\r\n--x--\r\n"
    return head + meta + content, "multipart/related; boundary=x"


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _main() -> None:
    storage = emulator.create_server("127.0.0.1", 0, in_memory=True)
    storage.start()
    Front.back = storage._api._httpd.server_address
    front = _Door(("127.0.0.1", 0), Front)
    print(f"serving http://127.0.0.1:{front.server_address[1]}", flush=True)
    try:
        front.serve_forever()
    finally:
        front.server_close()
        storage.stop()


if __name__ == "__main__":
    _main()
