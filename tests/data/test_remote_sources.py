"""Sources on a server: the same samples as from a folder, whatever the server does."""

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path

import fsspec
import numpy as np
import pytest

from mmtrain.balance import Grouping
from mmtrain.data import GroupStream, build_index
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.index.data_check import check_sources
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.data.loading.worker_pool import StepFailure, WorkerPool
from mmtrain.data.media.images import read_image_size
from mmtrain.data.media.media_bytes import Media
from mmtrain.data.remote import remote_files
from mmtrain.data.remote.block_cache import BlockCache
from mmtrain.data.remote.locations import (
    BLOCK_BYTES,
    RemoteSettings,
    RemoteStore,
    open_location,
    remote_store,
    trust_hosts,
)
from mmtrain.data.remote.remote_files import FileVersion, RemoteFiles, allow_redirects, redirect_hosts
from mmtrain.errors import DataError, RemoteReadError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import movie, parquet, png, tar, wav
from tests.data.file_server import DROP, SHORT, STALL, TRUNCATE, FileServer, serve
from tests.data.rows import row


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serve `tmp_path`/served, with an empty cache and without pauses between attempts."""
    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("MMTRAIN_REMOTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mmtrain.data.remote.remote_files.FIRST_PAUSE_S", 0.0)
    remote_store.cache_clear()
    with serve(folder) as files:
        yield files
    remote_store.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[FileServer]:
    """Another server, by another name of this machine, with one picture."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "there.png").write_bytes(png())
    with serve(tmp_path / "elsewhere") as files:
        files.url = files.url.replace("127.0.0.1", "localhost")
        yield files


SECRETS = {"X-Api-Key": "secret", "Authorization": "Bearer secret", "Cookie": "secret"}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that the user's own settings of `fsspec` add, in the two ways that there are."""
    conf = {"headers": SECRETS, "client_kwargs": {"headers": {"X-Session": "secret"}}}
    monkeypatch.setitem(fsspec.config.conf, "http", conf)
    monkeypatch.setattr(remote_files, "_redirect_hosts", set())


@pytest.mark.usefixtures("secrets")
def test_a_redirect_to_another_host_is_refused(server: FileServer, elsewhere: FileServer) -> None:
    server.redirects["/a.png"] = f"{elsewhere.url}/there.png"
    with pytest.raises(RemoteReadError, match=r"/a.png: the server redirects to http://localhost:\d+; allowed: itself"):
        open_location(f"{server.url}/a.png").read()
    assert elsewhere.requests == []
    assert len(server.requests) <= 2, "it is asked for size and version once or twice, and not again"


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("allowed", ["localhost", "*localhost"])
def test_a_redirect_to_a_named_host_is_followed_without_secrets(
    server: FileServer, elsewhere: FileServer, allowed: str
) -> None:
    server.redirects["/a.png"] = f"{elsewhere.url}/there.png"
    allow_redirects([allowed])
    assert open_location(f"{server.url}/a.png").read() == png()
    assert all({name.lower() for name in SECRETS} < headers.keys() for headers in server.headers)
    assert elsewhere.headers
    assert [headers for headers in elsewhere.headers if "secret" in "".join(headers.values())] == []
    assert elsewhere.ranges_of("there.png")[-1] is not None


@pytest.mark.usefixtures("secrets")
def test_a_redirect_on_the_same_server_is_followed_with_all_headers(server: FileServer) -> None:
    (server.folder / "b.png").write_bytes(png())
    server.redirects["/a.png"] = "/b.png"
    assert open_location(f"{server.url}/a.png").read() == png()
    assert all("x-api-key" in headers for headers in server.headers)


def test_hosts_of_a_recipe_are_trusted(monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe]) -> None:
    monkeypatch.setattr(remote_files, "_redirect_hosts", set())
    sources = [{"path": "https://One.example/a.json"}, {"path": "s3://bucket/a.tar"}, {"path": "here.json"}]
    trust_hosts(recipe([], sources=sources, limits={"redirect_hosts": ["*.cdn.example"]}).data)
    assert redirect_hosts() == {"one.example", "*.cdn.example"}


