"""Sum up over all ranks how many tokens the experts of each mixture computed in a step."""

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron.experts import ExpertMlp
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.program import LLM
from mmtrain.report.metrics_record import ExpertMetrics
from mmtrain.runtime.execution.rank_context import RankContext


class ExpertLoadReducer:
    """Exchanges what the mixtures of all ranks recorded, once a step."""

    def __init__(self, context: RankContext) -> None:
        """Find the mixtures of the LLM, and which of them this rank holds."""
        layers = context.shape.unit(LLM).layers
        mixtures = {i: layer.mlp for i, layer in enumerate(layers) if isinstance(layer.mlp, MoeMlp)}
        self._context, self._layers = context, tuple(mixtures)
        self._num_experts = next((mlp.experts for mlp in mixtures.values()), 0)

    def reduce(self) -> ExpertMetrics | None:
        """Describe the step that has ended; None without mixtures. All ranks call this together."""
        if not self._layers:
            return None
        world = self._context.world
        table = torch.zeros(len(self._layers), self._num_experts + 3, dtype=torch.float64)
        for layer, taken in self._recorded().items():
            table[self._layers.index(layer)] += taken
        if world.size > 1:
            on_device = table.to(world.device)
            dist.all_reduce(on_device)
            table = on_device.cpu()
        of_experts, (num_rows, squares, fullest) = table[:, :-3], table[:, -3:].unbind(dim=1)
        total = max(float(num_rows.sum()), 1.0)
        mean = (num_rows / self._num_experts).clamp(min=1e-9)
        names = [f"{LLM}.layers.{layer}" for layer in self._layers]
        dead = [(rows == 0).nonzero().flatten().tolist() for rows in of_experts]
        return ExpertMetrics(
            max_over_mean=dict(zip(names, (of_experts.max(dim=1).values / mean).tolist(), strict=True)),
            spread=float(squares.sum() / total) ** 0.5,
            fullest_rank=float(fullest.sum() / total),
            dead={name: tuple(numbers) for name, numbers in zip(names, dead, strict=True) if numbers},
        )

    def _recorded(self) -> dict[int, Tensor]:
        """Return by layer what the mixtures of this rank recorded since the last step."""
        unit = self._context.units.get(LLM)
        stages = () if unit is None else unit.stages.values()
        return {
            int(name): module.loads.take()
            for stage in stages
            for name, layer in stage.layers.items()
            for module in layer.modules()
            if isinstance(module, ExpertMlp)
        }
