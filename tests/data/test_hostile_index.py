"""Whatever a parser does with a file of the data, the index names the file, and sets aside what the file holds."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mmtrain import limited_reads
from mmtrain.data import build_index
from mmtrain.data.media import item_readers
from mmtrain.errors import DataError
from mmtrain.recipe.settings.schema import Recipe
from tests.data.model_folders import FAMILIES, write_folder
from tests.data.rows import row

MakeRecipe = Callable[..., Recipe]
Picture = Callable[..., Path]
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
HOSTILE_TEMPLATES = {
    "endless": (LOOP, "more than 0.5 s of processor time"),
    "endless in one call": ("{{ (7 ** 9999999) % 3 }}" * 50 + LOOP, "more than 0.5 s of processor time"),
    "gigabytes of text": ("{{ 'x' * 100000000000 }}", "MemoryError"),
    "gigabytes of list": (
        "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "memory|processor time|MemoryError",
    ),
}


@pytest.fixture
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_reads, "MAX_PROCESSOR_S", 0.5)


@pytest.mark.usefixtures("short_of_time")
@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_hostile_chat_template_is_one_error(recipe: MakeRecipe, tmp_path: Path, name: str) -> None:
    source, reason = HOSTILE_TEMPLATES[name]
    family = FAMILIES["qwen2"]
    folder = write_folder(tmp_path / "model", family, chat_template=source)
    made = recipe([row("q", "a")], tokenizer=folder, limits={"max_reading_bytes": 1 << 28})
    with pytest.raises(DataError, match=f"data.tokenizer: .*model.*({reason})"):
        build_index(made)


def crash_on(monkeypatch: pytest.MonkeyPatch, names: dict[str, Callable[[], object]]) -> None:
    """Let the reader of images do what a broken library may do with files of these names."""
    read_items = item_readers.read_vision_items

    def reading(kind: Any, media: Any, *settings: Any) -> Any:
        names.get(media.name, lambda: None)()
        return read_items(kind, media, *settings)

    monkeypatch.setattr(item_readers, "read_vision_items", reading)


def loop() -> None:
    while True:
        pass


@pytest.mark.usefixtures("short_of_time")
def test_images_whose_reader_dies_are_set_aside(
    recipe: MakeRecipe, picture: Picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.png" for number in range(6)]
    for name in names:
        picture(name)
    crash_on(monkeypatch, {"1.png": os.abort, "3.png": loop, "4.png": lambda: bytearray(1 << 40)})
    notes: list[str] = []
    index = build_index(recipe([row("<image>", "a", name) for name in names]), notify=notes.append)
    assert [sample.images[0].name for sample in index.samples] == ["0.png", "2.png", "5.png"]
    reasons = [entry.reason for entry in index.quarantined]
    assert [entry.kind for entry in index.quarantined] == ["deadly"] * 3
    for reason, name, how in zip(
        reasons, ("1.png", "3.png", "4.png"), ("SIGABRT", "processor time", "memory"), strict=True
    ):
        assert str(tmp_path / name) in reason
        assert how in reason
    assert len(notes) == 3


def test_of_several_threads_the_one_is_found_whose_image_ends_the_process(
    recipe: MakeRecipe, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.png" for number in range(40)]
    for name in names:
        picture(name)
    crash_on(monkeypatch, {"17.png": os.abort})
    monkeypatch.setattr("mmtrain.data.index.sample_lengths._TASK_FILES", 2)
    # Each task seems to wait for a disk, so that threads read.
    monkeypatch.setattr("mmtrain.data.index.media_versions.time.thread_time", lambda: 0.0)
    index = build_index(recipe([row("<image>", "a", name) for name in names]))
    assert [entry.id for entry in index.quarantined] == ["17"]


def test_a_parquet_file_whose_reader_aborts_is_named(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"conversations": turns * 6}), path, row_group_size=2)
    made = recipe([], sources=[{"path": path}])
    iterate = pyarrow.parquet.ParquetFile.iter_batches

    def aborting(self: Any, size: int, groups: list[int], *rest: Any, **options: Any) -> Any:
        if groups == [1]:
            os.abort()
        return iterate(self, size, groups, *rest, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", aborting)
    index = build_index(made)
    assert len(index.samples) == 4
    (bad,) = index.quarantined
    assert bad.kind == "parquet_broken"
    assert f"{path}, row group 1: reading it ended the process by SIGABRT" in bad.reason
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", lambda *_, **__: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(DataError, match=f"{path}: reading it ended the process by SIGSEGV"):
        build_index(made)


@pytest.mark.skipif(not limited_reads.can_leave_network(), reason="the kernel lets nobody leave the network here")
def test_what_reads_files_of_this_machine_reaches_no_network(
    recipe: MakeRecipe, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture("a.png")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def connect() -> None:
            socket.create_connection(address, timeout=5).close()

        crash_on(monkeypatch, {"a.png": connect})
        with pytest.raises(OSError, match="unreachable"):
            build_index(recipe([row("<image>", "a", "a.png")]))
