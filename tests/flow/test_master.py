"""The master test: whatever the plan, loss and gradients are those of one process running sample by sample."""

from typing import Any

import pytest
import torch

from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import Backward, GatherParams, Recv, ReduceGrads, ScheduleKind, Send, build_program
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import AUDIO, DEEPSTACK, FINE, RESAMPLED, Mesh, Order, plan, recipe, step_data
from tests.flow.cells import ADAPTED, DROPPING
from tests.flow.equality import assert_equals_one_process
from tests.flow.orders import PIPELINE, TOGETHER
from tests.models.factory import MERGED

FROZEN_VISION = {"model__vision__freeze": True}
SPEECH = {"model__audio": AUDIO}
# What Gemma 3 is made of: windows with rotary positions of their own, and images whose tokens see each other.
WINDOWED = {
    "model__llm__window": 4,
    "model__llm__full_attention_blocks": (1,),
    "model__llm__window_rope_base": 100.0,
    "model__llm__qk_norm": True,
    "model__llm__post_norms": True,
    "model__llm__zero_centered_norms": True,
    "model__llm__scale_embeddings": True,
    "model__llm__tie_embeddings": True,
    "model__llm__mlp": "geglu",
}
BIDIRECTIONAL = WINDOWED | {
    "model__llm__image_attention": "bidirectional",
    "model__vision__downsample": "average_pool",
    "model__vision__projector": {"kind": "linear", "bias": False, "norm": True, "norm_kind": "zero_centered_rms"},
}
TWO_IMAGE_ENCODERS = {"model__encoders": {"fine": FINE}}
PART_TARGETS = ("llm.*.linear_q", "llm.*.linear_v", "llm.*.linear_fc1_gate", "llm.*.linear_fc2")
PARTS: dict[str, Any] = {"train__lora": {"rank": 2, "alpha": 8.0, "scaling": "rslora", "targets": PART_TARGETS}}

