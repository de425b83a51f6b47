"""Both halves of an autoencoder against `diffusers`, and latents from images of a recipe to the cells of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from mmtrain.errors import ModelFolderError
from mmtrain.weights.encode_latents import load_autoencoder
from mmtrain.weights.inspect_folder import inspect_folder
from tests.models.generator.tiny import relative_error, shuffle

VAE: dict[str, Any] = {
    "block_out_channels": (8, 16, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
_ATTENTION = "mid_block.attentions.0."
OLDER = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}


def saved_vae(folder: Path, seed: int = 0, **changes: Any) -> AutoencoderKL:
    torch.manual_seed(seed)
    model = AutoencoderKL(**VAE | changes)
    shuffle(model, seed)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shift_factor": 0.1, "scaling_factor": 1.5},
        {"use_quant_conv": False, "use_post_quant_conv": False},
        {"mid_block_add_attention": False},
    ],
    ids=lambda changes: next(iter(changes), "stable diffusion"),
)
def test_latents_are_those_of_diffusers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = saved_vae(tmp_path / "vae", **changes)
    ours, _ = load_autoencoder(tmp_path / "vae")
    pixels = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean = theirs.encode(pixels).latent_dist.mode()
    expected = (mean - (theirs.config.shift_factor or 0.0)) * theirs.config.scaling_factor
    latents = ours(pixels)
    assert latents.shape == (2, 4, 4, 6)
    assert relative_error(latents, expected) < 1e-5
    assert not any(param.requires_grad for param in ours.parameters())
    with torch.no_grad():
        drawn = theirs.decode(latents / theirs.config.scaling_factor + (theirs.config.shift_factor or 0.0)).sample
    assert drawn.shape == pixels.shape
    assert relative_error(ours.decode(latents), drawn) < 1e-5


def test_older_folders_and_half_precision_are_read(tmp_path: Path) -> None:
    saved_vae(tmp_path / "vae")
    expected, hash_of_weights = load_autoencoder(tmp_path / "vae")
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    for new, old in OLDER.items():
        for name in [name for name in tensors if f"{_ATTENTION}{new}" in name]:
            tensors[name.replace(new, old)] = tensors.pop(name)
    save_file(tensors, path)
    older, same_hash = load_autoencoder(tmp_path / "vae")
    assert same_hash == hash_of_weights
    assert torch.equal(
        older.get_parameter("encoder.mid_block.attentions.0.to_q.weight"),
        expected.get_parameter("encoder.mid_block.attentions.0.to_q.weight"),
    )
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    _, other_hash = load_autoencoder(tmp_path / "vae")
    assert other_hash != hash_of_weights
    assert [unit.name for unit in inspect_folder(tmp_path / "vae").units] == ["autoencoder"]


def test_what_is_not_built_is_named(tmp_path: Path) -> None:
    saved_vae(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    cases = {
        "act_fn": ("relu", 'act_fn: "relu" is not supported'),
        "latents_mean": ([0.0] * 4, "latents_mean: .* is not supported"),
        "down_block_types": (["AttnDownEncoderBlock2D"] * 3, "down_block_types: .* is not supported"),
        "up_block_types": (["AttnUpDecoderBlock2D"] * 3, "up_block_types: .* is not supported"),
        "out_channels": (4, "out_channels: 4 is not supported"),
        "norm_num_groups": (3, "3 does not divide all of block_out_channels"),
        "latent_channels": (8, r"(?s)model\.generator\.vae: the weights .*quant_conv.weight: has the shape"),
    }
    for key, (value, text) in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ModelFolderError, match=text):
            load_autoencoder(tmp_path)
