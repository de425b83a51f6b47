"""Turn the payload of a step into inputs of stages: first on the host, then on the device."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmtrain.balance import BatchMeta, IntArray
from mmtrain.data.index.sample_sources import SampleSources
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.payload import EncoderPayload, TextPayload
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from mmtrain.models.attention.context_parallel import ContextShare, RowExchange
from mmtrain.models.kernels.keyed_dropout import key_of, token_keys
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.stage_inputs import EncoderInput, PixelScale, RowMix, TextInput, UnitInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.program import LLM, Microbatch, UnitMesh
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.execution.broker import RouteRows
from mmtrain.runtime.execution.context_inputs import context_share
from mmtrain.runtime.execution.executor import StepInput
from mmtrain.runtime.execution.noisy_images import noisy_images


class SharedReplica(NamedTuple):
    """The replica of the LLM on this rank, where it shares the sequences of microbatches with others."""

    mesh: UnitMesh
    replica: int


StagesOfUnits = Mapping[str, Iterable[StageModule]]
T = TypeVar("T")
_MOVED = (
    StepInput,
    EncoderInput,
    TextInput,
    GeneratorInput,
    RowMix,
    ContextShare,
    RowExchange,
)  # dataclasses whose tensors belong to one step


def host_inputs(
    data: StepData,
    stages: StagesOfUnits,
    recipe: Recipe,
    sources: SampleSources | None = None,
    shared: SharedReplica | None = None,
    trains: bool = False,
) -> dict[Microbatch, UnitInput]:
    """Make the inputs of the stages of this process; tensors are on the host, most of them views of the payload.

    With them come the index tables that the stages need. The recipe says how pixels are normalized, on the device, and
    how much noise the images to draw get. With `sources`, losses are summed by source. With `shared`, the LLM computes
    its share of every microbatch. Adapters drop inputs only if the step `trains`.
    """
    lora = recipe.train.lora
    drops = trains and lora is not None and lora.dropout > 0
    inputs: dict[Microbatch, UnitInput] = {}
    for unit, payloads in data.encoders.items():
        for (replica, index), encoder_payload in payloads.items():
            encoder: EncoderInput | GeneratorInput
            if unit == GENERATOR:
                encoder = noisy_images(encoder_payload, data.meta, (replica, index), recipe)
            else:
                encoder = _encoder_input(encoder_payload, recipe.data.image, _device_of(stages[unit]))
                if drops:
                    keys = _item_keys(recipe.train.seed, data.meta, unit, (replica, index))
                    encoder = replace(encoder, item_keys=keys)
            inputs[Microbatch(unit, replica, index)] = replace(encoder, tables=_host_tables(stages[unit], encoder))
    token_weight = 1.0 / max(1, int(data.meta.tokens.sum()))
    for (replica, index), text_payload in data.text.items():
        text = replace(_text_input(text_payload), token_weight=token_weight)
        if sources is not None and text.labels is not None:
            samples = data.meta.sample_id[data.meta.microbatch(replica, index)]
            text = _with_sources(text, sources.numbers[samples], len(sources.names))
        if drops:
            keys = _sequence_keys(recipe.train.seed, data.meta, (replica, index))
            text = replace(text, token_keys=torch.from_numpy(token_keys(keys, text.lengths)))
        microbatch = Microbatch(LLM, replica, index)
        if shared is not None:
            text = context_share(text, shared.mesh, data.meta, shared.replica, index)
            microbatch = Microbatch(LLM, shared.replica, index)
        inputs[microbatch] = replace(text, tables=_host_tables(stages[LLM], text))
    return inputs


def loss_scales(recipe: Recipe, meta: BatchMeta) -> dict[str, float]:
    """Return for each unit with a loss what its sum is multiplied by in a step.

    The LLM's is the mean over all target tokens of the global batch, the generator's that over all elements of its
    images, times its weight.
    """
    scales = {LLM: 1.0 / max(1, meta.total_targets)}
    generator = recipe.model.generator
    if generator is not None:
        num_elements = int(meta.items[GENERATOR].tokens.sum()) * generator.cell_features
        scales[GENERATOR] = generator.loss_weight / max(1, num_elements)
    return scales


def unit_inputs(
    data: StepData, stages: StagesOfUnits, recipe: Recipe, trains: bool = False
) -> dict[Microbatch, UnitInput]:
    """Make the inputs of stages on their device; the caller waits for the copies. `trains`: see `host_inputs`."""
    inputs = host_inputs(data, stages, recipe, trains=trains)
    return {mb: map_tensors(inputs[mb], _move_to(_device_of(stages[mb.unit]))) for mb in inputs}


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of a step's inputs, with each of their tensors replaced by what `function` returns for it."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, RouteRows):
        return RouteRows(*map(function, value))  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and isinstance(value, _MOVED):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    return value


def _move_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device)


def _device_of(stages: Iterable[StageModule]) -> torch.device:
    return next(parameter.device for stage in stages for parameter in stage.parameters())


def _host_tables(stages: Iterable[StageModule], inputs: UnitInput) -> dict[str, Tensor]:
    """Return the index tables that stages of one unit need of a microbatch."""
    tables = {name: table for stage in stages for name, table in stage.host_tables(inputs).items()}
    return {name: torch.from_numpy(table) for name, table in tables.items()}


def _encoder_input(payload: EncoderPayload, image: ImageSettings, device: torch.device) -> EncoderInput:
    cells = scale = None
    if payload.cells is not None:
        cells = torch.from_numpy(payload.cells)
        if cells.dtype == torch.uint8:
            scale = PixelScale.of(image.mean, image.std, cells.shape[1], device)
    return EncoderInput(payload.rows, payload.cols, cells, scale, payload.blank_cells)


def _sequence_keys(seed: int, meta: BatchMeta, microbatch: tuple[int, int]) -> tuple[int, ...]:
    """Return the key of each sequence of the LLM's microbatch (replica, index) in this step: see `keyed_dropout`."""
    samples = meta.sample_id[meta.microbatch(*microbatch)].tolist()
    return tuple(key_of(seed, meta.step, LLM, sample) for sample in samples)