# name -> (recipe changes, meshes). Vision layers: 0 patches, 1-2 blocks, 3 projector; LLM: 0 embedding, 1-3, 4 head.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "one rank": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}),
    "unified pp2, mixed first stage": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1))}),
    "llm tp4 with one kv head, pp2": (
        {"model__llm__kv_heads": 1},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), tuple(range(8)), tp=4)},
    ),
    "adapters on query, value and gate apart, tp2 with slices of tokens": (
        PARTS,
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), tp=2, sp=True, recompute=(1,))},
    ),
    "adapters on query, value and gate apart, tp4 with two kv heads": (
        PARTS,
        {"vision": Mesh((), (4,)), "llm": Mesh((), (0, 1, 2, 3), tp=4)},
    ),
    "adapters with dropout, both tp2 with slices of tokens, llm pp2, recomputed": (
        DROPPING,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 3)),
            "llm": Mesh((2,), (2, 3, 4, 5), tp=2, sp=True, recompute=(1,)),
        },
    ),
    "adapters with dropout, unified tp2 pp2, chunks of tokens, other microbatches": (
        DROPPING,
        {"vision": Mesh((), (0, 1), tp=2, n=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, tp_chunks=2)},
    ),
    "adapters with dropout, disaggregated 1:2, audio": (
        DROPPING | SPEECH,
        {"vision": Mesh((), (0,), n=4), "audio": Mesh((2,), (1, 2)), "llm": Mesh((), (3, 4), dp=2)},
    ),
    "llm tp4 with two kv heads": ({}, {"vision": Mesh((), (4,)), "llm": Mesh((), (0, 1, 2, 3), tp=4)}),
    "both tp2 with slices of tokens, pp2, recomputed, partly frozen": (
        {"train__freeze": ("llm.layers.1.*", "vision.layers.1.mlp.*", "llm.layers.2.*norm.weight")},
        {
            "vision": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True, recompute=(1, 2)),
            "llm": Mesh((2,), (4, 5, 6, 7), tp=2, sp=True, recompute=(1, 3, 4)),
        },
    ),
    "unified tp2 with slices of tokens, one kv head, tied": (
        {"model__llm__kv_heads": 1, "model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((3,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
    "slices of tokens over every border in the encoder": (
        {},
        {"vision": Mesh((1, 3), tuple(range(6)), tp=2, sp=True), "llm": Mesh((), (6, 7), tp=2)},
    ),
    "slices of tokens over every border in the llm, vpp2": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 4), (1, 2, 3, 4), tp=2, vpp=2, sp=True)},
    ),
    "chunks of tokens, tp4, and tp2 with slices of tokens, partly frozen": (
        {"train__freeze": ("llm.layers.1.*", "vision.layers.1.mlp.*", "llm.layers.2.*norm.weight")},
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=(1,), tp_chunks=2),
            "llm": Mesh((), (2, 3, 4, 5), tp=4, recompute=(2,), tp_chunks=3),
        },
    ),
    "chunks of tokens, tp2, and tp4 with slices of tokens and two kv heads": (
        {},
        {
            "vision": Mesh((2,), (0, 1, 2, 3), tp=2, tp_chunks=4),
            "llm": Mesh((), (4, 5, 6, 7), tp=4, sp=True, tp_chunks=2),
        },
    ),
    "frozen encoder and projector": (
        FROZEN_VISION | {"model__vision__projector__freeze": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2)},
    ),
    "frozen by name, nothing to train on two ranks of four": (
        {"train__freeze": ("vision.*", "llm.layers.[0-2].*")},
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 3), (1, 2, 3))},
    ),
    "parts of layers frozen, tied, tp2 pp2": (
        {"train__freeze": ("*norm*", "*linear_qkv.weight", "*linear_1.weight"), "model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((2,), (2, 3, 4, 5), tp=2)},
    ),
    "tied embeddings frozen, pp2": (
        {"train__freeze": ("llm.layers.0.*",), "model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))},
    ),
    "learning rate and weight decay of each unit": (
        {"model__vision__weight_decay": 0.5, "model__vision__lr_scale": 0.5, "model__llm__weight_decay": 0.0},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (2, 3))},
    ),
    "layer-wise decay of the learning rate, tp2 dp2, pp2 vpp2": (
        {"train__optimizer__layer_lr_decay": 0.5, "model__vision__lr_scale": 0.5, "model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0, 1, 2, 3), tp=2, dp=2), "llm": Mesh((1, 2, 4), (4, 5), vpp=2)},
    ),
    "tied embeddings pp2 dp2": (
        {"model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), dp=2)},
    ),
    "llm pp3 vpp2, an incomplete group and an incomplete round": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3, 4), (1, 2, 3), vpp=2)},
    ),
    "llm pp1 vpp3": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((1, 3), (1,), vpp=3)}),
    "unified pp2, the encoder is the first round": ({}, {"vision": Mesh((2,), (0, 1)), "llm": Mesh((2,), (0, 1))}),
    "unified pp2 vpp2, mixed in the middle": (
        {},
        {"vision": Mesh((2,), (0, 1)), "llm": Mesh((1, 3), (1, 0), vpp=2)},
    ),
    "tied embeddings pp2 vpp2": (
        {"model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2), vpp=2)},
    ),
    "tied embeddings, both ends on one rank": (
        {"model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((1, 3), (1, 2, 3, 4), dp=2, vpp=2)},
    ),
    "two image encoders, unified pp2": (
        TWO_IMAGE_ENCODERS,
        {"vision": Mesh((), (0,)), "fine": Mesh((2,), (0, 1)), "llm": Mesh((), (1,))},
    ),
    "two image encoders beside audio, disaggregated, each with its own replicas and microbatches, one frozen": (
        SPEECH | {"model__encoders": {"fine": FINE | {"freeze": True, "lr_scale": 0.5}}},
        {
            "vision": Mesh((), (0, 1), dp=2),
            "audio": Mesh((), (2,)),
            "fine": Mesh((2,), (3, 4), n=2),
            "llm": Mesh((), (5, 6), tp=2),
        },
    ),
    "three units tp2, audio frozen": (
        SPEECH | {"model__audio": AUDIO | {"freeze": True}},
        {"vision": Mesh((), (0, 1), tp=2), "audio": Mesh((), (0, 1), tp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2)},
    ),
    "clipped": (
        {"train__optimizer__clip_norm": 0.05},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))},
    ),
}

