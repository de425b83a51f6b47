"""A stand-in of the Hugging Face hub: the requests by which its library lists and fetches the files of a model."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """A running stand-in with one model, which has one commit, on the branch `main` and under the tag `v1`."""

    repo: str
    folder: Path
    url: str = ""
    is_gated: bool = False
    fetched: list[str] = field(default_factory=list)  # names of files, in the order in which they were sent
    received: dict[str, bytes] = field(default_factory=dict)  # files of commits, by name
    requests: list[tuple[str, object]] = field(default_factory=list)  # path and JSON of what was posted
    refuses_posts: int | None = None  # the status in place of an answer
    refused_path: str = ""  # a part of the paths that it refuses
    before_sending: Callable[[str], None] = lambda _: None  # is called with the name of each file

    def constants(self, cache: Path) -> dict[str, object]:
        """Return what `huggingface_hub.constants` holds when the library uses this hub, and a cache.

        The library reads HF_ENDPOINT and HF_HUB_CACHE when it is imported.
        """
        return {
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        }


@contextmanager
def serve_model(repo: str, folder: Path) -> Iterator[StandInHub]:
    """Serve the files of a folder as a model of the hub, on a free port of this machine."""
    hub = StandInHub(repo, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub

    def do_HEAD(self) -> None:
        self._answer(sends_body=False)

    def do_GET(self) -> None:
        self._answer(sends_body=True)

    def do_POST(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        hub.requests.append((path, lines[0]))
        if hub.refuses_posts is not None and hub.refused_path in path:
            self._refuse(hub.refuses_posts, "")
        elif path.endswith("/repos/create"):
            self._send_json({"url": f"{hub.url}/{hub.repo}", "id": hub.repo})
        elif path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in lines[0]["files"]
            ]
            self._send_json({"files": files})
        elif path == f"/api/models/{hub.repo}/commit/main":
            for line in lines:
                if line["key"] == "file":
                    hub.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send_json(
                {"commitUrl": f"{hub.url}/{hub.repo}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
            )
        else:
            self._send_json({"errors": [], "warnings": []})  # of the card's metadata

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, sends_body=True)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, sends_body: bool) -> None:
        path, hub = urlsplit(self.path).path, self.hub
        model, files = f"/api/models/{hub.repo}/", f"/{hub.repo}/resolve/"
        if not path.startswith((model, files)):
            self._refuse(404, "RepoNotFound")
            return
        if hub.is_gated:
            self._refuse(403, "GatedRepo")
            return
        revision, _, name = path.removeprefix(files).removeprefix(f"{model}revision/").partition("/")
        if path.startswith(f"{model}tree/{COMMIT}"):
            self._send(json.dumps(self._tree()).encode(), {}, sends_body)
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif path.startswith(model):
            self._send(json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": []}).encode(), {}, sends_body)
        elif not (hub.folder / name).is_file():
            self._refuse(404, "EntryNotFound")
        else:
            content = (hub.folder / name).read_bytes()
            if sends_body:
                hub.before_sending(name)
                hub.fetched.append(name)
            self._send(content, {"ETag": f'"{_sum(content)}"', "X-Repo-Commit": COMMIT}, sends_body)

    def _tree(self) -> list[dict[str, object]]:
        files = [file for file in self.hub.folder.rglob("*") if file.is_file()]
        return [
            {
                "type": "file",
                "path": str(file.relative_to(self.hub.folder)),
                "size": file.stat().st_size,
                "oid": _sum(file.read_bytes()),
            }
            for file in files
        ]

    def _send(self, content: bytes, headers: dict[str, str], sends_body: bool) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if sends_body:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sum(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