def _write_all_formats(folder: Path) -> None:
    for number in range(3):
        (folder / f"a {number}.png").write_bytes(png(width=16 + 8 * number))
    rows = [row("<image>what?", f"{number}", f"a {number}.png") for number in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (folder / "rows.json").write_text(json.dumps(rows))
    for shard in range(2):
        members = {f"{number}.png": png(width=8 * (1 + number)) for number in range(3)}
        texts = {f"{number}.txt": b"a red square" for number in range(3)}
        tar(folder / f"shard-{shard}.tar", dict(sorted((members | texts).items())))
    parquet(folder / "cells.parquet", {"caption": ["x"] * 5, "image": [png(width=8 + 8 * n) for n in range(5)]})


def _samples(source: SourceSettings) -> list[Sample]:
    samples = list(read_samples(source, LimitSettings()))
    assert not [sample for sample in samples if isinstance(sample, Quarantined)]
    return [sample for sample in samples if isinstance(sample, Sample)]


def _content(medium: Media) -> bytes:
    with medium.open() as file:
        return file.read()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "shard-{0..1}.tar", "shard-*.tar", "cells.parquet"])
def test_samples_and_their_bytes_are_those_of_the_folder(server: FileServer, name: str) -> None:
    _write_all_formats(server.folder)
    here = _samples(SourceSettings(path=server.folder / name))
    there = _samples(SourceSettings(path=f"{server.url}/{name}"))
    assert [(s.id, s.index, s.turns) for s in there] == [(s.id, s.index, s.turns) for s in here]
    for left, right in zip(here, there, strict=True):
        assert [_content(medium) for medium in right.images] == [_content(medium) for medium in left.images]


def test_an_index_is_that_of_the_folder(server: FileServer, recipe: Callable[..., Recipe]) -> None:
    _write_all_formats(server.folder)
    names = ("rows.jsonl", "shard-{0..1}.tar", "cells.parquet")
    here = build_index(recipe([], sources=[{"path": server.folder / name} for name in names]))
    there = build_index(recipe([], sources=[{"path": f"{server.url}/{name}"} for name in names]))
    assert there.content_sha256 == here.content_sha256
    assert np.array_equal(there.lengths.tokens, here.lengths.tokens)
    assert len(there.lengths.tokens) == 3 + 6 + 5


def test_all_kinds_of_media_are_decoded(server: FileServer) -> None:
    (server.folder / "media").mkdir()
    files = {"p.png": png(), "s.wav": wav(), "v.mp4": movie(["red", "blue"])}
    for name, content in files.items():
        (server.folder / "media" / name).write_bytes(content)
    entry = {**row("<image><audio><video>?", "yes", "p.png"), "audio": "s.wav", "video": "v.mp4"}
    (server.folder / "all.jsonl").write_text(json.dumps(entry))
    source = SourceSettings(path=f"{server.url}/all.jsonl", image_root=f"{server.url}/media")
    report = check_sources([source])
    assert (report.bad, report.media) == ((), {"image": 1, "audio": 1, "video": 1})


@pytest.mark.parametrize("fault", [DROP, TRUNCATE, SHORT, 500, 503, 429])
def test_a_failed_request_is_repeated(server: FileServer, fault: str | int) -> None:
    content = np.random.default_rng(0).bytes(1000)
    (server.folder / "file").write_bytes(content)
    remote_store().version(f"{server.url}/file")
    server.faults = [fault, fault]
    assert open_location(f"{server.url}/file").read() == content
    assert len(server.ranges_of("file")) >= 3


