"""Models trained on videos whose text says when they are shown have the loss of `transformers` under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import Sample, build_index
from mmtrain.data.media.item_readers import VisionItemReader
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.families import FAMILIES
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.flow.runs import refuse, run_all
from tests.flow.test_joined_tiles import request_to_train, show_videos
from tests.pixels import normalized
from tests.weights.test_qwen_vl import in_squares


def _media(recipe: Recipe, sample: Sample, ids: torch.Tensor, tokens: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the arguments of `transformers` for pictures and videos prepared here; `tokens` are those of either.

    Where images and videos have the same token, a sample must not show both.
    """
    assert recipe.model.vision is not None
    reader = VisionItemReader(recipe.model.vision, recipe.data)
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, ...]]] = {"image": [], "video": []}
    for kind, medium in sample.media_of(("image", "video")):
        of_items = reader.read_items(kind, medium).grids
        grids[kind].append((len(of_items), *of_items[0]))
        for part, grid in enumerate(of_items):
            cells = normalized(reader.load_cells(kind, medium, part, len(of_items), grid), recipe.data.image)
            pixels[kind].append(in_squares(torch.from_numpy(cells), *grid))
    arguments: dict[str, torch.Tensor] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels[kind]:
            arguments |= {name: torch.cat(pixels[kind]), f"{kind}_grid_thw": torch.tensor(grids[kind])}
    assert len(tokens) == 2 or not (pixels["image"] and pixels["video"])
    first_type = 2 if len(tokens) == 1 and sample.videos else 1
    types = first_type * (ids == tokens[0]).int()
    if len(tokens) == 2:
        types = types + 2 * (ids == tokens[1]).int()
    return {**arguments, "mm_token_type_ids": types[None]}


def _loss_of_transformers(recipe: Recipe, folder: Path) -> float:
    """Return the mean loss per target of the held-out conversations, one after another."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    total, num_targets, num_videos = 0.0, 0, 0
    for number, sample in enumerate(index.samples):
        encoded = tokenizer.encode(sample, index.media_features(number))
        ids, labels = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.labels)
        with torch.no_grad():
            media = _media(recipe, sample, ids, tokenizer.item_ids["vision"])
            logits = model(input_ids=ids[None], **media).logits[0]
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        num_targets += int((labels >= 0).sum())
        num_videos += len(sample.videos)
    assert num_videos > 2
    return total / num_targets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel", "num_ranks"),
    [
        ("qwen3_vl", "{placement: disaggregated, vision: {tp: 1, pp: 1, dp: 2}, llm: {tp: 1, pp: 2, dp: 1}}", 4),
        ("qwen3_vl", "{placement: colocated, vision: {tp: 1, pp: 1, dp: 2}, llm: {tp: 2, pp: 1}}", 2),
        ("glm4v_moe", "{placement: disaggregated, vision: {tp: 1, pp: 1}, llm: {tp: 1, pp: 1, dp: 2, ep: 2}}", 3),
    ],
)
def test_a_model_trained_on_videos_has_the_same_loss_in_transformers(
    family: str, parallel: str, num_ranks: int, tmp_path: Path
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    write_tiny_model(FAMILIES[family], folder, seed=0)
    show_videos(folder)
    request, _ = request_to_train(folder, parallel, num_ranks)
    untrained_loss = _loss_of_transformers(request.recipe, folder)
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
