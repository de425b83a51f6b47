"""Encoders are looked up by modality, so a new one takes one entry in each table and no other change."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mmtrain.data.index.data_index import build_index
from mmtrain.data.media.item_readers import ITEM_READERS
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.encoder_shapes import (
    ENCODER_SHAPES,
    EncoderShapes,
    encoder_attention,
    encoder_block,
    projector_layer,
)
from mmtrain.models.shapes.layer_shape import LayerShape, MediaShape
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.stage_module import ENCODER_MODULES, EncoderModules, StageSpec
from mmtrain.models.stage.vision_layers import VisionContext
from mmtrain.recipe import Recipe, recipe_fingerprint
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.checks.encoder_checks import ENCODER_CHECKS
from mmtrain.recipe.loading import json_schema
from mmtrain.recipe.settings.base import NOTHING, setting
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES, Modality
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.parallel_settings import ParallelSettings, UnitParallel
from mmtrain.runtime.profiling.probes import ITEM_SIZES, ItemSizes, make_probes
from tests.plans import plan_recipe

FEATURES = 10


class DepthSettings(EncoderSettings):
    """An encoder that no version of mmtrain has: it embeds rows of ten numbers, without positions."""

    modality: Literal["depth"] = setting("depth", affects=NOTHING, description="-")
    activation: str = setting("gelu", affects={"plan"}, description="-")
    norm_eps: float = setting(1e-6, affects={"plan"}, description="-")
    stack: int = setting(2, affects={"plan", "lengths"}, description="-")

    @property
    def cell_features(self) -> int:
        return FEATURES

    @property
    def tokens_per_feature(self) -> int:
        return self.stack


class DepthModel(ModelSettings):
    depth: DepthSettings | None = None


class DepthParallel(ParallelSettings):
    depth: UnitParallel = UnitParallel()


class DepthRecipe(Recipe):
    model: DepthModel
    parallel: DepthParallel = DepthParallel()


class DepthEmbed(torch.nn.Module):
    def __init__(self, settings: DepthSettings, shape: LayerShape, factory: Any) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(FEATURES, shape.hidden)

    def forward(self, hidden: None, context: Any) -> torch.Tensor:
        out: torch.Tensor = self.proj(context.inputs.cells)
        return out


class DepthContext(VisionContext):
    def order_tokens(self, hidden: torch.Tensor, tokens_per_feature: int) -> torch.Tensor:
        return hidden


def _layers(settings: DepthSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    embedding = LayerShape(
        "patch_embed", settings.hidden, settings.hidden, media=MediaShape(FEATURES), linear_bias=True
    )
    block = encoder_block(settings, encoder_attention(settings))
    return (embedding, *[block] * settings.layers, projector_layer(settings, llm_hidden))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    modality = Modality("depth", DepthSettings, {}, media=(), placeholder="<|depth|>")
    shapes = EncoderShapes(_layers, lambda layer, settings: iter(("proj.weight", "proj.bias")))
    modules = EncoderModules(DepthEmbed, lambda inputs, unit, dtype, device: DepthContext(inputs, 0, device))
    sizes = ItemSizes(nearest=lambda settings, size: size, synthetic=lambda settings, data: [(4, 1), (8, 1)])
    tables: list[tuple[Any, object]] = [
        (MODALITIES, modality),
        (ENCODER_SHAPES, shapes),
        (ENCODER_MODULES, modules),
        (ITEM_SIZES, sizes),
    ]
    for table, entry in tables:
        monkeypatch.setitem(table, "depth", entry)


def recipe(tmp_path: Path, **depth: Any) -> DepthRecipe:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("count,text,depth,vision\n40,30,16 8,36\n10,50,,\n", encoding="utf-8")
    return DepthRecipe.model_validate(
        {
            "name": "three",
            "model": {
                "vision": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64},
                "depth": {"layers": 3, "hidden": 32, "heads": 4, "ffn": 64, "freeze": True} | depth,
                "llm": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512},
            },
            "data": {"sources": [{"path": lengths}], "seq_len": 256, "budgets": {"depth": 200}},
            "parallel": {"placement": "disaggregated", "depth": {"tp": 1}},
            "train": {"steps": 1, "global_batch": 4, "optimizer": {"lr": 1e-3}, "freeze": ["depth.layers.4.norm*"]},
        }
    )


def test_another_encoder_goes_from_recipe_to_plan(registered: None, tmp_path: Path) -> None:
    settings = recipe(tmp_path, projector={"norm": True})
    assert [problem for check in CHECKS for problem in check(settings)] == []
    shape = build_model_shape(settings)
    assert shape.encoders == ("vision", "depth")
    depth = shape.unit("depth")
    assert [layer.kind for layer in depth.layers] == ["patch_embed", *["vit_block"] * 3, "projector"]
    assert [layer.trainable for layer in depth.layers] == [False] * 4 + [True]
    assert depth.layers[4].frozen == {"post_norm.weight", "post_norm.bias", "norm.weight", "norm.bias"}

    lengths = build_index(settings).lengths
    assert lengths.items["depth"].features[:2].tolist() == [8, 4]
    assert lengths.tokens[0] == 30 + 8 + 4 + 36

    chosen = plan_recipe(settings, lengths, world_size=3, hardware="cpu-core", recipe_sha256="x")
    assert set(chosen.units) == {"vision", "depth", "llm"}
    assert sum(hi - lo for lo, hi in (stage.layers for stage in chosen.units["depth"].stages)) == 5


def test_another_encoder_computes_features_and_is_profiled(registered: None, tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"freeze": ()})})
    shape = build_model_shape(settings)
    options = StageOptions(torch.float32, torch.device("cpu"), seed=1)
    spec = StageSpec("depth", (0, len(shape.unit("depth").layers)))
    stage = build_stage(settings.model, shape, spec, ParallelGroups.single(), options)
    features = stage(None, EncoderInput((16, 8), (1, 1), torch.randn(24, FEATURES)))
    assert features.shape == (12, 64)
    assert {name for name, param in stage.named_parameters() if param.requires_grad} == {
        f"layers.4.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
    fitted, _ = make_probes(settings, shape.unit("depth"))
    inputs = fitted[-1].inputs(settings, torch.device("cpu"), torch.float32)
    assert stage(None, inputs).shape == (fitted[-1].load.tokens // 2, 64)


def test_settings_of_another_encoder_change_the_fingerprint(registered: None, tmp_path: Path) -> None:
    assert recipe_fingerprint(recipe(tmp_path)) != recipe_fingerprint(recipe(tmp_path, layers=4))
    assert recipe_fingerprint(recipe(tmp_path)) == recipe_fingerprint(recipe(tmp_path, lr_scale=0.5))


def test_problems_of_another_encoder_are_named(registered: None, tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    parallel = settings.parallel.model_copy(update={"depth": UnitParallel(tp=3)})
    problems = [p for check in CHECKS for p in check(settings.model_copy(update={"parallel": parallel}))]
    assert [str(p) for p in problems] == [
        "parallel.depth.tp: 3 does not divide model.depth.heads 4 or model.depth.ffn 64"
    ]


def test_every_package_has_an_entry_for_every_modality() -> None:
    for table in (ENCODER_SHAPES, ENCODER_MODULES, ITEM_READERS, ENCODER_CHECKS):
        assert set(table) == set(MODALITIES)
    assert set(ITEM_SIZES) == {*MODALITIES, GENERATOR}
    for name, modality in MODALITIES.items():
        assert modality.name == modality.settings.model_fields["modality"].default == name
        assert name in json_schema.schema_at(("model", "encoders", "any", "modality"))["enum"]
        assert name in ModelSettings.model_fields
        assert name in ParallelSettings.model_fields