def test_a_server_that_does_not_answer_is_asked_again(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMTRAIN_REMOTE_TIMEOUT_S", "0.1")
    (server.folder / "file").write_bytes(b"content")
    server.faults = [STALL]
    assert open_location(f"{server.url}/file").read() == b"content"
    assert len(server.ranges_of("file")) == 2


def test_pauses_grow_and_end(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtrain.data.remote.remote_files.FIRST_PAUSE_S", 0.5)
    (server.folder / "file").write_bytes(b"content")
    server.faults = [503] * 4
    pauses: list[float] = []
    files = RemoteFiles(timeout_s=60, attempts=4, sleep=pauses.append)
    url = f"{server.url}/file"
    with pytest.raises(RemoteReadError, match="cannot be reached after 4 attempts: status 503; check network"):
        files.read(url, 0, 7, files.version(url))
    assert [low <= pause <= 1.5 * low for pause, low in zip(pauses, (0.5, 1, 2), strict=True)] == [True] * 3


def test_a_server_without_ranges_sends_whole_files(server: FileServer) -> None:
    server.has_ranges = False
    content = np.random.default_rng(0).bytes(2 * BLOCK_BYTES + 10)
    (server.folder / "file").write_bytes(content)
    with open_location(f"{server.url}/file") as file:
        file.seek(BLOCK_BYTES + 5)
        assert file.read(10) == content[BLOCK_BYTES + 5 :][:10]
        file.seek(0)
        assert file.read() == content
    assert len(server.ranges_of("file")) == 1


def test_only_blocks_that_are_needed_are_fetched_and_only_once(server: FileServer) -> None:
    content = np.random.default_rng(0).bytes(6 * BLOCK_BYTES)
    (server.folder / "file").write_bytes(content)
    with open_location(f"{server.url}/file") as file:
        file.seek(4 * BLOCK_BYTES + 7)
        assert file.read(5) == content[4 * BLOCK_BYTES + 7 :][:5]
    assert server.ranges_of("file") == [f"bytes={4 * BLOCK_BYTES}-{5 * BLOCK_BYTES - 1}"]
    for _ in range(2):
        with open_location(f"{server.url}/file") as file:
            assert file.read() == content
    spans = server.ranges_of("file")[1:]
    assert spans == [
        f"bytes=0-{BLOCK_BYTES - 1}",
        f"bytes={BLOCK_BYTES}-{3 * BLOCK_BYTES - 1}",
        f"bytes={3 * BLOCK_BYTES}-{6 * BLOCK_BYTES - 1}",
    ]


def test_a_file_that_changes_while_in_use_is_an_error(server: FileServer) -> None:
    path = server.folder / "file"
    path.write_bytes(b"a" * 3 * BLOCK_BYTES)
    with open_location(f"{server.url}/file") as file:
        file.read(10)
        path.write_bytes(b"b" * 3 * BLOCK_BYTES)
        file.seek(2 * BLOCK_BYTES)
        with pytest.raises(RemoteReadError, match="changed while"):
            file.read(10)
    remote_store.cache_clear()  # as another start does
    with open_location(f"{server.url}/file") as file:
        assert file.read(1) == b"b", "blocks of the older version are not taken for those of the newer"


def test_a_denied_file_is_no_bad_sample(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_all_formats(server.folder)
    server.token = "secret-of-this-test"
    source = SourceSettings(path=f"{server.url}/rows.jsonl")
    with pytest.raises(RemoteReadError, match=r"rows.jsonl: denied \(status 403\); credentials come from the envir"):
        _samples(source)
    import fsspec.config

    header = {"client_kwargs": {"headers": {"Authorization": f"Bearer {server.token}"}}}
    monkeypatch.setitem(fsspec.config.conf, "http", header)  # as FSSPEC_HTTP does in the environment
    remote_store.cache_clear()
    assert len(_samples(source)) == 3


def test_outages_stop_reading_and_missing_files_are_quarantined(server: FileServer) -> None:
    _write_all_formats(server.folder)
    (server.folder / "a 1.png").unlink()
    source = SourceSettings(path=f"{server.url}/rows.jsonl")
    report = check_sources([source])
    assert [(bad.index, bad.kind) for bad in report.bad] == [(1, "missing_image")]
    (server.folder / "b.jsonl").write_text(json.dumps(row("<image>?", "yes", "shard-0.png")))
    (server.folder / "shard-0.png").write_bytes(png())
    [last] = _samples(SourceSettings(path=f"{server.url}/b.jsonl"))
    server.faults = [503] * 100
    with pytest.raises(RemoteReadError, match="cannot be reached"):
        read_image_size(last.images[0], 1000)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("https://user:password@host/x.json", "user name or password"),
        ("https://host/x.json?token=password", r"`\?` or `#`"),
        ("s3:///x.json", "without a host or bucket"),
        ("simplecache::https://host/x", None),
        ("https://host/a::b", "chain of URLs"),
        ("https://host/../x.json", r"`\.\.` in a URL"),
    ],
)
def test_urls_with_credentials_or_without_a_place_are_rejected(path: str, message: str | None) -> None:
    if message is None:
        assert SourceSettings(path=path).path == Path(path), "no URL, so a strange file name"
        return
    with pytest.raises(ValueError, match=message) as caught:
        SourceSettings(path=path)
    assert "password" not in str(caught.value.errors(include_input=False)[0]["msg"]).replace("or password", "")  # type: ignore[attr-defined]


def test_file_urls_are_paths_of_this_machine() -> None:
    assert SourceSettings(path="file:///data/x.json").path == Path("/data/x.json")
    kept = SourceSettings(path="https://host/a/b.json")
    assert SourceSettings.model_validate(kept.model_dump(mode="json")) == kept


def test_unknown_protocols_and_missing_packages_are_named(server: FileServer) -> None:
    with pytest.raises(DataError, match="unknown protocol nonsense"):
        open_location("nonsense://host/x")
    if find_spec("gcsfs") is None:
        with pytest.raises(DataError, match="the protocol gs needs the `gcsfs` package"):
            open_location("gs://bucket/x")
    with pytest.raises(DataError, match=r"rows\.jsonl: no such file"):
        _samples(SourceSettings(path=f"{server.url}/rows.jsonl"))


@pytest.fixture
def bucket(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the server an S3 store for this process; return the folder that it serves as s3://bucket."""
    s3fs = pytest.importorskip("s3fs")
    server.folder.joinpath("bucket").mkdir()
    settings = {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "MAX_ATTEMPTS": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield server.folder / "bucket"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "shard-{0..1}.tar", "shard-*.tar", "cells.parquet"])
def test_samples_of_an_s3_bucket_are_those_of_the_folder(bucket: Path, name: str) -> None:
    _write_all_formats(bucket)
    here = _samples(SourceSettings(path=bucket / name))
    there = _samples(SourceSettings(path=f"s3://bucket/{name}"))
    assert [(s.id, s.index, s.turns) for s in there] == [(s.id, s.index, s.turns) for s in here]
    for left, right in zip(here, there, strict=True):
        assert [_content(medium) for medium in right.images] == [_content(medium) for medium in left.images]


@pytest.mark.parametrize("fault", [DROP, TRUNCATE, SHORT, 503])
def test_a_failed_request_to_s3_is_repeated(server: FileServer, bucket: Path, fault: str | int) -> None:
    content = np.random.default_rng(0).bytes(1000)
    (bucket / "file").write_bytes(content)
    remote_store().version("s3://bucket/file")
    server.faults = [fault, fault]
    assert open_location("s3://bucket/file").read() == content
    assert len(server.ranges_of("bucket/file")) >= 3


def test_what_s3_does_not_have_or_denies_is_said_at_once(server: FileServer, bucket: Path) -> None:
    for missing in ("s3://bucket/none.json", "s3://other/none.json"):
        with pytest.raises(DataError, match=r"none\.json: no such file"):
            _samples(SourceSettings(path=missing))
    (bucket / "file").write_bytes(b"content")
    server.token = "secret"
    with pytest.raises(RemoteReadError, match=r"denied.*credentials come from the environment"):
        open_location("s3://bucket/file").read()


@pytest.fixture
def hub_folder(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the server a Hugging Face hub for this process; return the folder that is hf://datasets/team/set there."""
    hub = pytest.importorskip("huggingface_hub")
    import fsspec.config

    folder = server.folder / "datasets" / "team" / "set"
    folder.mkdir(parents=True)
    settings = {"endpoint": server.url, "token": "token-of-this-test"}  # as FSSPEC_HF_ENDPOINT does in the environment
    monkeypatch.setitem(fsspec.config.conf, "hf", settings)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it repeats some requests itself
    hub.HfFileSystem.clear_instance_cache()
    yield folder
    hub.HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "shard-{0..1}.tar", "shard-*.tar", "cells.parquet"])
