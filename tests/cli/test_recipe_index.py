"""What commands say beside their output about the data that they read."""

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
Say = Callable[..., tuple[str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command on 40 samples, of which one names no file; give what it said on stdout and stderr."""
    folder = tmp_path / "data"
    generate_demo(folder, seed=1, train=40, heldout=4)
    rows = json.loads((folder / "train.json").read_text())
    next(row for row in rows if "image" in row)["image"] = "gone.png"
    (folder / "train.json").write_text(json.dumps(rows))
    settings = {
        "data.sources.0.path": folder / "train.json",
        "data.tokenizer": folder / "tokenizer.json",
        "data.index_cache": tmp_path / "kept",
        "data.max_bad_rate": 0.1,
        "cluster.ranks": 2,
        "cluster.hardware": "cpu-core",
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1)
    monkeypatch.setattr(measure, "_TOLD_EVERY", 30)

    def run(*command: object) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["mmtrain", *map(str, command), *overrides])
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        return out, err

    return run


@pytest.mark.parametrize("command", [("plan",), ("data", "group"), ("simulate",)])
def test_what_was_set_aside_and_what_was_known_is_told(say: Say, command: tuple[str, ...], tmp_path: Path) -> None:
    out, err = say(*command, RECIPE, "--json")
    assert json.loads(out)
    assert err.startswith(
        "reading headers: 30 samples so far\n1 of 40 samples are set aside (missing_image 1); the first"
    )
    assert err.rstrip().endswith("gone.png: no such file")
    assert "known" not in err
    _, err = say(*command, RECIPE, "--json")
    assert err.startswith(f"39 samples are known from the index kept in {tmp_path / 'kept'}\n1 of 40 samples")


def test_looking_at_data_says_how_it_goes(say: Say, tmp_path: Path) -> None:
    source = tmp_path / "data" / "train.json"
    out, err = say("data", "stats", source, "--recipe", RECIPE)
    assert "39 samples, 1 set aside" in out
    assert err == "reading headers: 30 samples so far\n"
    _, err = say("data", "stats", source, "--recipe", RECIPE)
    assert err == f"39 samples are known from the index kept in {tmp_path / 'kept'}\n"
    out, err = say("data", "check", source, "--recipe", RECIPE)
    assert "1 of them bad" in out
    assert "reading headers: 30 samples so far\n" in err
    assert re.search(r"\ndecoded (\d+) of \1$", err.rstrip())