# Encoders with fewer microbatches than the LLM merge several of its own, with more they split each.
COUNTS: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "one encoder microbatch for all of an llm of pp2 vpp2": (
        {},
        {"vision": Mesh((), (0,), n=1), "llm": Mesh((1, 2, 3), (1, 2), vpp=2)},
    ),
    "merged over two replicas, dp 1:2": ({}, {"vision": Mesh((2,), (0, 1), n=1), "llm": Mesh((), (2, 3), dp=2)}),
    "split in four, encoder pp2, llm pp2": (
        {},
        {"vision": Mesh((2,), (0, 1), n=16), "llm": Mesh((2,), (2, 3))},
    ),
    "split in three, tp2 with slices of tokens, dp 1:2, recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, n=6, recompute=(1, 2)),
            "llm": Mesh((), (2, 3, 4, 5), tp=2, sp=True, dp=2),
        },
    ),
    "three encoder microbatches for four of the llm, which do not divide": (
        {},
        {"vision": Mesh((2,), (0, 1), n=3), "llm": Mesh((2,), (2, 3))},
    ),
    "merged on a mixed stage": ({}, {"vision": Mesh((), (0,), n=2), "llm": Mesh((2,), (0, 1))}),
    "split on one pipeline of two ranks and two chunks": (
        {},
        {"vision": Mesh((2,), (0, 1), n=8), "llm": Mesh((3,), (0, 1))},
    ),
    "two encoders, one merged and one split": (
        SPEECH,
        {"vision": Mesh((), (0,), n=2), "audio": Mesh((2,), (1, 2), n=8), "llm": Mesh((2,), (3, 4))},
    ),
    "merged, frozen encoder": (FROZEN_VISION, {"vision": Mesh((), (0,), n=2), "llm": Mesh((2,), (1, 2))}),
}

# Encoders on the LLM's ranks under sizes of their own; their forwards before and their backwards after all else.
COLOCATED: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "colocated, encoders merged and split": (
        SPEECH,
        {"vision": Mesh((), (0, 1), dp=2, n=2), "audio": Mesh((2,), (0, 1), n=8), "llm": Mesh((2,), (0, 1))},
    ),
    "colocated, two image encoders, one merged": (
        TWO_IMAGE_ENCODERS,
        {"vision": Mesh((), (0, 1), dp=2), "fine": Mesh((2,), (0, 1), n=2), "llm": Mesh((2,), (0, 1))},
    ),
    "colocated, encoders between the llm's work": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))},
    ),
    "in parts, one rank": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}),
    "in parts, one rank, recomputed, frozen encoder": (
        FROZEN_VISION,
        {"vision": Mesh((), (0,), recompute=(0, 1, 2, 3)), "llm": Mesh((), (0,), recompute=(1, 2, 3, 4))},
    ),
    "in parts, one rank, nothing of the encoder trains": (
        FROZEN_VISION | {"model__vision__projector__freeze": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))},
    ),
    "in parts, tp2 with slices of tokens, recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 2)),
            "llm": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 3)),
        },
    ),
    "in parts, a pipeline": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}),
    "in parts, a pipeline, adapters with dropout": (
        DROPPING,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))},
    ),
    "in parts, a pipeline, recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1), dp=2, recompute=(1, 2)),
            "llm": Mesh((2,), (0, 1), recompute=(1, 2, 3)),
        },
    ),
}


# What travels beside the hidden states crosses borders of stages.
STACKED: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "deepstack, unified pp2 vpp2": (
        DEEPSTACK,
        {"vision": Mesh((2,), (0, 1)), "llm": Mesh((1, 2), (1, 0), vpp=2)},
    ),
    "deepstack, slices of tokens over every border": (
        DEEPSTACK,
        {
            "vision": Mesh((1, 2, 3), (0, 1, 2, 3), tp=2, vpp=2, sp=True),
            "llm": Mesh((1, 2, 3), (4, 5, 6, 7), tp=2, vpp=2, sp=True),
        },
    ),
    "deepstack, dp 1:2, tp2, recomputed": (
        DEEPSTACK,
        {
            "vision": Mesh((2,), (0, 1, 2, 3), tp=2, n=2, recompute=(1, 2, 3)),
            "llm": Mesh((), (4, 5), dp=2, recompute=(0, 1, 2)),
        },
    ),
    "deepstack, frozen encoder": (
        DEEPSTACK | FROZEN_VISION,
        {"vision": Mesh((2,), (0, 1)), "llm": Mesh((2,), (2, 3))},
    ),
    "deepstack, adapters": (
        DEEPSTACK | ADAPTED,
        {"vision": Mesh((2,), (0, 1, 2, 3), tp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2)},
    ),
    "deepstack of one of two encoders": (
        DEEPSTACK
        | {
            "model__encoders": {"fine": FINE | {"deepstack": (1,)}},
            "model__llm__rope_sections": None,
            "model__llm__rope_interleaved": False,
        },
        {"vision": Mesh((), (0,)), "fine": Mesh((2,), (0, 1)), "llm": Mesh((2,), (0, 1))},
    ),
}
STACKED_COLOCATED: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "deepstack, colocated": (DEEPSTACK, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}),
}