def test_samples_of_a_data_set_of_the_hub_are_those_of_the_folder(hub_folder: Path, name: str) -> None:
    _write_all_formats(hub_folder)
    here = _samples(SourceSettings(path=hub_folder / name))
    there = _samples(SourceSettings(path=f"hf://datasets/team/set/{name}"))
    assert [(s.id, s.index, s.turns) for s in there] == [(s.id, s.index, s.turns) for s in here]
    for left, right in zip(here, there, strict=True):
        assert [_content(medium) for medium in right.images] == [_content(medium) for medium in left.images]


@pytest.mark.parametrize("fault", [DROP, TRUNCATE, SHORT, 500, 503])
def test_a_failed_request_to_the_hub_is_repeated(server: FileServer, hub_folder: Path, fault: str | int) -> None:
    content = np.random.default_rng(0).bytes(1000)
    (hub_folder / "file").write_bytes(content)
    remote_store().version("hf://datasets/team/set/file")
    server.faults = [fault, fault]
    assert open_location("hf://datasets/team/set/file").read() == content
    assert not server.faults


def test_what_the_hub_does_not_have_or_denies_is_said_at_once(server: FileServer, hub_folder: Path) -> None:
    from huggingface_hub import HfFileSystem

    (hub_folder / "file").write_bytes(b"content")
    for missing in ("hf://datasets/team/set/none.json", "hf://datasets/team/other/none.json"):
        with pytest.raises(DataError, match=r"none\.json: no such file"):
            _samples(SourceSettings(path=missing))
    server.token = "another"
    remote_store.cache_clear()
    HfFileSystem.clear_instance_cache()
    with pytest.raises(RemoteReadError, match=r"denied.*credentials come from the environment"):
        open_location("hf://datasets/team/set/file").read()


