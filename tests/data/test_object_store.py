"""Objects of a store: parts, faults, and what is left of a write that fails; against moto's server."""

import hashlib
import os
from collections.abc import Iterator

import pytest

from mmtrain.data.remote import object_store
from mmtrain.data.remote.object_store import ObjectStore
from mmtrain.errors import RemoteReadError, StorageAwayError
from tests.object_server import SECRET, ObjectServer, serve_objects

MIB = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serve_objects(monkeypatch) as server:
        yield server


def test_a_large_object_goes_in_parts_and_comes_back(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)  # the least that S3 takes
    monkeypatch.setattr(object_store, "PIECE_BYTES", 3 * MIB)
    store, content = ObjectStore.at("s3://bucket/run/"), os.urandom(11 * MIB)
    digest = hashlib.sha256(content).hexdigest()
    assert store.write("a/large", lambda: [content[: 7 * MIB], content[7 * MIB :]], digest)
    assert server.writes.count("/bucket/run/a/large") > 3, "an upload in parts"
    assert store.sizes() == {"a/large": len(content)} == store.sizes("a")
    assert b"".join(store.pieces("a/large")) == content
    store.move("a/large", "b/large")
    assert store.sizes() == {"b/large": len(content)}
    assert store.read("b/large") == content
    store.remove("b/large")
    store.remove("b/large")
    assert store.sizes() == {}


@pytest.mark.parametrize("num_bytes", [3, 11 * MIB])
def test_a_write_that_fails_leaves_nothing(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)
    store, content = ObjectStore.at("s3://bucket/run"), b"x" * num_bytes

    def broken() -> Iterator[bytes]:
        yield content
        raise OSError(5, "Input/output error", "here.bin")

    assert not store.write("damaged", lambda: [content], "0" * 64)
    with pytest.raises(RemoteReadError, match=r"run/broken: not written: here\.bin: Input/output error"):
        store.write("broken", broken)
    assert store.sizes() == {}


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (503, "SlowDown", "cannot be reached after 2 attempts: status 503"),
        (400, "ExpiredToken", "credentials come from the environment of this machine"),
        (403, "AccessDenied", "credentials come from the environment of this machine"),
        (403, "InvalidAccessKeyId", "credentials come from the environment of this machine"),
    ],
)
def test_what_a_store_answers_is_said_without_secrets(
    server: ObjectServer, status: int, code: str, message: str
) -> None:
    server.status, server.code = status, code
    with pytest.raises(StorageAwayError, match=message) as error:
        ObjectStore.at("s3://bucket/run").require_writable()
    assert SECRET not in str(error.value)


def test_folders_whose_names_begin_alike_are_apart(server: ObjectServer) -> None:
    """A step that a run came to again is `step-00000003-2`."""
    store = ObjectStore.at("s3://bucket/run")
    names = ["hf/step-00000003/a", "hf/step-00000003-2/a", "hf/step-00000003-2/b"]
    for name in names:
        store.write(name, lambda: [b"x"])
    assert ObjectStore.at("s3://bucket/ru").sizes() == {}
    assert list(store.sizes("hf/step-00000003")) == names[:1]
    assert sorted(store.sizes()) == sorted(names)


def test_a_bucket_that_is_missing_is_named(server: ObjectServer) -> None:
    with pytest.raises(RemoteReadError, match=r"s3://none/run/.*: cannot be written: there is no such bucket; create"):
        ObjectStore.at("s3://none/run").require_writable()
