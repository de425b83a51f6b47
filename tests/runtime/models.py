"""A tiny model over tiny data that the tests of generation and evaluation share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmtrain.checkpoint import Ranks, Shard, ShardSpec, save
from mmtrain.models import params
from mmtrain.models.build import StageModule
from mmtrain.recipe import Recipe

PATCH = 8


def recipe(tokenizer: Path, train: Path, heldout: Path | None, **llm: Any) -> Recipe:
    """A recipe with a model of some ten thousand parameters; keywords change its LLM."""
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {
                "vision": {
                    "layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "patch": PATCH, "max_side": 8,
                    "downsample": "pixel_shuffle", "merge": 2,
                },
                "llm": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 512} | llm,
            },
            "data": {
                "sources": [{"path": train}],
                "validation": [{"path": heldout}] if heldout else [],
                "tokenizer": tokenizer,
                "seq_len": 256,
                "image": {"min_pixels": 256, "max_pixels": 2304},
            },
            "train": {"steps": 50, "global_batch": 2, "optimizer": {"lr": 1e-3}},
        }
    )  # fmt: skip


def randomize(stages: Iterable[nn.Module]) -> None:
    """Move every parameter far off its initial value, so that answers are varied."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for stage in stages:
            for param in stage.parameters():
                param += 0.3 * torch.randn(param.shape, generator=generator)


def save_in_halves(root: Path, step: int, stages: Iterable[StageModule]) -> Path:
    """Save stages as two tensor-parallel ranks would, the second one's pieces cut again as ZeRO-1 does."""
    shards: dict[str, list[Shard]] = {}
    for stage in stages:
        specs = params.specs(stage, stage.unit, tp=1)
        for name, param in stage.named_parameters():
            spec = specs[name]
            full = param.detach().reshape(spec.full_shape)
            if spec.dim is None:
                shards[spec.name] = [Shard(spec.name, ShardSpec(spec.full_shape), full)]
                continue
            rows = spec.full_shape[spec.dim]
            first, second = full.split(rows // 2, dim=spec.dim)
            flat, cut = second.reshape(-1), second.numel() // 3
            shards[spec.name] = [Shard(spec.name, ShardSpec(spec.full_shape, spec.dim, 0, rows // 2), first)]
            for lo, hi in ((0, cut), (cut, second.numel())):
                piece = ShardSpec(spec.full_shape, spec.dim, rows // 2, rows, flat=(lo, hi))
                shards[spec.name].append(Shard(spec.name, piece, flat[lo:hi]))
    pieces = [piece for found in shards.values() for piece in found]  # a tied embedding comes twice, and is saved once
    return save(root, step, pieces, {}, {}, keep=9, ranks=Ranks.alone())