def test_of_a_file_of_the_hub_only_blocks_that_are_needed_are_fetched(server: FileServer, hub_folder: Path) -> None:
    content = np.random.default_rng(0).bytes(12 * BLOCK_BYTES)
    (hub_folder / "file").write_bytes(content)
    with open_location("hf://datasets/team/set/file") as file:
        file.seek(4 * BLOCK_BYTES + 7)
        assert file.read(5) == content[4 * BLOCK_BYTES + 7 :][:5]
    spans = [span for method, _, span in server.requests if method == "GET" and span is not None]
    assert spans == [f"bytes={4 * BLOCK_BYTES}-{5 * BLOCK_BYTES - 1}"]


def test_a_file_of_the_hub_that_changes_while_in_use_is_an_error(hub_folder: Path) -> None:
    path = hub_folder / "file"
    path.write_bytes(b"a" * 3 * BLOCK_BYTES)
    with open_location("hf://datasets/team/set/file") as file:
        file.read(10)
        path.write_bytes(b"b" * 3 * BLOCK_BYTES)
        file.seek(2 * BLOCK_BYTES)
        with pytest.raises(RemoteReadError, match="changed while"):
            file.read(10)


@pytest.fixture
def google_bucket(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the server a Google Cloud Storage for this process; return the folder that it serves as gs://bucket."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # or it asks for the kind of bucket by gRPC
    gcsfs = pytest.importorskip("gcsfs")
    import fsspec.config

    (server.folder / "bucket").mkdir()
    settings = {"endpoint_url": server.url, "token": "anon"}  # as FSSPEC_GS_TOKEN does in the environment
    monkeypatch.setitem(fsspec.config.conf, "gs", settings)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield server.folder / "bucket"
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "shard-{0..1}.tar", "shard-*.tar", "cells.parquet"])
def test_samples_of_a_google_bucket_are_those_of_the_folder(google_bucket: Path, name: str) -> None:
    _write_all_formats(google_bucket)
    here = _samples(SourceSettings(path=google_bucket / name))
    there = _samples(SourceSettings(path=f"gs://bucket/{name}"))
    assert [(s.id, s.index, s.turns) for s in there] == [(s.id, s.index, s.turns) for s in here]
    for left, right in zip(here, there, strict=True):
        assert [_content(medium) for medium in right.images] == [_content(medium) for medium in left.images]


@pytest.mark.parametrize("fault", [DROP, TRUNCATE, SHORT, 503])
def test_a_failed_request_to_google_is_repeated(server: FileServer, google_bucket: Path, fault: str | int) -> None:
    content = np.random.default_rng(0).bytes(1000)
    (google_bucket / "file").write_bytes(content)
    remote_store().version("gs://bucket/file")
    server.faults = [fault, fault]
    assert open_location("gs://bucket/file").read() == content
    assert not server.faults


