"""Commands print remarks about the data they read to stderr."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mmtrain.cli import app
from mmtrain.data.index import index_cache
from mmtrain.data.index import sample_lengths as measure
from mmtrain.data.synthetic.demo import generate_demo

RECIPE = Path(__file__).parents[2] / "recipes/demo.yaml"
RunCommand = Callable[..., tuple[str, str]]


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run a command on 40 samples, one of which names a missing file; return its stdout and stderr."""
    folder = tmp_path / "data"
    generate_demo(folder, seed=1, train=40, heldout=4)
    rows = json.loads((folder / "train.json").read_text())
    next(row for row in rows if "image" in row)["image"] = "gone.png"
    (folder / "train.json").write_text(json.dumps(rows))
    settings = {
        "data.sources.0.path": folder / "train.json",
        "data.tokenizer": folder / "tokenizer.json",
        "data.index_cache": tmp_path / "cache",
        "data.max_bad_rate": 0.1,
        "cluster.ranks": 2,
        "cluster.hardware": "cpu-core",
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1)
    monkeypatch.setattr(measure, "_NOTIFY_EVERY_SAMPLES", 30)

    def run(*command: object) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["mmtrain", *map(str, command), *overrides])
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        return out, err

    return run


def from_cache(folder: Path) -> str:
    """Return what is said of an index that was cached, and how to renew it."""
    return (
        f"39 samples are known from the index cached in {folder / 'cache'}, and no media file that was looked at has "
        "changed since; to read all lengths anew, remove that folder"
    )


@pytest.mark.parametrize("command", [("plan",), ("data", "group"), ("simulate",)])
def test_quarantined_and_cached_samples_are_reported(
    run_command: RunCommand, command: tuple[str, ...], tmp_path: Path
) -> None:
    out, err = run_command(*command, RECIPE, "--json")
    assert json.loads(out)
    assert err.startswith(
        "reading headers: 30 samples so far\n1 of 40 samples are set aside (missing_image 1); the first"
    )
    assert err.rstrip().endswith("gone.png: no such file")
    assert "known" not in err
    _, err = run_command(*command, RECIPE, "--json")
    assert err.startswith(f"{from_cache(tmp_path)}\n1 of 40 samples")


def test_data_commands_report_their_progress(run_command: RunCommand, tmp_path: Path) -> None:
    source = tmp_path / "data" / "train.json"
    out, err = run_command("data", "stats", source, "--recipe", RECIPE)
    assert "39 samples, 1 others quarantined" in out
    assert err == "reading headers: 30 samples so far\n"
    _, err = run_command("data", "stats", source, "--recipe", RECIPE)
    assert err == from_cache(tmp_path) + "\n"
    out, err = run_command("data", "check", source, "--recipe", RECIPE)
    assert "1 of them bad" in out
    assert "reading headers: 30 samples so far\n" in err
    assert re.search(r"\ndecoded (\d+) of \1$", err.rstrip())
