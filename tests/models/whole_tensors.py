"""Put together what ranks and stages compute in parts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.llm_layers import TextContext
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule


def join_tp_shards(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Join the shards of all tensor-parallel ranks, in rank order, into the full view."""
    if spec.dim is None:
        return shards[0].reshape(spec.full_shape)
    return torch.cat([shard.reshape(spec.local_shape(len(shards))) for shard in shards], dim=spec.dim)


def stage_logits(
    stage: StageModule, hidden: Tensor | None, inputs: TextInput, features: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Run a stage that ends with the head; return logits (T, padded vocabulary) and ignore the labels."""
    context = stage.context(inputs, features or {})
    assert isinstance(context, TextContext)
    logits = stage.run_to_head(context, hidden, stage.indices, lambda head, rows: head.logits(rows))
    return logits[: context.num_tokens]
