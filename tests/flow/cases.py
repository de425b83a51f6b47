"""A tiny model, a fixed batch of ragged samples, and what one process makes of it sample by sample."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmtrain.balance import BatchMeta, ItemLengths, SampleLengths, StepTargets, assign
from mmtrain.costs import machine_for, precision_for
from mmtrain.data.loading.batch_builder import StepData, find_media_positions
from mmtrain.data.loading.payload import EncoderPayload, build_encoder_payload, build_text_payload
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.data.text.sample_tokenizer import EncodedSample
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.kernels.keyed_dropout import key_of, token_keys
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.megatron.selection_biases import SelectionBiases
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.planning.artifact.plan import (
    LargestMicrobatch,
    Plan,
    PlannedData,
    Prediction,
    SchedulePlan,
    StagePlan,
    UnitPlan,
)
from mmtrain.program import DispatchMode, ScheduleKind
from mmtrain.program.ir.graph import ContextMethod, CutSequences
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import RankContext
from tests.flow.reference_muon import TRAINED, ReferenceMuon

IMAGE_ID, AUDIO_ID, VOCAB, PATCH, MERGE, BINS, STACK = 3, 2, 61, 2, 2, 10, 2
SAMPLES, TEXTS = range(8), range(8, 16)  # those of a step; and those of a step of text alone
NUM_PLANNED = 16  # samples for which tests make plans: both of these
GRIDS = [[], [(2, 4)], [(2, 2), (4, 4), (4, 2), (6, 2)], [], [(4, 6)], [(2, 2)], [(2, 6), (2, 2)], [(8, 4)]]
GRIDS += [[] for _ in TEXTS]
HEARD, LONG = range(16, 24), range(24, 32)  # those of a step without any image; and of one with a giant sample
MANY = range(32, 40)  # those of a step with 64 images in one sample
GRIDS += [[] for _ in HEARD] + [[(8, 8)] * 5 + [(8, 4)] * 4] + [[] for _ in LONG[1:]]
GRIDS += [[(4, 4)] * 8 + [(2, 2)] * 56, [(2, 4)]] + [[] for _ in MANY[2:]]
ITEM_IDS = {"vision": (IMAGE_ID,), "fine": (IMAGE_ID,), "resampled": (IMAGE_ID,), "audio": (AUDIO_ID,)}
CLIPS = [[], [], [8], [12, 4], [], [16], [], []]  # log-mel frames; heard only by models with an audio unit
CLIPS += [[] for _ in TEXTS]
CLIPS += [[16, 8], [], [], [4], [], [], [12], []] + [[16] * 4] + [[] for _ in LONG[1:]]
CLIPS += [[16, 4], [], [12]] + [[] for _ in MANY[3:]]
SMALLEST_MICROBATCH = LargestMicrobatch(tokens=1, sum_sq=1, max_len=1, num_sequences=1)  # fits into any memory
AUDIO = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "ffn": 24,
    "mel_bins": BINS,
    "max_frames": 16,
    "downsample": STACK,
    "positions": "learned",
}
# A second image encoder, `model.encoders.fine`: other patches, widths and positions, and four times the features.
FINE_PATCH = 3
FINE = {
    "modality": "vision",
    "layers": 2,
    "hidden": 8,
    "heads": 2,
    "ffn": 12,
    "patch": FINE_PATCH,
    "max_side": 8,
    "class_token": True,
}
# In place of it, one whose queries attend to each image, however large: `model.encoders.resampled`.
NUM_QUERIES = 3
RESAMPLED = FINE | {"projector": {"kind": "resampler", "queries": NUM_QUERIES, "heads": 4}}
# What Qwen3-VL does: outputs of both blocks of the encoder reach the LLM's first two.
DEEPSTACK = {
    "model__vision__positions": "rotary",
    "model__vision__position_grid": 3,
    "model__vision__deepstack": (0, 1),
    "model__llm__rope_sections": (1, 1, 1),
    "model__llm__rope_interleaved": True,
}
TEXT_TOKENS = [9, 5, 7, 13, 4, 11, 6, 8] * 3 + [40, 5, 4, 6, 4, 5, 7, 4] * 2
GLOBAL_BATCH = 4  # groups of two samples, unless a case says otherwise


def recipe(**changes: Any) -> Recipe:
    """Return the tiny recipe; `changes` are laid over it, nested by double underscores (`model__llm__freeze`)."""
    settings: dict[str, Any] = {
        "name": "flow",
        "model": {
            "vision": {
                "layers": 2,
                "hidden": 16,
                "heads": 2,
                "ffn": 24,
                "patch": PATCH,
                "max_side": 8,
                "downsample": "pixel_shuffle",
                "merge": MERGE,
            },
            "llm": {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": VOCAB, "qkv_bias": True},
        },
        "data": {"sources": [{"path": "none.json"}], "tokenizer": "none.json", "seq_len": 64},
        "train": {
            "steps": 5,
            "global_batch": GLOBAL_BATCH,
            "seed": 7,
            # Adam divides a gradient by its size, so of tiny ones, as those of a key's bias, it makes whole steps that
            # are all rounding. An `eps` above most gradients makes steps nearly proportional, and losses comparable.
            "optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_norm": None, "schedule": "constant", "eps": 1e-3},
        },
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = settings
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    return Recipe.model_validate(settings)


@dataclass(frozen=True)
class Mesh:
    """How one unit is cut: layer borders of its stages, and its ranks; with `vpp` the stages go round them."""

    cuts: tuple[int, ...]  # first layer of every stage but the first
    ranks: tuple[int, ...]
    tp: int = 1
    dp: int = 1
    vpp: int = 1
    recompute: tuple[int, ...] = ()
    sp: bool = False
    n: int = 0  # microbatches of a replica; as many as the LLM's if 0
    cp: int = 1
    method: ContextMethod = "ulysses"
    split: CutSequences = "auto"
    ep: int = 1
    tp_chunks: int = 1
    bucket_parameters: int | None = 1  # replicas reduce the gradients of every layer by themselves


Order = dict[int, tuple[str, ...]]


def plan(
    settings: Recipe,
    kind: ScheduleKind = "1f1b",
    order: Order | None = None,
    shard: int | None = None,
    dispatch: DispatchMode | None = None,
    **meshes: Mesh,
) -> Plan:
    """Return a plan with these meshes (unit name -> mesh); with `shard` or `dispatch` it is `replicated`."""
    model = build_model_shape(settings)
    units = {}
    for name, mesh in meshes.items():
        borders = [0, *mesh.cuts, len(model.unit(name).layers)]
        pp = len(mesh.ranks) // (mesh.tp * mesh.cp * mesh.dp)
        stages = tuple(
            StagePlan(
                stage=i, chunk=i // pp, layers=(lo, hi), recompute=tuple(x for x in mesh.recompute if lo <= x < hi)
            )
            for i, (lo, hi) in enumerate(itertools.pairwise(borders))
        )
        units[name] = UnitPlan(
            tp=mesh.tp,
            pp=pp,
            dp=mesh.dp,
            vpp=mesh.vpp,
            sp=mesh.sp,
            cp=mesh.cp,
            cp_method=mesh.method if mesh.cp > 1 else None,
            cp_split=mesh.split if mesh.cp > 1 else None,
            ep=mesh.ep,
            tp_chunks=mesh.tp_chunks,
            bucket_parameters=mesh.bucket_parameters,
            shard=shard,
            dispatch=dispatch,
            keeps_weights=shard is not None and settings.parallel.zero == 2,
            exchange=settings.parallel.exchange,
            ranks=mesh.ranks,
            stages=stages,
        )
    shared = {r for m in meshes.values() for r in m.ranks}
    num_microbatches = settings.train.global_batch // meshes["llm"].dp
    return Plan(
        recipe_sha256="",
        hardware="cpu-core",
        precision=precision_for(settings, machine_for(settings, "cpu-core")),
        world_size=len(shared),
        placement="replicated"
        if shard is not None or dispatch is not None
        else "colocated"
        if kind != "1f1b"
        else "unified"
        if len(shared) < sum(len(m.ranks) for m in meshes.values())
        else "disaggregated",
        units=units,
        schedule=SchedulePlan(
            kind=kind, num_microbatches={u: m.n or num_microbatches for u, m in meshes.items()}, order=order
        ),
        data=PlannedData(samples=0, tokens={}, largest_microbatch=dict.fromkeys(units, SMALLEST_MICROBATCH)),
        predicted=Prediction(
            step_time_s=0,
            mfu=0,
            tokens_per_s_per_gpu=0,
            peak_memory_gib={},
            memory_kinds_gib={},
            memory_gib=1,
            bubbles={},
            cost_source="none",
        ),
    )


def lengths(encoders: Collection[str] = ("vision",), num_samples: int = len(GRIDS)) -> SampleLengths:
    """Return the lengths of the first samples: text only, one image, up to four images of different sizes.

    For models with `audio` some also have one or two clips, some of them beside images.
    """
    samples = [encoded(s, encoders) for s in range(num_samples)]
    tokens = np.array([len(s.ids) for s in samples], dtype=np.int64)
    targets = np.array([int((s.labels >= 0).sum()) for s in samples], dtype=np.int64)
    rows, cols, first = _sides(GRIDS[:num_samples])
    items = {"vision": ItemLengths(first, rows, cols, rows * cols, rows * cols // MERGE**2)}
    if "audio" in encoders:
        frames, ones, first_clip = _sides([[(n, 1) for n in clips] for clips in CLIPS[:num_samples]])
        items["audio"] = ItemLengths(first_clip, frames, ones, frames // 2, frames // (2 * STACK))
    if "fine" in encoders:
        items["fine"] = ItemLengths(first, rows, cols, rows * cols + 1, rows * cols)
    if "resampled" in encoders:
        items["resampled"] = ItemLengths(first, rows, cols, rows * cols + 1, np.full_like(rows, NUM_QUERIES))
    return SampleLengths(tokens, targets, items)


def _sides(samples: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of all items, and where each sample's begin."""
    sides = np.array([item for items in samples for item in items], dtype=np.int64)
    return sides[:, 0], sides[:, 1], np.cumsum([0, *(len(items) for items in samples)], dtype=np.int64)


