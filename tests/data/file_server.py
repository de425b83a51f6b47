"""Serve a folder by HTTP on the loopback, with ranges, ETags and the faults that a test asks for.

Its folders also answer S3's requests to list a bucket (ListObjectsV2), with addresses of the form host/bucket/key, and
those of the Hugging Face hub for a data set `team/set`, whose files lie in datasets/team/set, and those of Google Cloud
Storage (JSON API).
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

DROP = "drop"  # close the connection without an answer
STALL = "stall"  # answer nothing until the test is over
TRUNCATE = "truncate"  # half of the body that the header promises
SHORT = "short"  # half of the range, by an honest header


@dataclass
class FileServer:
    """What is served, and what was asked for."""

    folder: Path
    url: str = ""
    has_ranges: bool = True
    token: str | None = None  # that requests must bear
    faults: list[str | int] = field(default_factory=list)  # of the next GET requests; a number is a status
    redirects: dict[str, str] = field(default_factory=dict)  # path -> where it is
    headers: list[dict[str, str]] = field(default_factory=list)  # of requests, by names in lower case
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ranges_of(self, name: str) -> list[str | None]:
        return [span for method, path, span in self.requests if method == "GET" and path == f"/{name}"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits for an acknowledgement of its header
    files: FileServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        span = self.headers.get("Range")
        with self.files.lock:
            self.files.requests.append((self.command, self.path, span))
            self.files.headers.append({name.lower(): value for name, value in self.headers.items()})
            fault = self.files.faults.pop(0) if body and self.files.faults else None
        if self.files.token is not None and self.headers.get("Authorization") != f"Bearer {self.files.token}":
            fault = 403
        address = urlsplit(self.path)
        path = self.files.folder / _name_of_file(unquote(address.path))
        if fault == STALL:
            self.files.over.wait()
        if fault in (DROP, STALL):
            self.close_connection = True
            return
        if self.path in self.files.redirects:
            self._send(302, b"", {"Location": self.files.redirects[self.path]})
        elif isinstance(fault, int):
            self._send(fault, b"", {})
        elif "list-type=2" in address.query:
            self._send_bucket(path, parse_qs(address.query))
        elif address.path.startswith("/api/datasets/"):
            is_recursive = parse_qs(address.query).get("recursive", [""])[0].lower() == "true"
            self._send_hub(unquote(address.path).removeprefix("/api/datasets/"), is_recursive=is_recursive)
        elif address.path.startswith("/storage/v1/b/"):
            self._send_google(address.path.removeprefix("/storage/v1/b/"), parse_qs(address.query))
        elif path.is_dir() and self.path.endswith("/"):
            links = "".join(f'<a href="{entry.name}">{entry.name}</a>' for entry in sorted(path.iterdir()))
            self._send(200, links.encode(), {"Content-Type": "text/html"}, body)
        elif not path.is_file():
            self._send(404, b"", {})
        else:
            self._send_file(path.read_bytes(), span, fault, body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._send(405, b"", {})

    def _send_hub(self, asked: str, *, is_recursive: bool) -> None:
        """Answer whether `team/set` is there, or what a folder of it holds (`team/set/tree/main/folder`)."""
        team, name, *rest = asked.split("/")
        folder = self.files.folder / "datasets" / team / name
        error = "RepoNotFound"
        if rest[:1] == ["tree"]:
            folder, error = folder.joinpath(*rest[2:]), "EntryNotFound"
        if not folder.is_dir():
            self._send(404, b"", {"X-Error-Code": error})
            return
        root = self.files.folder / "datasets" / team / name
        entries = [
            {
                "type": "directory" if entry.is_dir() else "file",
                "path": str(entry.relative_to(root)),
                "size": 0 if entry.is_dir() else entry.stat().st_size,
                "oid": hashlib.sha1(b"" if entry.is_dir() else entry.read_bytes()).hexdigest(),
            }
            for entry in sorted(folder.rglob("*") if is_recursive else folder.iterdir())
        ]
        answer: object = entries if rest[:1] == ["tree"] else {"id": f"{team}/{name}", "sha": "0" * 40}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_bucket(self, bucket: Path, asked: dict[str, list[str]]) -> None:
        """List the keys that begin with a prefix, those below a delimiter as one entry (S3's ListObjectsV2)."""
        if not bucket.is_dir():
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>", {"Content-Type": "application/xml"})
            return
        [prefix], [delimiter] = asked.get("prefix", [""]), asked.get("delimiter", [""])
        keys, folders = [], set()
        for file in sorted(file for file in bucket.rglob("*") if file.is_file()):
            key = str(file.relative_to(bucket))
            below = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in below:
                folders.add(prefix + below.partition(delimiter)[0] + delimiter)
            else:
                keys.append(f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size></Contents>")
        common = [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        listed = "".join([*keys, *common])
        self._send(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode(), {"Content-Type": "application/xml"})

    def _send_google(self, asked: str, query: dict[str, list[str]]) -> None:
        """Describe an object (`bucket/o/key`), or those of a folder (`bucket/o?prefix=folder/&delimiter=/`)."""
        bucket, _, rest = asked.partition("/")
        folder, key = self.files.folder / bucket, unquote(rest.removeprefix("o").removeprefix("/"))
        prefix = query.get("prefix", [""])[0]
        entries = [folder / key] if key else sorted((folder / prefix.rpartition("/")[0]).glob("*"))
        items = [
            {
                "name": str(entry.relative_to(folder)),
                "bucket": bucket,
                "size": str(entry.stat().st_size),
                "generation": str(entry.stat().st_mtime_ns),
            }
            for entry in entries
            if entry.is_file() and str(entry.relative_to(folder)).startswith(key or prefix)
        ]
        if not items:
            self._send(404, b"{}", {"Content-Type": "application/json"})
            return
        self._send(
            200, json.dumps(items[0] if key else {"items": items}).encode(), {"Content-Type": "application/json"}
        )

    def _send_file(self, content: bytes, span: str | None, fault: str | int | None, body: bool) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        if self.headers.get("If-Match", tag) != tag:
            self._send(412, b"", {})
            return
        headers = {"ETag": tag}
        status = 200
        if span is not None and self.files.has_ranges:
            start, stop = span.removeprefix("bytes=").split("-")
            first, last = int(start), min(int(stop), len(content) - 1)
            if fault == SHORT:
                last = (first + last) // 2
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        self._send(status, content, headers, body, cut=fault == TRUNCATE)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


def _name_of_file(path: str) -> str:
    """Return the name of a file below the served folder, as the hub and Google Cloud Storage address it or plainly."""
    if path.startswith("/download/storage/v1/b/"):
        return path.removeprefix("/download/storage/v1/b/").replace("/o/", "/", 1)
    return re.sub("/resolve/[^/]+/", "/", path.lstrip("/"), count=1)  # every revision of the hub is the same


@contextmanager
def serve(folder: Path) -> Iterator[FileServer]:
    """Serve the files of a folder until the end of the context."""
    files = FileServer(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"files": files}))
    server.daemon_threads = True
    files.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield files
    finally:
        files.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
