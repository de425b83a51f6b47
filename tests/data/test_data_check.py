"""`mmtrain data check` decodes everything, with and without a recipe."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmtrain.cli.data_check import check_text
from mmtrain.data.index.data_check import check_sources, check_sources_for_recipe
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import movie, png, wav
from tests.data.rows import Row, row

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def mixed(tmp_path: Path) -> list[Row]:
    """Write good samples, samples with bad headers, and samples that turn out bad only when they are decoded."""
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(noise, "png")
    broken = bytearray(noise.getvalue())
    broken[200:300] = bytes(100)  # the header and the end are intact
    for name, content in {"a.png": png(), "b.png": bytes(broken), "c.mp4": movie(["red"]), "d.wav": wav()}.items():
        (tmp_path / name).write_bytes(content)
    media = {"audio": "d.wav", "video": "c.mp4"}
    return [
        row("<image>", "good", "a.png", name="0"),
        row("<image><image>", "good", "a.png", "a.png", name="1"),
        row("<image><image>", "broken", "a.png", "b.png", name="2"),
        row("<image>", "gone", "c.png", name="3"),
        row("<audio><video>", "good", name="4") | media,
        row("text", "good", name="5"),
        {"id": "6"},
    ]


def test_everything_is_decoded_for_no_model_in_particular(tmp_path: Path, mixed: list[Row]) -> None:
    (tmp_path / "x.json").write_text(json.dumps(mixed))
    progress: list[tuple[int, int]] = []
    report = check_sources([SourceSettings(path=tmp_path / "x.json")], lambda *a: progress.append(a))
    assert (report.samples, report.media) == (7, {"image": 1, "audio": 1, "video": 1})
    assert [(q.id, q.kind) for q in report.bad] == [("3", "missing_image"), ("6", "malformed"), ("2", "undecodable")]
    assert report.kinds == {"missing_image": 1, "malformed": 1, "undecodable": 1}
    assert report.seconds_of_sound == pytest.approx(0.1)
    assert not report.passed
    assert progress == [(i, 4) for i in range(1, 5)]
    text = check_text(report)
    assert text.startswith("7 samples, 3 of them bad; decoded without error: images 1, videos 1, clips 1 (0 s")
    assert "id '2': undecodable: " in text


def test_a_recipe_sets_the_limits(mixed: list[Row], recipe: MakeRecipe) -> None:
    made = recipe(mixed, max_images=1, max_bad_rate=0.6)
    report = check_sources_for_recipe(made, made.data.sources)
    kinds = {"3": "missing_image", "6": "malformed", "4": "no_audio", "1": "too_many_images", "2": "too_many_images"}
    assert {q.id: q.kind for q in report.bad} == kinds
    assert not report.passed
    report = check_sources_for_recipe(recipe(mixed, max_bad_rate=0.6), made.data.sources)
    assert {q.id: q.kind for q in report.bad} == {k: v for k, v in kinds.items() if k in "364"} | {"2": "undecodable"}
    assert report.passed
    assert report.media == {"image": 1}


def test_the_exit_code_depends_on_the_rate_of_bad_samples(
    tmp_path: Path, mixed: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmtrain.cli import app

    def run(*args: object) -> int:
        monkeypatch.setattr("sys.argv", ["mmtrain", "data", "check", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            app.main()
        return stop.value.code  # type: ignore[return-value]

    (tmp_path / "bad.json").write_text(json.dumps(mixed))
    (tmp_path / "good.json").write_text(json.dumps(mixed[:2]))
    assert run(tmp_path / "good.json") == 0
    assert "2 samples, 0 of them bad" in capsys.readouterr().out
    assert run(tmp_path / "bad.json", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["passed"], report["kinds"]["undecodable"]) == (7, False, 1)
    assert {"source", "index", "id", "kind", "reason"} == set(report["bad"][0])
    assert run(tmp_path / "bad.json", "--out", tmp_path / "bad.jsonl") == 1
    assert [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()] == report["bad"]
    assert run(tmp_path / "good.json", "--out", tmp_path / "bad.jsonl") == 0
    assert (tmp_path / "bad.jsonl").read_text() == "", "an older list would name samples that are good now"
    capsys.readouterr()
    assert run(tmp_path / "good.json", "--out", tmp_path / "gone" / "bad.jsonl") == 2
    assert "cannot write the list of bad samples" in capsys.readouterr().err
    assert run() == 2
    assert "nothing to check" in capsys.readouterr().err


def test_some_samples_of_each_kind_are_shown_and_the_number_of_the_others(tmp_path: Path) -> None:
    rows = [row("<image>", "gone", f"{number}.png", name=str(number)) for number in range(5)]
    (tmp_path / "x.json").write_text(json.dumps([*rows, {"id": "6"}]))
    text = check_text(check_sources([SourceSettings(path=tmp_path / "x.json")]))
    assert [name for name in "012345" if f"id '{name}'" in text] == ["0", "1", "2"]
    assert text.count("--out bad.jsonl lists all") == 1
    assert "and 2 more: --out" in text


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_an_empty_data_set_is_refused(tmp_path: Path, recipe: MakeRecipe, name: str) -> None:
    (tmp_path / name).write_text("[]" if name == "x.json" else "\n")
    sources = [SourceSettings(path=tmp_path / name)]
    with pytest.raises(DataError, match=rf"{name}: no samples"):
        check_sources(sources)
    with pytest.raises(DataError, match=rf"{name}: no samples"):
        check_sources_for_recipe(recipe([]), sources)