def test_what_google_does_not_have_or_denies_is_said_at_once(server: FileServer, google_bucket: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        _samples(SourceSettings(path="gs://bucket/none.json"))
    (google_bucket / "file").write_bytes(b"content")
    server.token = "secret"
    with pytest.raises(RemoteReadError, match=r"denied.*credentials come from the environment"):
        open_location("gs://bucket/file").read()


def test_other_file_systems_of_fsspec_are_read_and_watched(server: FileServer) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/box/a.png", png())
    memory.pipe("/box/rows.jsonl", json.dumps(row("<image>?", "yes", "a.png")).encode())
    [sample] = _samples(SourceSettings(path="memory://box/*.jsonl"))
    assert sample.images[0].open().read() == png()
    memory.pipe("/box/b", b"1" * 10)
    version = remote_store().version("memory://box/b")
    memory.pipe("/box/b", b"2" * 11)
    with pytest.raises(RemoteReadError, match="changed while in use"):
        remote_store().files.read("memory://box/b", 0, 10, version)
    memory.rm("/box", recursive=True)


@pytest.mark.parametrize("path", ["../x.png", "a/../../x.png", "%2e%2e/x.png", "/x.png", "http://other/x.png"])
def test_media_outside_of_the_folder_are_not_fetched(server: FileServer, path: str) -> None:
    (server.folder / "in").mkdir()
    (server.folder / "in" / "rows.jsonl").write_text(json.dumps(row("<image>?", "yes", path)))
    [bad] = read_samples(SourceSettings(path=f"{server.url}/in/rows.jsonl"), LimitSettings())
    assert isinstance(bad, Quarantined)
    assert bad.kind in ("image_path", "image_url")
    assert {asked for _, asked, _ in server.requests} == {"/in/rows.jsonl"}


def test_a_cache_keeps_to_its_bound_and_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, max_bytes=1000)
    version = FileVersion(10_000, "1")
    for number in range(30):
        cache.store("u", version, number, bytes([number]) * 100)
        in_use = sum(path.stat().st_size for path in (tmp_path / "blocks").rglob("*-*"))
        assert in_use <= 1000
        if number == 5:
            for path in (tmp_path / "blocks").rglob("*-*"):
                os.utime(path, (1, 1 if path.name.endswith("-0") else 2))
    assert cache.load("u", version, 29, 100) == bytes([29]) * 100
    assert cache.load("u", version, 0, 100) is None
    assert cache.load("u", FileVersion(10_000, "2"), 29, 100) is None
    [newest] = (tmp_path / "blocks").rglob("*-29")
    newest.write_bytes(b"cut")
    assert cache.load("u", version, 29, 100) is None, "a block that is too short is not believed"
    cache.store("u", version, 100, bytes(2000))
    assert not list((tmp_path / "blocks").rglob("*-100")), "larger than the cache"


def test_settings_of_the_machine_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MMTRAIN_REMOTE_CACHE_GIB: found 'much', allowed: a number above 0"):
        RemoteSettings.from_environment({"MMTRAIN_REMOTE_CACHE_GIB": "much"})
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="set the environment variable MMTRAIN_REMOTE_CACHE"):
        BlockCache(tmp_path / "file" / "below", 1000)


def test_processes_share_blocks(server: FileServer, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(2 * BLOCK_BYTES)
    (server.folder / "file").write_bytes(content)
    url = f"{server.url}/file"
    stores = [RemoteStore(RemoteFiles(60, 2), BlockCache(tmp_path / "shared", 1 << 30)) for _ in range(2)]
    assert stores[0].blocks(url, 0, 2) == [content[:BLOCK_BYTES], content[BLOCK_BYTES:]]
    assert stores[1].blocks(url, 1, 1) == [content[BLOCK_BYTES:]]
    assert len(server.ranges_of("file")) == 1


@pytest.mark.slow  # 3 s: it starts a worker
def test_workers_expect_the_versions_that_were_indexed(server: FileServer, recipe: Callable[..., Recipe]) -> None:
    members = {f"{number}.{end}": png() if end == "png" else b"red" for number in range(4) for end in ("png", "txt")}
    shard = tar(server.folder / "shard.tar", members)
    made = recipe([], sources=[{"path": f"{server.url}/shard.tar"}])
    index = build_index(made)
    stream = GroupStream(index.lengths, Grouping(made.data.seq_len, 100, 2), seed=0)
    builder = StepBuilder(index, stream, made)
    remote_store().version(f"{server.url}/shard.tar")
    tar(shard, members | {"0.png": png("blue")})
    (server.folder.parent / "cache" / "blocks").rename(server.folder.parent / "evicted")
    (server.folder.parent / "cache" / "blocks").mkdir()
    needed = (PayloadNeed("vision", 0, media=True),)
    with WorkerPool[int](builder, 1, lambda _: None) as pool:
        pool.submit(0, StepRequest(0, {"vision": 1, "llm": 1}, {"vision": 1, "llm": 1}, needed))
        received = None
        while received is None:
            for pipe in wait(pool.pipes):
                received = pool.receive(pipe)  # type: ignore[arg-type]
    failure = received[1]
    assert isinstance(failure, StepFailure)
    assert isinstance(failure.error(0), RemoteReadError)
    assert "shard.tar: it changed while" in str(failure.error(0))


def test_no_other_user_reads_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    version = FileVersion(1000, "1")
    cache = BlockCache(folder, max_bytes=1000)
    cache.store("u", version, 0, b"private")
    with cache.fetching("u", version, 1):
        pass
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert len(modes) >= 7
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
