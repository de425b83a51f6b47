import subprocess
import sys

import pytest

from mmtrain.models import padded_vocab
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.models.factory import settings, shape_of, stage


def test_planning_does_not_import_torch() -> None:
    code = "import sys, mmtrain.models; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_units_layers_and_edge() -> None:
    model: ModelShape = shape_of(settings())
    kinds = {unit.name: [layer.kind for layer in unit.layers] for unit in model.units}
    assert kinds == {
        "vision": ["patch_embed", "vit_block", "vit_block", "projector"],
        "llm": ["embedding", *["decoder_block"] * 3, "head"],
    }
    assert model.encoders == ("vision",)
    (edge,) = model.edges
    assert (edge.src, edge.dst, edge.layer, edge.width) == ("vision", "llm", 0, 48)
    for unit in model.units:  # each layer reads what the one before hands on
        for before, after in zip(unit.layers, unit.layers[1:], strict=False):
            assert before.out == after.hidden


def test_outputs_of_blocks_travel_to_the_first_blocks_of_the_llm() -> None:
    model = shape_of(settings(vision={"layers": 4, "deepstack": (0, 2)}))
    vision, llm = (model.unit(unit).layers for unit in ("vision", "llm"))
    assert [layer.carried_in for layer in vision] == [0, 0, 1, 1, 2, 2]
    assert [layer.carried_out for layer in llm] == [2, 1, 0, 0, 0]
    assert [layer.keeps_output for layer in vision] == [False, True, False, True, False, False]
    assert [layer.adds_carried for layer in llm] == [False, True, True, False, False]
    assert model.edge("vision", "llm").width == 3 * 48
    for unit in model.units:
        for before, after in zip(unit.layers, unit.layers[1:], strict=False):
            assert before.out_width == after.in_width
    assert llm[2].input_elements(10, 1) == 2 * 10 * 48


def test_a_text_model_has_one_unit() -> None:
    model = shape_of(ModelSettings(llm=settings().llm))
    assert [unit.name for unit in model.units] == ["llm"]
    assert model.edges == ()


@pytest.mark.parametrize(("rows", "padded"), [(1, 64), (64, 64), (65, 128), (32000, 32000)])
def test_padded_vocab(rows: int, padded: int) -> None:
    assert padded_vocab(rows) == padded


@pytest.mark.parametrize("vision_frozen", [True, False])
@pytest.mark.parametrize("projector_frozen", [True, False])
@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("llm_frozen", [True, False])
def test_trainable_layers_match_the_modules(
    vision_frozen: bool, projector_frozen: bool, post_norm: bool, llm_frozen: bool
) -> None:
    model = settings(
        vision={"freeze": vision_frozen, "post_norm": post_norm, "projector": {"freeze": projector_frozen}},
        llm={"freeze": llm_frozen},
    )
    for unit in shape_of(model).units:
        module = stage(model, unit.name)
        for index, layer in enumerate(unit.layers):
            params = module.layers[str(index)].parameters()
            assert layer.trainable == any(param.requires_grad for param in params), (unit.name, index)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("positions", ["factorized", "grid"])
def test_norms_and_position_rows_match_the_modules(positions: str, class_token: bool) -> None:
    vision = {"positions": positions, "class_token": class_token, "pre_norm": True, "projector": {"norm": True}}
    model = settings(vision=vision)
    embed, *_, projector = shape_of(model).unit("vision").layers
    params = dict(stage(model, "vision").named_parameters())
    tables = [p for name, p in params.items() if name.startswith("layers.0.") and "positions" in name]
    assert sum(len(table) for table in tables) == embed.media.position_rows
    for index, layer in ((0, embed), (3, projector)):
        norms = [p for name, p in params.items() if name.startswith(f"layers.{index}.") and "norm.weight" in name]
        assert tuple(len(p) for p in norms) == layer.norm_widths
