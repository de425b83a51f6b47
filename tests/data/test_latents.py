"""Latents of images to draw: encoded once by the command, read by every step, and refused where they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.data.loading.payload import EncoderPayload
from mmtrain.errors import DataError, RecipeError
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.weights.encode_latents import load_autoencoder
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.data.archives import png
from tests.data.rows import Row, row
from tests.data.test_target_images import GENERATOR, drawing, drawing_tokenizer
from tests.models.generator.test_autoencoder import saved_vae

__all__ = ["drawing", "drawing_tokenizer", "run_mmtrain"]

SIDE, PATCH, SCALE = 16, 2, 4
ROWS = [row("<image>draw", "<image>", "see.png", "blue.png"), row("draw", "it: <image>", "red.png")]


@pytest.fixture
def latent_recipe(tmp_path: Path, drawing: Callable[..., Recipe]) -> Callable[..., Path]:
    """Write a recipe whose generator draws latents of an autoencoder in `vae`."""
    saved_vae(tmp_path / "vae")

    def write(rows: list[Row] = ROWS, **changes: Any) -> Path:
        plain = json.loads(drawing(rows).model_dump_json())
        plain["model"]["generator"] = {key: GENERATOR[key] for key in GENERATOR.keys() - {"channels"}} | {
            "patch": PATCH, "image_size": SIDE, "vae": "vae", "latents": "latents"
        } | changes  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(plain))
        return path

    return write


def payload_of(recipe: Recipe) -> EncoderPayload:
    """Load the images to draw of all samples, as one microbatch."""
    index = build_index(recipe)
    dp = {"vision": 1, "llm": 1, "generator": 1}
    meta = assign(0, 0, [np.arange(len(index.samples))], index.lengths, dp, dp)
    builder = BatchBuilder(index, recipe, (PayloadNeed("generator", 0, media=True),), dp)
    return builder.build(meta).encoders["generator"][0, 0]


def test_a_step_holds_the_latents_of_its_images(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
) -> None:
    path = latent_recipe()
    recipe = load_recipe(path).recipe
    assert recipe.model.generator is not None
    assert (recipe.model.generator.channels, recipe.model.generator.latent_scale) == (4, SCALE)
    with pytest.raises(DataError, match=r"latents holds no latents .*; run `mmtrain data latents` on this recipe"):
        payload_of(recipe)
    done = run_mmtrain("data", "latents", path)
    assert "latents: 2 latents added; 0 images had one" in done.stdout, done.stderr
    payload = payload_of(recipe)
    side = SIDE // SCALE // PATCH
    assert payload.rows == payload.cols == (side, side)
    assert payload.cells is not None
    assert payload.cells.dtype == np.float32
    import torch

    model, _ = load_autoencoder(tmp_path / "vae")
    blue, red = (
        torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, SIDE, SIDE) for colour in ((-1.0, -1, 1), (1.0, -1, -1))
    )
    for latent, cells in zip(model(torch.cat([blue, red])), np.split(payload.cells, 2), strict=True):
        patches = latent.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).reshape(cells.shape)
        np.testing.assert_allclose(cells, patches, atol=2e-3)
        assert patches.std() > 0.05  # else the comparison would prove nothing


def test_new_images_are_added_and_a_cut_record_is_written_again(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
) -> None:
    assert run_mmtrain("data", "latents", latent_recipe()).returncode == 0
    records = (tmp_path / "latents" / "latents.bin").read_bytes()
    keys = (tmp_path / "latents" / "keys.bin").read_bytes()
    (tmp_path / "latents" / "keys.bin").write_bytes(keys[:-1])  # as a run that was killed may leave it
    (tmp_path / "latents" / "latents.bin").write_bytes(records + b"more")
    (tmp_path / "green.png").write_bytes(png("green", 20, 10))
    path = latent_recipe([*ROWS, row("draw", "<image>", "green.png")])
    recipe = load_recipe(path).recipe
    with pytest.raises(DataError, match=r"\w+\.png: .*has no latent of this image .*run `mmtrain data latents`"):
        payload_of(recipe)
    done = run_mmtrain("data", "latents", path, "--json")
    assert json.loads(done.stdout)["added"] == 2, done.stderr
    content = (tmp_path / "latents" / "latents.bin").read_bytes()
    assert content[: len(records) // 2] == records[: len(records) // 2]  # of the first image, which was left alone
    old, new = (np.frombuffer(part, np.float16).astype(np.float32) for part in (records, content[: len(records)]))
    np.testing.assert_allclose(new, old, atol=1e-2)  # the second image was encoded again, in another batch
    assert len((tmp_path / "latents" / "keys.bin").read_bytes()) == 3 * 16


def test_latents_of_several_sizes_are_read_as_they_were_written(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
) -> None:
    import torch

    rng = np.random.default_rng(0)
    names = {"wide.png": (8, 32), "square.png": (SIDE, SIDE), "high.png": (32, 8)}  # rows, columns of pixels
    pixels = {name: rng.integers(0, 256, (*size, 3)).astype(np.uint8) for name, size in names.items()}
    for name, image in pixels.items():
        Image.fromarray(image).save(tmp_path / name)
    buckets = {"bucket_step": 8, "max_aspect": 4.0}
    first = latent_recipe([row("draw", "<image>", "wide.png")], **buckets)
    assert run_mmtrain("data", "latents", first).returncode == 0
    folder = tmp_path / "latents"
    for name in ("sizes.bin", "latents.bin"):  # as a run that was killed between a record and its hash may leave it
        (folder / name).write_bytes((folder / name).read_bytes() + b"12345678")
    path = latent_recipe([row("draw", "<image>", name) for name in names], **buckets)
    done = run_mmtrain("data", "latents", path, "--json")
    assert json.loads(done.stdout)["added"] == 2, done.stderr
    payload = payload_of(load_recipe(path).recipe)
    cells_per_side = [(rows // SCALE // PATCH, cols // SCALE // PATCH) for rows, cols in names.values()]
    assert [*zip(payload.rows, payload.cols, strict=True)] == cells_per_side
    assert payload.cells is not None
    model, _ = load_autoencoder(tmp_path / "vae")
    ends = np.cumsum([rows * cols for rows, cols in cells_per_side])[:-1]
    for image, cells in zip(pixels.values(), np.split(payload.cells, ends), strict=True):
        [latent] = model(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1.0)
        patches = latent.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).reshape(cells.shape)
        np.testing.assert_allclose(cells, patches, atol=1e-2)
        assert patches.std() > 0.05  # else the comparison would prove nothing
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    (cut / "sizes.bin").write_bytes((cut / "sizes.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"sizes\.bin has 23 bytes, too few for 3 latents; copy it again"):
        payload_of(load_recipe(latent_recipe(latents="cut", **buckets)).recipe)
    with pytest.raises(DataError, match="bucket_step is 8 there, 0 in this recipe"):
        payload_of(load_recipe(latent_recipe()).recipe)


def test_images_that_cannot_be_decoded_are_named_and_set_aside(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
) -> None:
    broken = bytearray(png("red", 8, 8))
    broken[45:48] = b"\xff\xff\xff"  # pixels; header and end stay
    (tmp_path / "broken.png").write_bytes(bytes(broken))
    path = latent_recipe([*ROWS, row("draw", "<image>", "broken.png")])
    done = run_mmtrain("data", "latents", path)
    assert "1 images cannot be decoded" in done.stdout
    assert "broken.png" in done.stdout
    payload = payload_of(load_recipe(path).recipe)
    assert payload.blank_cells == ((8, 12),)


def test_latents_of_another_kind_are_refused(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
) -> None:
    assert run_mmtrain("data", "latents", latent_recipe()).returncode == 0
    larger = latent_recipe(image_size=2 * SIDE)
    done = run_mmtrain("data", "latents", larger)
    assert "image_size is 16 there, 32 in this recipe" in done.stderr
    with pytest.raises(DataError, match="latents of another kind: image_size is 16 there, 32 in this recipe"):
        payload_of(load_recipe(larger).recipe)
    saved_vae(tmp_path / "vae", seed=1)
    done = run_mmtrain("data", "latents", latent_recipe())
    assert "encoder_hash is" in done.stderr


def test_settings_that_do_not_fit_the_autoencoder_are_named(
    latent_recipe: Callable[..., Path],
    run_mmtrain: RunMmtrain,
    tmp_path: Path,
    drawing: Callable[..., Recipe],
) -> None:
    cases: dict[str, dict[str, Any]] = {
        r"generator\.vae: its latents have 4 channels \(.*\), but the generator draws 3": {"channels": 3},
        r"generator\.latent_scale: is 8 here, but 4 in": {"latent_scale": 8},
        r"image_size is 20, but the autoencoder and the patch divide it by 8": {"image_size": 20},
        "vae is set without latents": {"latents": None},
        r"generator\.vae: there is no folder": {"vae": "nothing"},
        "latents is set without vae": {"vae": None, "channels": 3},
    }
    for text, changes in cases.items():
        with pytest.raises(RecipeError, match=text):
            load_recipe(latent_recipe(**changes))
    assert (
        "draws no latents" in run_mmtrain("data", "latents", latent_recipe(vae=None, latents=None, channels=3)).stderr
    )
