"""Answers from a trained model, on one device: greedy decoding of packed prompts.

Nothing is cached between tokens. Each round runs the open sequences of a batch anew through the LLM, packed like a
training microbatch, so evaluation computes what training computed; answers are short, and rounds are few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmtrain.balance.batch import IntArray
from mmtrain.checkpoint import Checkpoint, ShardSpec
from mmtrain.data.images import FloatArray
from mmtrain.data.tokenize import ChatTokenizer
from mmtrain.models import params
from mmtrain.models.build import StageModule, build_stage
from mmtrain.models.inputs import AudioInput, TextInput, UnitInput, VisionInput
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shape import shape
from mmtrain.recipe import Recipe
from mmtrain.runtime.job import LLM, compute_dtype


@dataclass(frozen=True)
class Picture:
    """One image as patches."""

    rows: int
    cols: int
    patches: FloatArray  # (rows * cols, 3 * patch * patch)


@dataclass(frozen=True)
class Clip:
    """One clip as log-mel frames."""

    mels: FloatArray  # (frames, mel_bins)


@dataclass(frozen=True)
class Prompt:
    """What the model is asked."""

    ids: IntArray  # (T,) tokens of images and clips included, up to where the answer starts
    pictures: tuple[Picture, ...]  # in the order of their tokens
    clips: tuple[Clip, ...] = ()  # likewise


@dataclass(frozen=True)
class Model:
    """A whole model in this process. The head is a stage of its own, so that few rows need reach it."""

    encoders: Mapping[str, StageModule]
    body: StageModule  # the LLM up to its last block
    head: StageModule
    device: torch.device
    dtype: torch.dtype


def build_model(recipe: Recipe, device: torch.device) -> Model:
    """Build all units of the recipe's model whole on `device`, with their initial weights."""
    whole, groups, dtype = shape(recipe), ParallelGroups.single(), compute_dtype(recipe, device)

    def stage(unit: str, lo: int, hi: int) -> StageModule:
        return build_stage(
            recipe.model,
            whole,
            unit,
            (lo, hi),
            groups,
            dtype=dtype,
            device=device,
            recompute=frozenset(),
            seed=recipe.train.seed,
            attention="auto",  # the recipe's choice may need the machine that it was trained on
        )

    encoders = {name: stage(name, 0, len(whole.unit(name).layers)) for name in whole.encoders}
    last = len(whole.unit(LLM).layers) - 1
    return Model(encoders, stage(LLM, 0, last), stage(LLM, last, last + 1), device, dtype)


def load_weights(model: Model, checkpoint: Checkpoint) -> None:
    """Fill the model with a checkpoint's weights, whatever plan wrote them.

    Raises CheckpointError, naming the parameter, when one is missing or has another shape.
    """
    with torch.no_grad():
        for stage in (*model.encoders.values(), model.body, model.head):
            specs = params.specs(stage, stage.unit, tp=1)
            for name, param in stage.named_parameters():
                stored = checkpoint.read(specs[name].name, ShardSpec(specs[name].full_shape))
                param.copy_(stored.reshape(param.shape))


@torch.inference_mode()
def generate(model: Model, prompts: Sequence[Prompt], tokenizer: ChatTokenizer, max_new_tokens: int) -> list[list[int]]:
    """Continue every prompt by the most likely token, again and again, all of them in one batch.

    An answer ends before `<|end|>`, or at `max_new_tokens`. Ids at or above the tokenizer's size are padding of the
    vocabulary and are never chosen.
    """
    item_ids = {unit: tokenizer.item_ids[unit] for unit in model.encoders}
    features = _features(model, prompts, item_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    open_ = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        if not open_:
            break
        logits = _next_logits(model, [(prompts[i], answers[i], features[i]) for i in open_], item_ids)
        chosen = logits[:, : tokenizer.vocab_size].argmax(dim=-1).tolist()
        for i, token in zip(open_, chosen, strict=True):
            if token != tokenizer.end_id:
                answers[i].append(token)
        open_ = [i for i, token in zip(open_, chosen, strict=True) if token != tokenizer.end_id]
    return answers


def batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Deal sequences to batches of at most `max_tokens` tokens, shortest first; a longer one is a batch of its own.

    Equal lengths come together because attention on a CPU takes one call for each distinct length of a batch.

    >>> batches([5, 2, 9, 2], max_tokens=8)
    [[1, 3], [0], [2]]
    """
    dealt: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not dealt or lengths[i] > room:
            dealt.append([])
            room = max_tokens
        dealt[-1].append(i)
        room -= lengths[i]
    return dealt


Features = Mapping[str, Tensor]  # encoder unit -> (F, hidden), for the items of one prompt


def _features(model: Model, prompts: Sequence[Prompt], item_ids: Mapping[str, int]) -> list[Features]:
    """Encode the items of all prompts, an encoder's all at once; return each prompt's features."""
    found: list[dict[str, Tensor]] = [{} for _ in prompts]
    for unit, encoder in model.encoders.items():
        inputs = _pictures(model, prompts) if unit == "vision" else _clips(model, prompts)
        if inputs is not None:
            features: Tensor = encoder(None, inputs)
            split = torch.split(features, [int((prompt.ids == item_ids[unit]).sum()) for prompt in prompts])
            for own, part in zip(found, split, strict=True):
                own[unit] = part
    return list(found)


def _pictures(model: Model, prompts: Sequence[Prompt]) -> UnitInput | None:
    pictures = [picture for prompt in prompts for picture in prompt.pictures]
    if not pictures:
        return None
    patches = torch.from_numpy(np.concatenate([p.patches for p in pictures])).to(model.device, model.dtype)
    return VisionInput(tuple(p.rows for p in pictures), tuple(p.cols for p in pictures), patches)


def _clips(model: Model, prompts: Sequence[Prompt]) -> UnitInput | None:
    clips = [clip for prompt in prompts for clip in prompt.clips]
    if not clips:
        return None
    mels = torch.from_numpy(np.concatenate([c.mels for c in clips])).to(model.device, model.dtype)
    return AudioInput(tuple(len(c.mels) for c in clips), mels)


def _next_logits(
    model: Model, asked: Sequence[tuple[Prompt, list[int], Features]], item_ids: Mapping[str, int]
) -> Tensor:
    """Logits (S, padded vocabulary) of the token that follows each of S prompts with the answer it has so far."""
    lengths = tuple(len(prompt.ids) + len(answer) for prompt, answer, _ in asked)
    ends = np.cumsum(lengths)
    ids = np.concatenate([part for prompt, answer, _ in asked for part in (prompt.ids, np.array(answer, np.int64))])
    # Looked for in the prompts alone: a model may also answer with an image token, which then stands for no picture.
    starts = list(zip(ends - lengths, (prompt for prompt, _, _ in asked), strict=True))
    places = {
        unit: torch.from_numpy(np.concatenate([start + np.flatnonzero(p.ids == token) for start, p in starts]))
        for unit, token in item_ids.items()
    }
    features = {
        unit: torch.cat(rows) for unit in item_ids if (rows := [own[unit] for _, _, own in asked if unit in own])
    }
    inputs = TextInput(
        lengths,
        torch.from_numpy(ids).to(model.device),
        feature_places={unit: at.to(model.device) for unit, at in places.items()},
    )
    hidden = model.body(None, inputs, features)
    return model.head.logits(hidden[torch.from_numpy(ends - 1).to(model.device)], TextInput((1,) * len(asked)))
