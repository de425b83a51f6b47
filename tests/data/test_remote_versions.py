"""Remote media in files of their own are looked at before a cached index is used, with few requests."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from mmtrain.data import build_index
from mmtrain.data.index import index_cache, media_versions
from mmtrain.data.index.media_versions import find_changed_remote
from mmtrain.data.remote.locations import remote_store
from mmtrain.data.remote.remote_files import FileVersion, RemoteFiles
from mmtrain.errors import RemoteReadError
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import png
from tests.data.file_server import FileServer, serve
from tests.data.rows import row

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def _cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cache small indexes as large ones, and forget versions and pauses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1)
    monkeypatch.setattr("mmtrain.data.remote.remote_files.FIRST_PAUSE_S", 0.0)
    remote_store.cache_clear()
    yield
    remote_store.cache_clear()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served") as files:
        yield files


def _recipe(recipe: MakeRecipe, folder: Path, root: str, names: list[str]) -> Recipe:
    """Write conversations to this machine about pictures below `root`."""
    rows = [row("<image>what?", "red", name) for name in names]
    (folder / "rows.json").write_text(json.dumps(rows))
    return recipe([], sources=[{"path": folder / "rows.json", "image_root": root}])


def _start(made: Recipe) -> tuple[int, int, list[str]]:
    """Build the index as a new process does; return usable and bad samples, and the notes."""
    remote_store.cache_clear()
    notes: list[str] = []
    index = build_index(made, notify=notes.append)
    return len(index.samples), len(index.quarantined), notes


def test_pictures_on_a_server_that_change_come_or_go(server: FileServer, recipe: MakeRecipe, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (server.folder / name).write_bytes(png())
    made = _recipe(recipe, tmp_path, server.url, ["a.png", "b.png", "c.png"])
    assert _start(made)[:2] == (2, 1)
    server.requests.clear()
    assert _start(made) == (2, 1, [])
    asked = {(method, path) for method, path, _ in server.requests}
    assert asked - {("GET", "/c.png")} == {("HEAD", "/a.png"), ("HEAD", "/b.png"), ("HEAD", "/c.png")}, "none is read"
    (server.folder / "a.png").write_bytes(png(width=40))
    assert _start(made) == (2, 1, [_note(1, f"{server.url}/a.png")])
    (server.folder / "c.png").write_bytes(png())
    assert _start(made) == (3, 0, [_note(1, f"{server.url}/c.png")])
    (server.folder / "b.png").unlink()
    assert _start(made) == (2, 1, [_note(1, f"{server.url}/b.png")])
    assert _start(made) == (2, 1, [])


def _note(count: int, first: str) -> str:
    return (
        f"{count} of 3 media files have changed since they were indexed, the first: {first}; reading all lengths anew"
    )


def test_of_many_pictures_some_are_asked_for(
    server: FileServer, recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_versions, "MAX_REQUESTS", 3)
    names = [f"{number}.png" for number in range(6)]
    for name in names:
        (server.folder / name).write_bytes(png())
    made = _recipe(recipe, tmp_path, server.url, names)
    _start(made)
    server.requests.clear()
    [note] = _start(made)[2]
    assert note.startswith(
        "of 6 media files 3 were looked at, and have not changed since they were indexed; the others"
    )
    assert note.endswith(f"remove {next((tmp_path / '.mmtrain-index').glob('*-1'))}")
    assert sorted(path for _, path, _ in server.requests) == ["/0.png", "/2.png", "/4.png"]


def test_a_server_that_does_not_answer_is_named(server: FileServer, recipe: MakeRecipe, tmp_path: Path) -> None:
    """The index stays: it is not broken."""
    (server.folder / "a.png").write_bytes(png())
    made = _recipe(recipe, tmp_path, server.url, ["a.png"])
    _start(made)
    server.token = "secret"
    with pytest.raises(RemoteReadError, match=r"a\.png: denied"):
        _start(made)
    server.token = None
    assert _start(made) == (1, 0, [])


def test_a_folder_of_an_object_store_is_listed(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request shows every picture that has changed or come."""
    store = fsspec.filesystem("memory")
    names = [f"{number}.png" for number in range(40)]
    for name in names[1:]:
        store.pipe(f"/pictures/{name}", png())
    made = _recipe(recipe, tmp_path, "memory://pictures", names)
    assert _start(made)[:2] == (39, 1)
    requests: list[str] = []
    version, listed = RemoteFiles.version, RemoteFiles.list_versions

    def counted_version(files: RemoteFiles, url: str) -> FileVersion:
        requests.append(url)
        return version(files, url)

    def counted_listing(files: RemoteFiles, url: str) -> dict[str, FileVersion] | None:
        """List as object stores do, which state versions as they do of a file."""
        requests.append(url)
        return {entry: version(files, entry) for entry in listed(files, url) or {}}

    monkeypatch.setattr(RemoteFiles, "version", counted_version)
    monkeypatch.setattr(RemoteFiles, "list_versions", counted_listing)
    assert _start(made) == (39, 1, [])
    assert requests == ["memory://pictures/"]
    store.pipe("/pictures/0.png", png())
    store.pipe("/pictures/7.png", png())
    indexed, bad, [note] = _start(made)
    assert (indexed, bad) == (40, 0)
    assert note.startswith("2 of 40 media files have changed")
    monkeypatch.setattr(RemoteFiles, "list_versions", listed)  # which states times otherwise than `version` does
    assert _start(made) == (40, 0, [])
    store.rm("/pictures", recursive=True)


@pytest.mark.parametrize(
    ("indexed", "today", "is_changed"),
    [
        (FileVersion(5, "a"), FileVersion(5, "a"), False),
        (FileVersion(5, "a"), FileVersion(6, "a"), True),
        (FileVersion(5, "a"), FileVersion(5, "b"), True),
        (FileVersion(5, "a"), FileVersion(5, ""), False),  # a server that states no version any more
        (None, None, False),
        (None, FileVersion(5, ""), True),
        (FileVersion(5, "a"), None, True),
    ],
)
def test_what_a_change_is(
    indexed: FileVersion | None, today: FileVersion | None, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_versions, "remote_version", lambda url: today)
    assert find_changed_remote({"https://host/a": indexed}) == (1, ["https://host/a"] * is_changed)