# Plain meshes. `tests.flow.cells` has all that they show, so they are long runs here; the smoke script for GPUs, whose
# rows people read, runs those that fit.
PLAIN: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "unified pp2, encoder on both": ({}, {"vision": Mesh((2,), (0, 1)), "llm": Mesh((), (1,))}),
    "unified pp2 dp2": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), dp=2)}),
    "unified tp2 pp2": ({}, {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((3,), (0, 1, 2, 3), tp=2)}),
    "disaggregated 1:1": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1,))}),
    "disaggregated 1:2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2)}),
    "disaggregated 2:1": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2,))}),
    "disaggregated 2:4, two replica groups": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4, 5), dp=4)},
    ),
    "llm pp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))}),
    "vision pp2": ({}, {"vision": Mesh((2,), (0, 1)), "llm": Mesh((), (2,))}),
    "llm tp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2)}),
    "vision tp2": ({}, {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (2,))}),
    "both tp2, dp 1:2": ({}, {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (2, 3, 4, 5), tp=2, dp=2)}),
    "llm tp2 with slices of tokens": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2, sp=True)}),
    "vision tp2 with slices of tokens": ({}, {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((), (2,))}),
    "llm tp2 dp2 with slices of tokens": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), tp=2, dp=2, sp=True)},
    ),
    "frozen encoder": (FROZEN_VISION, {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))}),
    "frozen llm": ({"model__llm__freeze": True}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (2, 3))}),
    "everything recomputed": (
        {},
        {
            "vision": Mesh((2,), (0, 1), recompute=(0, 1, 2, 3)),
            "llm": Mesh((2,), (2, 3, 4, 5), tp=2, recompute=(0, 1, 2, 3, 4)),
        },
    ),
    "some layers recomputed, some frozen": (
        {"train__freeze": ("vision.layers.[01].*", "llm.layers.[02].*")},
        {"vision": Mesh((), (0,), recompute=(1, 2)), "llm": Mesh((2,), (1, 2), recompute=(2, 4))},
    ),
    "llm pp2 vpp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 4), (1, 2), vpp=2)}),
    "llm pp2 vpp2, vision pp2": ({}, {"vision": Mesh((1,), (0, 1)), "llm": Mesh((1, 2, 3), (2, 3), vpp=2)}),
    "llm tp2 pp2 vpp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), tp=2, vpp=2)}),
    "llm pp2 vpp2 dp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2)}),
    "vision pp2 vpp2": ({}, {"vision": Mesh((1, 2, 3), (0, 1), vpp=2), "llm": Mesh((3,), (2, 3))}),
    "frozen encoder, llm pp2 vpp2": (
        FROZEN_VISION | {"model__vision__projector__freeze": True},
        {"vision": Mesh((2,), (0, 1)), "llm": Mesh((1, 2, 3), (2, 3), vpp=2)},
    ),
    "three units apart": (SPEECH, {"vision": Mesh((), (0,)), "audio": Mesh((), (1,)), "llm": Mesh((), (2,))}),
    "three units in one pipeline": (
        SPEECH,
        {"vision": Mesh((), (0,)), "audio": Mesh((1,), (0, 1)), "llm": Mesh((), (1,))},
    ),
    "three units of dp 1, 2 and 2, audio pp2": (
        SPEECH,
        {"vision": Mesh((), (0,)), "audio": Mesh((2,), (1, 2, 3, 4), dp=2), "llm": Mesh((), (5, 6), dp=2)},
    ),
    "one encoder microbatch for two of the llm": ({}, {"vision": Mesh((), (0,), n=2), "llm": Mesh((), (1,))}),
    "split in two, dp 2:1": ({}, {"vision": Mesh((), (0, 1), dp=2, n=8), "llm": Mesh((), (2,))}),
    "six encoder microbatches for four of the llm": ({}, {"vision": Mesh((), (0,), n=6), "llm": Mesh((), (1,))}),
}

# Encoders that tp does not divide: ranks of a TP group of the LLM hold replicas of them and share their items. Some
# microbatches have fewer items than the group has ranks, and some have none. `test_encoder_replicas.py` has more.
FIVE_HEADS = {"model__vision__heads": 5, "model__vision__hidden": 20}
ENCODER_REPLICAS: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "5 heads beside tp2": (FIVE_HEADS, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), tp=2)}),
    "5 heads beside tp2 pp2 with slices of tokens, an encoder stage on both": (
        FIVE_HEADS,
        {"vision": Mesh((2,), (0, 1, 2, 3), dp=2), "llm": Mesh((), (2, 3), tp=2, sp=True)},
    ),
}