def _item_keys(seed: int, meta: BatchMeta, unit: str, microbatch: tuple[int, int]) -> tuple[int, ...]:
    """Return the key of each item of an encoder's microbatch (replica, index), by its place in its sample."""
    table = meta.items[unit]
    items = table.microbatch(*microbatch)
    samples, places = meta.sample_id[table.sample[items]].tolist(), table.position[items].tolist()
    return tuple(key_of(seed, meta.step, unit, *which) for which in zip(samples, places, strict=True))


def _with_sources(text: TextInput, source_of_sequence: IntArray, num_sources: int) -> TextInput:
    """Add the source of each target to a microbatch on the host; source_of_sequence: (S,)."""
    assert text.target_positions is not None, "known wherever labels are"
    source_of_token = np.repeat(source_of_sequence, text.lengths)
    target_sources = torch.from_numpy(source_of_token[text.target_positions.numpy()])
    return replace(text, target_sources=target_sources, num_sources=num_sources)


def _text_input(payload: TextPayload) -> TextInput:
    labels = targets = None
    if payload.labels is not None:
        labels = torch.from_numpy(payload.labels)
        targets = torch.from_numpy(np.flatnonzero(payload.labels != IGNORE_INDEX))
    mixes = payload.feature_mixes.items()
    return TextInput(
        payload.lengths,
        None if payload.ids is None else torch.from_numpy(payload.ids),
        labels,
        {unit: torch.from_numpy(rows) for unit, rows in payload.feature_positions.items()},
        None if payload.position_ids is None else torch.from_numpy(payload.position_ids),
        {unit: RowMix(torch.from_numpy(mix.rows), torch.from_numpy(mix.weights)) for unit, mix in mixes},
        image_spans=payload.image_spans,
        target_positions=targets,
        query_positions=None if payload.query_positions is None else torch.from_numpy(payload.query_positions),
    )
