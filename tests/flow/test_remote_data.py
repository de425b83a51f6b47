"""Runs whose data is on a server that fails now and then."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmtrain.data.remote.locations import open_location, remote_store
from mmtrain.program import Backward
from mmtrain.report import read_metrics
from tests.data.archives import tar
from tests.data.file_server import DROP, SHORT, TRUNCATE, serve
from tests.distributed import RanksFailed, fork_ranks
from tests.faults import FailAt
from tests.flow.runs import assert_same_end, request_for, run_all

pytestmark = pytest.mark.slow  # about 30 s


def test_a_run_on_a_failing_server_equals_one_on_a_folder_and_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    shutil.copytree(data / "images", served / "images")
    rows = json.loads((data / "train.json").read_text())
    (served / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:48]))
    members: dict[str, bytes] = {}
    for number, row in enumerate(rows[48:]):
        names = row.get("image", [])
        names = [names] if isinstance(names, str) else names
        for place, name in enumerate(names):
            members[f"{number:03}.{place}.png"] = (data / name).read_bytes()
        entry = {**row, "image": [f"{place}.png" for place in range(len(names))]}
        members[f"{number:03}.json"] = json.dumps(entry if names else row).encode()
    tar(served / "train.tar", members)
    monkeypatch.setenv("MMTRAIN_REMOTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MMTRAIN_REMOTE_CACHE_GIB", "0.00004")  # 43 kB: less than the data
    remote_store.cache_clear()
    with serve(served) as server:

        def sources(root: str | Path) -> str:
            return f"data.sources=[{{path: {root}/train.jsonl}}, {{path: {root}/train.tar}}]"

        settings = ("parallel.placement=unified", "data.workers=1")
        local = request_for(data, tmp_path / "local", sources(served), *settings)
        remote = request_for(data, tmp_path / "remote", sources(server.url), *settings)
        assert run_all(local, local) == ["", ""]
        server.faults = [DROP, TRUNCATE, 503, SHORT]
        with pytest.raises(RanksFailed, match="rank 1: died without a word"):
            run_all(remote, remote, faults=FailAt(1, 4, "kill", action=Backward))
        assert server.faults == []
        server.faults = [DROP, SHORT]
        resumed = replace(remote, resume=True)
        assert run_all(resumed, resumed) == ["", ""]
        assert_same_end(remote.run_dir, local.run_dir)
        assert [step["loss"] for step in read_metrics(remote.run_dir)] == [
            step["loss"] for step in read_metrics(local.run_dir)
        ]
        used = sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").rglob("*-*"))
        assert 0 < used <= 0.00004 * 2**30


def _read_all(rank: int, world_size: int, folder: Path, url: str, size: int, cache: Path) -> bool:
    """Read the file from the start in half of the processes and in pieces in the others, with a cache of its half."""
    os.environ["MMTRAIN_REMOTE_CACHE"] = str(cache)
    os.environ["MMTRAIN_REMOTE_CACHE_GIB"] = str(size / 2 / 2**30)
    remote_store.cache_clear()
    expected = np.random.default_rng(0).bytes(size)
    with open_location(url) as file:
        if rank % 2:
            return file.read() == expected
        starts = np.random.default_rng(rank).integers(0, size, 60).tolist()
        return all(file.seek(start) == start and file.read(5000) == expected[start:][:5000] for start in starts)


def test_processes_share_a_cache_that_is_too_small(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(np.random.default_rng(0).bytes(size))
    with serve(tmp_path / "served") as server:
        assert fork_ranks(4, _read_all, f"{server.url}/file", size, tmp_path / "cache") == [True] * 4
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").rglob("*-*")) <= size / 2