def encoded(sample: int, encoders: Collection[str] = ("vision",)) -> EncodedSample:
    """Return ids and labels of a sample: two words, its images, two words, its clips, words; the last are predicted."""
    rng = np.random.default_rng(100 + sample)
    num_features = sum(map(sum, image_features(sample, encoders)))
    num_heard = sum(n // (2 * STACK) for n in CLIPS[sample]) if "audio" in encoders else 0
    words = rng.integers(4, VOCAB, TEXT_TOKENS[sample])
    places = (words[:2], np.full(num_features, IMAGE_ID), words[2:4], np.full(num_heard, AUDIO_ID), words[4:])
    ids = np.concatenate(places).astype(np.int64)
    labels = np.full(len(ids), -100, dtype=np.int64)
    labels[-3:-1] = ids[-2:]
    return EncodedSample(ids, labels)


def image_features(sample: int, encoders: Collection[str]) -> list[tuple[int, int]]:
    """Return for each image the numbers of features of `vision` and of a second encoder of images."""
    features = []
    for rows, cols in GRIDS[sample]:
        of_second = NUM_QUERIES * ("resampled" in encoders) + rows * cols * ("fine" in encoders)
        features.append((rows * cols // MERGE**2, of_second))
    return features


def patches(sample: int, position: int, rows: int, cols: int) -> np.ndarray:
    """Return the patches of one image."""
    rng = np.random.default_rng([sample, position])
    return rng.standard_normal((rows * cols, 3 * PATCH**2)).astype(np.float32)


def fine_patches(sample: int, position: int, rows: int, cols: int) -> np.ndarray:
    """Return the patches of one image for the second encoder."""
    rng = np.random.default_rng([200 + sample, position])
    return rng.standard_normal((rows * cols, 3 * FINE_PATCH**2)).astype(np.float32)


def mels(sample: int, position: int, frames: int, cols: int = 1) -> np.ndarray:
    """Return the log-mel frames of one clip."""
    rng = np.random.default_rng([50 + sample, position])
    return rng.standard_normal((frames, BINS)).astype(np.float32)


# Unit -> its cells, and the numbers in each.
CELLS = {"vision": (patches, 3 * PATCH**2), "fine": (fine_patches, 3 * FINE_PATCH**2), "audio": (mels, BINS)}
CELLS["resampled"] = CELLS["fine"]


def position_ids(sample: int, ids: np.ndarray) -> np.ndarray:
    """Return the positions in time, row and column of a sample's tokens, whose images `vision` alone reads."""
    grids = [MediumGrid((0,), rows // MERGE, cols // MERGE) for rows, cols in GRIDS[sample]]
    # Without text between them, `find_media_positions` sees where an image ends only by its size.
    return find_media_positions(ids, (IMAGE_ID,), grids)


def samples_of(step: int, texts_between: bool | range = False) -> range:
    """Return the samples of a step; with `texts_between` every second step has text alone.

    A range stands for the samples of the first step, and of every second one after it.
    """
    if isinstance(texts_between, range):
        return SAMPLES if step % 2 else texts_between
    return TEXTS if texts_between and step % 2 else SAMPLES


def batch(
    step: int,
    samples: range,
    dp: dict[str, int],
    num_microbatches: dict[str, int],
    dispatch: DispatchMode | None = None,
    ranks_per_node: int | None = None,
) -> BatchMeta:
    """Return the global batch of a step: the samples, in another order every step, in groups of near equal numbers.

    ranks_per_node: of replicas that dispatch node-wise, one on each rank.
    """
    # Of the first orders none gives node-wise replicas other items than the others have.
    first_order = 0 if ranks_per_node is None else 7
    order = samples.start + np.random.default_rng(first_order + step).permutation(len(samples))
    groups = np.array_split(order, dp["llm"] * num_microbatches["llm"])
    found = lengths(dp)
    found = replace(found, items={unit: items for unit, items in found.items.items() if unit in dp})
    nodes = tuple(rank // (ranks_per_node or dp["llm"]) for rank in range(dp["llm"]))
    replica_nodes = dict.fromkeys(dp, nodes) if dispatch == "all" else {}
    targets = StepTargets(reorder=dispatch != "none", dispatch=dispatch == "all", replica_nodes=replica_nodes)
    return assign(step, 0, groups, found, dp, num_microbatches, targets)


def step_data(job: RankContext, step: int, texts_between: bool | range = False) -> StepData:
    """Return what this rank of the job needs of a step."""
    dispatch = job.graph.mesh("llm").dispatch
    ranks_per_node = job.recipe.cluster.ranks_per_node if job.recipe.parallel.node_wise else None
    samples = samples_of(step, texts_between)
    meta = batch(step, samples, job.dp, job.num_microbatches, dispatch, ranks_per_node)
    encoders: dict[str, dict[tuple[int, int], EncoderPayload]] = {}
    text = {}
    for need in job.needs:
        for i in range(job.num_microbatches[need.unit]):
            key = (need.replica, i)
            if need.unit == "llm":
                encode = partial(encoded, encoders=job.dp)
                text[key] = build_text_payload(meta, need, i, ITEM_IDS, encode, position_ids)
            else:
                load, cell_features = CELLS[need.unit]
                payload = build_encoder_payload(meta, need.unit, *key, cell_features, load if need.media else None)
                encoders.setdefault(need.unit, {})[key] = payload
    return StepData(meta, encoders, text, ())


def layer_scales(decay: float, num_blocks: int) -> list[float]:
    """Return what multiplies the learning rate of each layer: of the first one, of the blocks, of the last one."""
    return [decay**num_blocks, *(decay ** (num_blocks - 1 - i) for i in range(num_blocks)), 1.0]


class Reference:
    """One process, one sample at a time, plain autograd, plain AdamW and plain Muon."""

    def __init__(self, settings: Recipe) -> None:
        self.settings, model, groups = settings, build_model_shape(settings), ParallelGroups.single()
        self.encoders = tuple(settings.model.all_encoders)
        self.stages = nn.ModuleDict(
            {
                unit.name: build_stage(
                    settings.model,
                    model,
                    StageSpec(unit.name, (0, len(unit.layers))),
                    groups,
                    StageOptions(torch.float32, torch.device("cpu"), settings.train.seed, "reference"),
                )
                for unit in model.units
            }
        )
        optimizer = settings.train.optimizer
        groups = []
        self.muons: list[ReferenceMuon] = []
        for unit, stage in self.stages.items():
            own = settings.model.unit(unit)
            decay = optimizer.weight_decay if own.weight_decay is None else own.weight_decay
            scales = layer_scales(optimizer.layer_lr_decay, num_blocks=len(model.unit(unit).layers) - 2)
            trained = {name: param for name, param in stage.named_parameters() if param.requires_grad}
            linears = {name: param for name, param in trained.items() if TRAINED.search(name)}
            if optimizer.kind == "muon":
                self.muons.append(ReferenceMuon(settings, unit, scales, linears))
            for name, param in trained.items():
                if optimizer.kind == "adamw" or name not in linears:
                    lr = optimizer.lr * own.lr_scale * scales[int(name.split(".")[1])]
                    groups.append({"params": [param], "weight_decay": decay if param.ndim > 1 else 0.0, "lr": lr})
        self.num_steps = 0
        self.adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
        self.biases = []
        if settings.model.llm.moe is not None:
            single, rate = ParallelGroups.single(), settings.model.llm.moe.selection_bias_rate
            self.biases = [SelectionBiases(self.stages.values(), single.dp, rate)]

    def step(self, samples: range = SAMPLES) -> tuple[float, float, dict[str, Tensor]]:
        """Run one optimizer step on the samples; return loss, gradient norm and gradients by name.

        What no sample reaches has a gradient of zero, not none: weights decay and momentum goes on in a step without
        images too, as it must when some ranks have images and others none.
        """
        found = lengths(self.encoders)
        total, self.token_weight = int(found.targets[samples].sum()), 1 / int(found.tokens[samples].sum())
        for biases in self.biases:
            biases.reset()
        for param in self.stages.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        loss = 0.0
        for sample in samples:
            part = self._loss(sample, GRIDS[sample]) / total
            loss += float(part.detach())
            if part.requires_grad:  # not for text alone through a frozen LLM
                part.backward()
        gradients = {}
        for name, param in self.stages.named_parameters():
            if param.requires_grad:
                assert param.grad is not None
                gradients[name] = param.grad.clone()
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).double().norm())
        limit = self.settings.train.optimizer.clip_norm
        if limit is not None and norm > limit:
            for param in self.stages.parameters():
                if param.grad is not None:
                    param.grad *= limit / norm
        for stepped in (self.adam, *self.muons):
            stepped.step()
        for biases in self.biases:
            biases.step(torch.zeros(()))
        self.num_steps += 1
        return loss, norm, gradients

    def _item_keys(self, unit: str, sample: int, num_items: int) -> tuple[int, ...] | None:
        """Return the keys of a sample's items in this step, by which adapters drop inputs; None if they drop none."""
        train = self.settings.train
        if train.lora is None or not train.lora.dropout:
            return None
        return tuple(key_of(train.seed, self.num_steps, unit, sample, item) for item in range(num_items))

    def _loss(self, sample: int, grids: list[tuple[int, int]]) -> Tensor:
        tokens = encoded(sample, self.encoders)
        features = {}
        places = {"audio": torch.from_numpy(np.flatnonzero(tokens.ids == AUDIO_ID)), **self._image_places(sample)}
        if grids:
            rows, cols = zip(*grids, strict=True)
            for unit, (cells, _) in CELLS.items():
                if unit in self.encoders and unit != "audio":
                    pixels = np.concatenate([cells(sample, i, *grid) for i, grid in enumerate(grids)])
                    keys = self._item_keys(unit, sample, len(grids))
                    images = EncoderInput(rows, cols, torch.from_numpy(pixels), item_keys=keys)
                    features[unit] = self.stages[unit](None, images)
        if "audio" in self.encoders and CLIPS[sample]:
            frames = tuple(CLIPS[sample])
            sound = np.concatenate([mels(sample, i, n) for i, n in enumerate(frames)])
            keys = self._item_keys("audio", sample, len(frames))
            clips = EncoderInput(frames, (1,) * len(frames), torch.from_numpy(sound), item_keys=keys)
            features["audio"] = self.stages["audio"](None, clips)
        positions = None
        if self.settings.model.llm.rope_sections is not None:
            positions = torch.from_numpy(position_ids(sample, tokens.ids))
        ids, labels = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.labels)
        num_features = int((ids == IMAGE_ID).sum())
        spans = ()
        if self.settings.model.llm.image_attention == "bidirectional" and num_features:
            spans = ((2, 2 + num_features),)  # no text is between the images of a sample, so they count as one
        inputs = TextInput((len(ids),), ids, labels, places, positions, image_spans=spans)
        inputs = replace(inputs, token_weight=self.token_weight)
        train = self.settings.train
        if train.lora is not None and train.lora.dropout:
            keys_of_tokens = token_keys([key_of(train.seed, self.num_steps, "llm", sample)], [len(ids)])
            inputs = replace(inputs, token_keys=torch.from_numpy(keys_of_tokens))
        loss: Tensor = self.stages["llm"](None, inputs, features)
        return loss

    def _image_places(self, sample: int) -> dict[str, Tensor]:
        """Return where the features of each image encoder stand: image by image, those of `vision` first."""
        second = "resampled" if "resampled" in self.encoders else "fine"
        places: dict[str, list[int]] = {"vision": [], second: []}
        end = 2  # words before the images
        for of_vision, of_second in image_features(sample, self.encoders):
            places["vision"] += range(end, end + of_vision)
            places[second] += range(end + of_vision, end + of_vision + of_second)
            end += of_vision + of_second
        return {unit: torch.tensor(rows, dtype=torch.int64) for unit, rows in places.items()}