# Gemma 3, and its LLM with images that it reads as text.
GEMMA_MESHES: dict[str, dict[str, Mesh]] = {
    "tp2 with slices of tokens": {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((), (0, 1), tp=2, sp=True)},
    "unified pp2, recomputed": {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1), recompute=(1, 2, 3))},
    "pp2 vpp2": {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2), vpp=2)},
    "disaggregated 1:2": {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2)},
    "colocated": {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))},
    "in parts, a pipeline": {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))},
}
GEMMA: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    f"images see both ways, {mesh}": (BIDIRECTIONAL, meshes) for mesh, meshes in GEMMA_MESHES.items()
}


# A second image encoder whose queries attend to each image. Some microbatches and every second step have no image.
RESAMPLER: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "resampler, disaggregated, tp2 with slices of tokens, split and recomputed": (
        {},
        {
            "vision": Mesh((), (0,)),
            "resampled": Mesh((3,), (1, 2, 3, 4), tp=2, sp=True, n=8, recompute=(1, 3)),
            "llm": Mesh((), (5, 6), tp=2),
        },
    ),
    "resampler, unified tp2, adapters": (
        ADAPTED,
        {"vision": Mesh((), (0, 1), tp=2), "resampled": Mesh((), (0, 1), tp=2), "llm": Mesh((), (0, 1), tp=2)},
    ),
    "resampler, frozen encoder, merged over two replicas": (
        {"train__freeze": ("resampled.layers.[0-2].*",)},
        {"vision": Mesh((), (0,)), "resampled": Mesh((), (1,), n=1), "llm": Mesh((), (2, 3), dp=2)},
    ),
    "resampler, colocated": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "resampled": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))},
    ),
}
# What GLM-4.5V has in its encoder. Its convolution and its projector train beside adapters on the rest.
MERGER: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "merger, unified tp2 with slices of tokens": (
        {},
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((), (0, 1), tp=2, sp=True)},
    ),
    "merger, disaggregated, adapters and a pipeline, recomputed": (
        ADAPTED,
        {"vision": Mesh((2,), (0, 1), recompute=(1,)), "llm": Mesh((), (2, 3), tp=2)},
    ),
}


def _lines(rank: int, order: str) -> tuple[str, ...]:
    """Write `Fv0` out as vision's forward of wave 0 on the encoder replica, `Bl1` as a backward of the LLM's stage."""
    full = {"v": f"vision.0 vision:{rank}", "l": f"llm.{rank} llm:0"}
    return tuple(f"{kind} {full[unit]}.{wave}" for kind, unit, wave in order.split())


ORDERS: dict[str, Order] = {
    "colocated, encoders between the llm's work": {
        0: _lines(0, "Fv0 Fl0 Fv1 Fl1 Fv2 Bl0 Fl2 Bv0 Bl1 Fv3 Fl3 Bl2 Bv2 Bl3 Bv1 Bv3"),
        1: _lines(1, "Fv0 Fv1 Fl0 Bl0 Fv2 Fl1 Bl1 Fv3 Bv0 Fl2 Bl2 Bv1 Fl3 Bl3 Bv2 Bv3"),
    },
    "in parts, one rank": {0: TOGETHER},
    "in parts, one rank, recomputed, frozen encoder": {0: TOGETHER},
    "in parts, one rank, nothing of the encoder trains": {0: TOGETHER},
    "in parts, tp2 with slices of tokens, recomputed": {0: TOGETHER, 1: TOGETHER},
    "in parts, a pipeline": PIPELINE,
    "in parts, a pipeline, adapters with dropout": PIPELINE,
    "in parts, a pipeline, recomputed": PIPELINE,
}


def kind_of(case: str) -> ScheduleKind:
    """Return the kind of a case's schedule."""
    if case in ORDERS:
        return "explicit"
    return "coarse" if case in COLOCATED | STACKED_COLOCATED else "1f1b"


