"""An S3 store on the loopback, by `moto`'s server, for this process and those that it starts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from werkzeug.serving import make_server

BUCKET = "bucket"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@dataclass
class ObjectServer:
    """A server, and the faults of its next requests that change something."""

    url: str = ""
    status: int | None = None  # of answers to PUT and POST; None: the server's own
    code: str = "SlowDown"  # S3's name of the fault
    may_pass: Callable[[str], bool] = lambda path: False  # paths that the fault spares
    writes: list[str] = field(default_factory=list)  # paths that were written, in order

    def __call__(self, application: Any) -> Any:
        """Wrap a WSGI application."""

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            path = environ["PATH_INFO"]
            if environ["REQUEST_METHOD"] in ("PUT", "POST"):
                if self.status is not None and not self.may_pass(path):
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                    body = f"<Error><Code>{self.code}</Code><Message>{SECRET}</Message></Error>".encode()
                    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
                    start_response(f"{self.status} FAULT", headers)
                    return [body]
                self.writes.append(path)
            return application(environ, start_response)

        return answer


@contextmanager
def serve_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Serve an empty bucket, which `s3://bucket/...` names meanwhile."""
    moto_server = pytest.importorskip("moto.server", reason="needs moto[s3], flask and flask-cors")
    s3fs = pytest.importorskip("s3fs")
    faults = ObjectServer()
    application = faults(moto_server.DomainDispatcherApplication(moto_server.create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    faults.url = f"http://127.0.0.1:{server.server_port}"
    settings = {
        "AWS_ENDPOINT_URL": faults.url,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "MMTRAIN_REMOTE_ATTEMPTS": "2",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield faults
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()
        server.server_close()
        moto_server_reset()


def moto_server_reset() -> None:
    """Forget all buckets: moto keeps them in this process."""
    from moto.s3.models import s3_backends

    s3_backends.reset()
