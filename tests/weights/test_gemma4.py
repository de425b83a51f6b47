"""Folders of Gemma 4: what their configs say, what is refused, and towers that training leaves alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmtrain.costs import num_parameters
from mmtrain.data import build_index
from mmtrain.data.media.image_grids import Patches, frame_grid
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError, TooManyBadSamples
from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.families.gemma4_vision import TINY_TOWER
from mmtrain.families.trained_processors import write_trained_processors
from mmtrain.models.shapes.layer_shape import Attention
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.weights.export_weights import media_settings
from mmtrain.weights.inspect_folder import inspect_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.models.whole_tensors import stage_logits
from tests.pixels import normalized
from tests.plans import plan_recipe
from tests.weights.comparison import (
    assert_encoded_as_by_processor,
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    patches_of,
    unit_stage,
)
from tests.weights.gemma4_processor import open_processor
from tests.weights.pretrained import IMAGE_TOKEN, PATCH, VOCAB, gemma4, gemma4_small, gemma4_text, recipe_from, save
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS, write_other_shapes

ROOT = Path(__file__).parents[2]
WHATIF_LENGTHS = ROOT / "recipes/whatif/lengths/one_image_768.csv"
# Texts of the smallest and the largest dense size, with the keys of the hub.
TEXT_E2B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "dtype": "bfloat16",
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06, "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True,
    "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
TEXT_31B: dict[str, Any] = {
    **TEXT_E2B, "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}  # fmt: skip
VISION_E2B: dict[str, Any] = {
    "default_output_length": 280, "global_head_dim": 64, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768, "intermediate_size": 3072, "model_type": "gemma4_vision", "num_attention_heads": 12,
    "num_hidden_layers": 16, "num_key_value_heads": 12, "patch_size": 16, "pooling_kernel_size": 3,
    "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False,
    "use_clipped_linears": True,
}  # fmt: skip
VISION_31B: dict[str, Any] = {
    **VISION_E2B, "global_head_dim": 72, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "standardize": True,
    "use_clipped_linears": False,
}  # fmt: skip


def _config(text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "image_token_id": 258880,
        "boi_token_id": 255999, "tie_word_embeddings": True, "text_config": {**text, **changes},
        "vision_soft_tokens_per_image": 280,
        "vision_config": VISION_31B if text is TEXT_31B else VISION_E2B,
        "audio_config": None if text is TEXT_31B else {"model_type": "gemma4_audio"},
    }  # fmt: skip


@pytest.mark.parametrize("text", [TEXT_E2B, TEXT_31B], ids=["E2B", "31B"])
def test_a_config_of_the_hub_has_the_parameters_that_transformers_builds(text: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    recipe = recipe_from(write_config(tmp_path / "model", _config(text)), "data.seq_len=8192")
    with torch.device("meta"):
        theirs = Gemma4ForCausalLM(Gemma4TextConfig(**text))
    layers = build_model_shape(recipe).unit("llm").layers
    number = sum(param.numel() for param in theirs.parameters()) + text["num_hidden_layers"]  # layer scalars
    assert sum(map(num_parameters, layers)) == number + text["vocab_size"] * text["hidden_size"], "a tied head counts"


def test_small_sizes_share_keys_and_values_and_large_ones_have_other_heads(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "small", _config(TEXT_E2B)), "data.seq_len=8192")
    blocks = build_model_shape(recipe).unit("llm").layers[1:-1]
    mixers = [block.attention for block in blocks]
    assert [i for i, mixer in enumerate(mixers) if mixer.keeps_kv] == [13, 14]
    assert [i for i, mixer in enumerate(mixers) if mixer.reads_kv] == [*range(15, 35)]
    assert {block.dense_mlp.ffn for block in blocks[15:]} == {12288}
    # Behind block 20 travel inputs of 14 blocks, and keys and values of both kinds of attention.
    assert blocks[20].out_width == 1536 + 14 * 256 + 2 * 256 + 2 * 512
    recipe = recipe_from(write_config(tmp_path / "large", _config(TEXT_31B)), "data.seq_len=8192")
    llm, layers = recipe.model.llm, build_model_shape(recipe).unit("llm").layers
    assert layers[6].mixer == Attention(
        heads=32, kv_heads=4, head_dim=512, causal=True, qk_norm=True, value_norm=True, keys_as_values=True
    )
    assert layers[1].attention.window == 1024
    assert (llm.logit_cap, llm.query_scale, llm.rope_base, llm.window_rope_base) == (30.0, 1.0, 1e6, 1e4)
    assert llm.full_attention is not None
    assert llm.full_attention.rope_width == 128


def test_a_config_that_transformers_wrote_says_the_same(tmp_path: Path) -> None:
    """Heads of single layers take the place of the keys for all layers without a window."""
    for name, model in (("small", gemma4_small()), ("large", gemma4_text())):
        folder = save(model, tmp_path / name)
        written = json.loads((folder / "config.json").read_text())
        stated = {key: value for key, value in written.items() if key != "per_layer_config"}
        kv_heads = {"num_global_key_value_heads": 1} if stated["attention_k_eq_v"] else {}
        other = write_config(tmp_path / f"{name} of the hub", {**stated, "global_head_dim": 32, **kv_heads})
        assert recipe_from(folder).model.llm == recipe_from(other).model.llm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "text_config.enable_moe_block: true is not supported yet; supported: false"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention: "all" is not supported yet'),
        ({"layer_types": ["full_attention"] * 35}, "layer_types: the kinds of layers are not supported yet"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input: 1000 is not supported yet"),
        ({"attention_bias": True}, "attention_bias: true is not supported yet; supported: false"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config: layers of one kind with different heads"),
        ({"per_layer_config": {"4": {"window": 512}}}, "per_layer_config.4.window: 512 is not supported yet"),
        ({"laurel_rank": 64}, "laurel_rank: 64 is not supported yet"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", _config(TEXT_E2B, **changes)))


def _with_towers(folder: Path) -> dict[str, Tensor]:
    """Add tensors of towers to a folder, of another type than those of the LLM; return them."""
    of_towers = {
        "model.vision_tower.patch_embedder.input_proj.weight": torch.randn(24, 48).bfloat16(),
        "model.embed_vision.embedding_projection.weight": torch.randn(48, 24).bfloat16(),
        "model.audio_tower.output_proj.bias": torch.randn(24).bfloat16(),
        "model.embed_audio.embedding_projection.weight": torch.randn(48, 24).bfloat16(),
    }
    weights = load_file(folder / "model.safetensors")
    save_file(weights | of_towers, folder / "model.safetensors", metadata={"format": "pt"})
    return of_towers


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compare a packed batch with samples of `transformers`, one by one; export copies tensors of towers."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = gemma4_small(pad_token_id=0)
    theirs = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text.config, vision_config=None, audio_config=None)
    )
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.tie_weights()
    folder = save(theirs.eval(), tmp_path / "model")
    of_towers = _with_towers(folder)
    recipe = recipe_from(folder)
    llm = unit_stage(recipe)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (length,), generator=generator) for length in (40, 7, 23)]
    inputs = TextInput(tuple(map(len, ids)), torch.cat(ids), labels_of(ids, -1))
    expected = torch.cat([theirs(input_ids=sample[None]).logits[0] for sample in ids])
    with torch.no_grad():
        assert (stage_logits(llm, None, inputs)[:, :VOCAB] - expected).abs().max() < 1e-4
    loss = llm(None, inputs)
    their_loss = torch.nn.functional.cross_entropy(expected, inputs.labels, reduction="sum")
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(llm))
    exported = export_again(folder, recipe)
    assert content(exported) == content(folder)
    assert of_towers.keys() <= content(exported).keys()


@pytest.mark.parametrize(
    ("text", "tower", "message"),
    [
        ({}, {"use_clipped_linears": True}, "vision_config.use_clipped_linears: true is not supported yet"),
        (
            {"hidden_size_per_layer_input": 16},
            {},
            "text_config.hidden_size_per_layer_input: inputs of blocks beside pictures are not supported yet",
        ),
    ],
)
def test_pictures_are_refused_where_the_tower_is_not_built(
    text: dict[str, Any], tower: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma4"], folder, 3, num_train=FEW_CONVERSATIONS)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    sections = {"text_config": {**config["text_config"], **text}, "vision_config": {**TINY_TOWER, **tower}}
    path.write_text(json.dumps({**config, **sections}))
    with pytest.raises(TooManyBadSamples, match=rf"the recipe's model has no vision encoder \({message}"):
        build_index(tiny_recipe(folder))
    assert message in inspect_folder(write_config(tmp_path / "alone", {**config, **sections})).not_built["vision"]


def test_conversations_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma4"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    conversations = folder / "conversations"
    write_other_shapes(conversations)
    processor, ours = open_processor(folder), load_tokenizer(recipe.data.tokenizer_path)
    assert recipe.model.vision is not None
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    index, count = build_index(recipe), ours.length_counter(10_000)
    rows = json.loads((conversations / "heldout.json").read_text())[:40]
    shapes = set()
    for number, row in enumerate(rows):
        sample, messages = index.samples[number], messages_of(row, conversations)
        expected = assert_encoded_as_by_processor(processor, messages, ours, count, index, number)
        for i, media in enumerate(sample.media["image"]):
            places = np.asarray(expected["image_position_ids"][i])
            cols, rows_of_picture = (int(side) + 1 for side in places.max(axis=0))
            by_pixel = np.asarray(expected["pixel_values"][i])[: rows_of_picture * cols]
            by_color = by_pixel.reshape(len(by_pixel), -1, 3).swapaxes(1, 2).reshape(len(by_pixel), -1)
            patches = normalized(decoder.patches("image", media, 0, 1, (rows_of_picture, cols)), recipe.data.image)
            assert np.abs(patches - (2 * by_color - 1)).max() <= 1e-6
            shapes.add((rows_of_picture, cols))
    assert len(shapes) > 5


@pytest.mark.parametrize("tokens", [70, 280, 1120])
def test_a_picture_has_as_many_patches_as_the_processor_makes(tokens: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    random = np.random.default_rng(tokens)
    image = ImageSettings(pixel_limits="area", min_pixels=1, max_pixels=tokens * 48**2)
    sizes = [*np.exp(random.uniform(0, 9, (2000, 2))).astype(int).tolist(), [1, 200], [3000, 16], [48, 48]]
    for width, height in sizes:
        theirs = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        assert frame_grid(width, height, image, Patches(16, 3, 10240)) == (theirs[0] // 16, theirs[1] // 16)


def test_keys_and_values_of_layers_that_share_them_are_passed_over(tmp_path: Path) -> None:
    """Folders of the hub have them, and `transformers` ignores them too."""
    folder = save(gemma4_small(), tmp_path / "model")
    plain = content(export_again(folder, recipe_from(folder)))
    weights = load_file(folder / "model.safetensors")
    unused = {"model.layers.4.self_attn.k_proj.weight": torch.randn(20, 48)}
    save_file(weights | unused, folder / "model.safetensors", metadata={"format": "pt"})
    stage = unit_stage(recipe_from(folder))
    assert "layers.5.self_attention.k_layernorm.weight" not in dict(stage.named_parameters())
    assert plain.keys() == weights.keys()


SHOWN = [[(4, 6), (2, 2)], [], [(8, 2)], [(2, 8)]]  # rows and columns of patches, of the pictures of samples


def _ids(number: int, pooling: int) -> Tensor:
    """Return the ids of a sample, with tokens between its pictures."""
    generator = torch.Generator().manual_seed(number)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    parts = [words(3)]
    for rows, cols in SHOWN[number]:
        parts += [torch.full((rows * cols // pooling**2,), IMAGE_TOKEN), words(2)]
    return torch.cat([*parts, words(9)])


def _their_media(pictures: list[Tensor]) -> dict[str, Tensor]:
    """Return the patches of pictures (3, height, width) in [0, 1], padded to one number, and where they lie."""
    if not pictures:
        return {}
    most = 36
    patches, places = torch.zeros(len(pictures), most, 3 * PATCH**2), torch.full((len(pictures), most, 2), -1)
    for number, picture in enumerate(pictures):
        rows, cols = (side // PATCH for side in picture.shape[1:])
        by_color = patches_of(picture).view(rows * cols, 3, -1)
        patches[number, : rows * cols] = by_color.transpose(1, 2).flatten(1)
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
        places[number, : rows * cols] = grid.flip(1)
    return {"pixel_values": patches, "image_position_ids": places}


@pytest.mark.parametrize(
    ("standardize", "pooling", "text"),
    [
        (True, 2, {}),
        (False, 2, {"sliding_window": 3}),  # narrower than a picture
        (True, 2, {"use_bidirectional_attention": None, "attention_k_eq_v": False}),
    ],
)
def test_logits_loss_and_gradients_with_pictures_equal_those_of_transformers(
    standardize: bool, pooling: int, text: dict[str, Any], tmp_path: Path
) -> None:
    theirs = gemma4(standardize, pooling, **text)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder, "data.seq_len=2048")
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    generator = torch.Generator().manual_seed(7)
    pictures = [[torch.rand(3, rows * PATCH, cols * PATCH, generator=generator) for rows, cols in s] for s in SHOWN]
    ids = [_ids(number, pooling) for number in range(len(SHOWN))]
    expected = torch.cat(
        [
            theirs(
                input_ids=sample[None], mm_token_type_ids=(sample == IMAGE_TOKEN).int()[None], **_their_media(shown)
            ).logits[0]
            for sample, shown in zip(ids, pictures, strict=True)
        ]
    )
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    edges = (torch.diff((packed == IMAGE_TOKEN).int(), prepend=torch.zeros(1), append=torch.zeros(1))).nonzero()
    spans = tuple(map(tuple, edges.view(-1, 2).tolist())) if text.get("use_bidirectional_attention", "vision") else ()
    inputs = TextInput(tuple(map(len, ids)), packed, labels_of(ids, IMAGE_TOKEN), {"vision": places}, image_spans=spans)
    of_all = [2 * patches_of(picture) - 1 for shown in pictures for picture in shown]
    rows, cols = (tuple(grid[axis] for shown in SHOWN for grid in shown) for axis in range(2))
    features = vision(None, EncoderInput(rows, cols, torch.cat(of_all)))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


def test_a_microbatch_without_pictures_gives_weights_zero_gradients(tmp_path: Path) -> None:
    folder = save(gemma4(), tmp_path / "model")
    vision = unit_stage(recipe_from(folder, "data.seq_len=2048"), "vision")
    features = vision(None, EncoderInput((), (), torch.empty(0, 3 * PATCH**2)))
    assert features.shape == (0, 48)
    features.sum().backward()
    assert all(not gradient.any() for gradient in full_gradients(vision).values())


@pytest.mark.parametrize("standardize", [True, False])
def test_import_and_export_give_the_same_bits(standardize: bool, tmp_path: Path) -> None:
    folder = save(gemma4(standardize), tmp_path / "model", torch.bfloat16)
    recipe = recipe_from(folder, "data.seq_len=2048")
    assert content(export_again(folder, recipe)) == content(folder)


def test_the_config_of_the_hub_says_how_pictures_are_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    config = _config(TEXT_31B)
    few = {**config["text_config"], "num_hidden_layers": 6, "layer_types": TEXT_31B["layer_types"][:6]}
    folder = write_config(tmp_path / "model", {**config, "text_config": few})
    recipe = recipe_from(folder, "data.seq_len=8192")
    vision, image = recipe.model.vision, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.patch, vision.merge, vision.max_side) == (27, 16, 3, 10240)
    assert (vision.averages, vision.rotary_base, recipe.model.llm.image_attention) == (
        "standardized", 100.0, "bidirectional_in_windows",
    )  # fmt: skip
    assert (image.pixel_limits, image.max_pixels) == ("area", 280 * 48**2)
    with torch.device("meta"):
        theirs = Gemma4ForConditionalGeneration(AutoConfig.from_pretrained(folder)).model
    parts = (theirs.vision_tower, theirs.embed_vision)
    expected = sum(tensor.numel() for part in parts for tensor in (*part.parameters(), *part.buffers()))
    expected -= sum(buffer.numel() for name, buffer in theirs.vision_tower.named_buffers() if "inv_freq" in name)
    assert sum(map(num_parameters, build_model_shape(recipe).unit("vision").layers)) == expected


def test_a_processor_gets_the_number_of_tokens_that_a_run_trained_with(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content_of_file in FAMILIES["gemma4"].tiny.items():
        (folder / name).write_text(json.dumps(content_of_file))
    overrides = ("data.image.max_pixels=35840", "data.image.resample=bilinear")  # 140 tokens of 16 x 16 pixels
    recipe = recipe_from(folder, "data.seq_len=8192", *overrides)
    notes = write_trained_processors(read_model_folder(folder), media_settings(recipe), folder)
    assert all(" is in the processor now" in note for note in notes), notes
    assert json.loads((folder / "preprocessor_config.json").read_text())["max_soft_tokens"] == 140
    assert recipe_from(folder, "data.seq_len=8192").data.image == recipe.data.image
    between = recipe_from(folder, "data.seq_len=8192", "data.image.max_pixels=36096")
    notes = write_trained_processors(read_model_folder(folder), media_settings(between), folder)
    assert notes == ("data.image.max_pixels: trained with 36096, but the processor does 35840",)


@pytest.mark.slow
def test_the_shipped_recipe_is_planned_on_8_gpus(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", _config(TEXT_31B))
    changes = [f"model.hf={folder}", f"data.sources=[{{path: {WHATIF_LENGTHS}}}]"]
    recipe = load_recipe(ROOT / "recipes/gemma4_sft.yaml", changes).recipe
    lengths = build_index(recipe).lengths
    plan = plan_recipe(recipe, lengths, world_size=8, hardware="h100-80g", recipe_sha256="")
    assert plan.world_size == 8
    assert max(plan.predicted.peak_memory_gib.values()) < 80


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("vision_config", {"head_dim": 32}, "vision_config.head_dim: 32 is not supported yet; supported: 72"),
        ("vision_config", {"num_key_value_heads": 4}, "num_key_value_heads: 4 is not supported yet; supported: 16"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "vision_config.model_type: .* supported: .gemma4_vis"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: .yarn. is not"),
        ("vision_config", {"registers": 4}, "vision_config.registers: 4 is not supported yet"),
    ],
)
def test_what_is_not_supported_of_the_tower_is_said(
    section: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = _config(TEXT_31B)
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", {**config, section: {**config[section], **changes}}))


def test_ranks_do_not_share_sequences_with_pictures(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", _config(TEXT_31B))
    with pytest.raises(RecipeError, match="image_attention bidirectional_in_windows"):
        recipe_from(folder, "data.seq_len=8192", "parallel.placement=unified", "parallel.llm.cp=2")