ALL_CASES = CASES | COUNTS | COLOCATED | PLAIN | STACKED | STACKED_COLOCATED | ENCODER_REPLICAS
# These take longest or vary another case. `test_nccl.py` compares all cases with one process, in the long tier most.
LEFT_TO_NCCL = {
    *PLAIN,
    *STACKED,
    *STACKED_COLOCATED,
    "chunks of tokens, tp4, and tp2 with slices of tokens, partly frozen",
    "chunks of tokens, tp2, and tp4 with slices of tokens and two kv heads",
    "llm tp4 with two kv heads",
    "unified tp2 with slices of tokens, one kv head, tied",
    "both tp2 with slices of tokens, pp2, recomputed, partly frozen",
    "split in three, tp2 with slices of tokens, dp 1:2, recomputed",
    "slices of tokens over every border in the llm, vpp2",
    "parts of layers frozen, tied, tp2 pp2",
    "in parts, tp2 with slices of tokens, recomputed",
}


# Two axes at once, each of which a case of the quick tier has.
SLOW_CASES = {
    "llm tp4 with one kv head, pp2",
    "slices of tokens over every border in the encoder",
    "three units tp2, audio frozen",
    "5 heads beside tp2 pp2 with slices of tokens, an encoder stage on both",
    "tied embeddings frozen, pp2",
    "tied embeddings, both ends on one rank",
    "frozen by name, nothing to train on two ranks of four",
    "split in four, encoder pp2, llm pp2",
    "split on one pipeline of two ranks and two chunks",
    "two encoders, one merged and one split",
    "merged, frozen encoder",
    "colocated, two image encoders, one merged",
    "in parts, a pipeline, recomputed",
    "unified pp2 vpp2, mixed in the middle",
    "unified pp2, the encoder is the first round",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case, marks=[pytest.mark.slow] if case in SLOW_CASES else [])
        for case in ALL_CASES
        if case not in LEFT_TO_NCCL
    ],
)
def test_any_plan_computes_what_one_process_does(case: str) -> None:
    changes, meshes = ALL_CASES[case]
    settings, order = recipe(**changes), ORDERS.get(case)
    assert_equals_one_process(settings, plan(settings, kind_of(case), order, **meshes))


@pytest.mark.slow
@pytest.mark.parametrize("case", GEMMA)
def test_gemma_computes_under_any_plan_what_one_process_does(case: str) -> None:
    changes, meshes = GEMMA[case]
    settings, order = recipe(**changes), PIPELINE if "in parts" in case else None
    kind = "explicit" if order else "coarse" if "colocated" in case else "1f1b"
    assert_equals_one_process(settings, plan(settings, kind, order, **meshes), texts_between=True)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if i else []) for i, case in enumerate(RESAMPLER)]
)
def test_a_resampler_computes_under_any_plan_what_one_process_does(case: str) -> None:
    changes, meshes = RESAMPLER[case]
    settings = recipe(model__encoders={"resampled": RESAMPLED}, **changes)
    kind: ScheduleKind = "coarse" if "colocated" in case else "1f1b"
    assert_equals_one_process(settings, plan(settings, kind, **meshes), texts_between=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", MERGER)
def test_a_merger_computes_under_any_plan_what_one_process_does(case: str) -> None:
    changes, meshes = MERGER[case]
    encoder = {f"model__vision__{name}": value for name, value in MERGED.items()}
    assert_equals_one_process(recipe(**encoder, **changes), plan(recipe(**encoder, **changes), **meshes))


def _validate_after_a_step(settings: Recipe, chosen: Plan) -> tuple[float, float]:
    """Return this rank's part of a batch's loss in validation, and in the step after it, which gathers by itself."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    job = build_rank_context(settings, chosen, world)
    job.train(step_data(job, 0), 0.1)
    return job.validate(step_data(job, 1)).loss, job.train(step_data(job, 1), 0.1).loss


def test_validation_reads_what_the_step_before_has_updated() -> None:
    settings, meshes = recipe(), {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}
    for validated, trained in run_ranks(2, _validate_after_a_step, settings, plan(settings, **meshes)):
        assert validated == trained


def test_nothing_runs_backward_below_the_first_layer_that_trains() -> None:
    settings = recipe(train__freeze=("vision.*", "llm.layers.[0-2].*"))
    meshes = {"vision": Mesh((), (0,)), "llm": Mesh((1, 3), (1, 2, 3))}
    program = build_program(stage_graph(plan(settings, **meshes), build_model_shape(settings)))
    for rank in range(3):
        actions = program.for_rank(rank)
        assert not any(isinstance(a, Backward | ReduceGrads | GatherParams) for a in actions)
        assert not any(isinstance(a, Send | Recv) and a.payload == "gradient" for a in actions)
    assert sum(isinstance(a, Backward) for a in program.for_rank(3)) == 4
