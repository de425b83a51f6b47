"""`mmtrain evaluate` on a model that draws: files, losses by timestep, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.data import build_index, load_tokenizer
from mmtrain.data.media.images import Uint8Array
from mmtrain.errors import UserError
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.runtime.evaluation.drawer import NUM_LOSS_BUCKETS, Drawer, SamplingOptions, without_user_text
from mmtrain.runtime.evaluation.drawn_files import DRAWN_FOLDER, GRID_FILE, LIST_FILE, TARGET_FOLDER
from mmtrain.runtime.evaluation.score_drawings import DrawingRequest
from mmtrain.runtime.world import World
from tests.flow.drawing import recipe, write_samples
from tests.pixels import undecodable_png
from tests.runtime.models import CPU, evaluated, randomize, run_folder, whole

ROOT = Path(__file__).parents[2]
ALONE = World(0, 1, CPU)
OPTIONS = SamplingOptions(steps=3, guidance=1.0, seed=0)


def pixels(path: Path) -> Uint8Array:
    with Image.open(path) as image:
        return np.asarray(image)


def settings_of(folder: Path, **changes: Any) -> Recipe:
    validation = [{"path": folder / "train.json"}]
    return recipe(folder, model__generator__prediction="flow", data__validation=validation, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path) -> Recipe:
    return settings_of(folder)


@pytest.fixture(scope="module")
def units(settings: Recipe) -> dict[str, StageModule]:
    units = whole(settings)
    randomize(units.values())
    return units


@pytest.fixture(scope="module")
def drawer(settings: Recipe, units: dict[str, StageModule]) -> Drawer:
    tokenizer = load_tokenizer(settings.data.tokenizer_path)
    return Drawer(units, settings, build_index(settings, "validation"), tokenizer, ALONE)


def test_a_run_answers_and_draws(settings: Recipe, units: dict[str, StageModule], tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", settings, units)
    result = evaluated(run, limit=2, drawing=DrawingRequest(samples=4, steps=2))
    drawings = result.drawings
    assert drawings is not None
    assert result.total.questions == 2
    assert (drawings.samples, drawings.images, drawings.sampler, drawings.guidance) == (4, 6, "euler", 1.0)
    samples = run / "samples"
    rows = json.loads((samples / LIST_FILE).read_text())
    assert [row["caption"] for row in rows][:3] == ["draw red", "draw lime and red", "draw lime and red"]
    assert [row["place"] for row in rows][:3] == [0, 0, 1]
    for row in rows:
        assert pixels(samples / DRAWN_FOLDER / row["file"]).shape == (8, 8, 3)
    target = pixels(samples / TARGET_FOLDER / rows[0]["file"])
    assert np.array_equal(target, pixels(Path(rows[0]["source"]).parent / "red.png"))
    assert pixels(samples / GRID_FILE).shape[1] > 4 * 3 * 72  # in each of four columns: target, drawn, blanked
    figures = json.loads(result.to_json())
    assert figures["drawing_loss"] == pytest.approx(np.mean([bucket.loss for bucket in drawings.losses]))
    assert len(figures["drawings"]["losses"]) == NUM_LOSS_BUCKETS
    assert "Denoising loss on 6 held-out images" in result.to_text()
    assert "draw red" not in [example.question for example in result.examples]
    again = evaluated(run, limit=2, drawing=DrawingRequest(samples=2, steps=1))
    assert again.drawings is not None
    assert len([*(samples / DRAWN_FOLDER).iterdir()]) == again.drawings.images < drawings.images


@pytest.mark.slow
def test_the_command_says_how_many_images_are_drawn(
    settings: Recipe, units: dict[str, StageModule], tmp_path: Path
) -> None:
    """With captions, then without; a part of the steps counts as that part of the images."""
    run = run_folder(tmp_path / "run", settings, units)
    line = [sys.executable, "-m", "mmtrain", "evaluate", str(run), "--limit", "1", "--draw", "4", "--steps", "4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("drawn")]
    assert lines == ["drawn 3 of 6", "drawn 6 of 6"] * 2


def test_an_image_depends_on_its_sample_and_the_seed_alone(drawer: Drawer) -> None:
    together = drawer.draw([1, 2, 4], OPTIONS, blank=False)
    alone = drawer.draw([2], OPTIONS, blank=False)
    assert alone.images.keys() == {(2, 0), (2, 1)}
    for image_id, image in alone.images.items():
        assert np.abs(image.astype(int) - together.images[image_id]).max() <= 1
    other = drawer.draw([2], SamplingOptions(steps=3, guidance=1.0, seed=1), blank=False)
    assert np.abs(other.images[2, 0].astype(int) - alone.images[2, 0]).max() > 50
    three = [drawer.draw([number], OPTIONS, blank=False) for number in (1, 2, 4)]
    assert np.sum([part.squared_errors for part in three], axis=0) == pytest.approx(together.squared_errors, rel=1e-4)
    assert sum(part.num_elements for part in three) == together.num_elements == 4 * 8 * 8 * 3


def test_images_are_drawn_in_the_sizes_of_their_buckets(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, model__generator__image_size=12, model__generator__bucket_step=4)
    units = whole(settings)
    randomize(units.values())
    run = run_folder(tmp_path / "run", settings, units)
    result = evaluated(run, limit=1, drawing=DrawingRequest(samples=4, steps=1))
    assert result.drawings is not None
    shapes = set()
    for path in (run / "samples" / DRAWN_FOLDER).iterdir():
        shapes.add(pixels(path).shape)
        assert pixels(path).shape == pixels(run / "samples" / TARGET_FOLDER / path.name).shape
    assert shapes == {(12, 12, 3), (8, 16, 3)}  # of images of 8 x 8 and 8 x 12 pixels


def test_blanked_captions_say_nothing(drawer: Drawer) -> None:
    texts = [turn.text for turn in without_user_text(drawer.index.samples[4]).turns]
    assert texts == ["<image>", "<image>", "", "red"]  # what the assistant says stays
    for number in (1, 4):  # one names a colour, the other shows it
        sighted, blank = (drawer.draw([number], OPTIONS, blank=blank) for blank in (False, True))
        assert sighted.squared_errors != blank.squared_errors
        assert sighted.num_elements == blank.num_elements


def test_a_broken_target_is_left_out(folder: Path, tmp_path: Path) -> None:
    write_samples(tmp_path)
    (tmp_path / "red.png").write_bytes(undecodable_png((tmp_path / "red.png").read_bytes()))
    settings = settings_of(tmp_path, data__max_bad_rate=0.9)
    index, tokenizer = build_index(settings, "validation"), load_tokenizer(tmp_path / "tokenizer.json")
    drawer = Drawer(whole(settings), settings, index, tokenizer, ALONE)
    drawn = drawer.draw([1, 6], OPTIONS, blank=False)
    assert drawn.images.keys() == {(6, 0)}
    assert drawn.num_elements == 8 * 8 * 3
    assert [entry.index for entry in drawn.bad] == [1]


def test_what_cannot_be_drawn_is_refused(
    settings: Recipe, units: dict[str, StageModule], folder: Path, tmp_path: Path
) -> None:
    run = run_folder(tmp_path / "run", settings, units)
    with pytest.raises(UserError, match=r"--guidance: found 2, allowed for this run: 1.*context_dropout"):
        evaluated(run, drawing=DrawingRequest(guidance=2.0))
    with pytest.raises(UserError, match=r"--steps: found 1001, allowed: 1 to 1000"):
        evaluated(run, drawing=DrawingRequest(steps=1001))
    with pytest.raises(UserError, match=r"not empty and holds no drawn images"):
        evaluated(run, limit=1, drawing=DrawingRequest(samples=1, steps=1, folder=folder))
    with pytest.raises(UserError, match=r"--samples: .*train\.json is no folder"):
        evaluated(run, limit=1, drawing=DrawingRequest(samples=1, steps=1, folder=folder / "train.json"))
    plain = settings.model_copy(update={"model": settings.model.model_copy(update={"generator": None})})
    with pytest.raises(UserError, match=r"no model\.generator, so there is nothing to draw"):
        evaluated(run_folder(tmp_path / "other", plain), drawing=DrawingRequest(steps=2))
