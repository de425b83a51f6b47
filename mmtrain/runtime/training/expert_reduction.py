"""Sum up over all ranks how many tokens the experts of each mixture computed in a step, and the routers' losses."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.costs.recorded_costs import RecordedRatios
from mmtrain.models.megatron.experts import ExpertMlp
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.models.shapes.model_shape import with_expert_spread
from mmtrain.program import LLM, ModelTiming
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.report.metrics_record import ExpertMetrics
from mmtrain.runtime.execution.rank_context import RankContext

_NUM_SUMS = 5  # behind the rows of each expert: the last three of `RecordedLoads.take`, and the router's two losses


def ratios_at_spread(ratios: RecordedRatios, timing: ModelTiming, spread: float) -> RecordedRatios:
    """Return recorded over predicted seconds, had the recorded loads of experts been predicted.

    ratios: to the predictions of `timing`, whose steps wait for a fullest rank of its own shape's loads. Else a plan
    for the recorded `spread` would count it twice.
    """
    graph = timing.graph
    if graph.mesh(LLM).ep == 1:
        return ratios
    at_spread = replace(timing, shape=with_expert_spread(timing.shape, spread))
    of_replica = [mb for mb in timing.loads.loads if (mb.unit, mb.replica) == (LLM, 0)]
    passes = [(stage.id, mb) for stage in graph.stages if stage.id.unit == LLM for mb in of_replica]

    def longer(kind: type[Forward] | type[Backward]) -> float:
        before_s, after_s = (sum(of.compute(kind(*run)) for run in passes) for of in (timing, at_spread))
        return after_s / before_s if before_s else 1.0

    forward, backward = dict(ratios.forward), dict(ratios.backward)
    for of_units, kind in ((forward, Forward), (backward, Backward)):
        if LLM in of_units:
            of_units[LLM] /= longer(kind)
    return replace(ratios, forward=forward, backward=backward)


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
        table = torch.zeros(len(self._layers), self._num_experts + _NUM_SUMS, dtype=torch.float64)
        for layer, taken in self._recorded().items():
            table[self._layers.index(layer)] += taken
        if world.size > 1:
            on_device = table.to(world.device)
            dist.all_reduce(on_device)
            table = on_device.cpu()
        of_experts, sums = table[:, :-_NUM_SUMS], table[:, -_NUM_SUMS:]
        num_rows, squares, fullest, balance_losses, z_losses = sums.unbind(dim=1)
        total = max(float(num_rows.sum()), 1.0)
        mean = (num_rows / self._num_experts).clamp(min=1e-9)
        names = [f"{LLM}.layers.{layer}" for layer in self._layers]
        dead = [(rows == 0).nonzero().flatten().tolist() for rows in of_experts]
        return ExpertMetrics(
            max_over_mean=dict(zip(names, (of_experts.max(dim=1).values / mean).tolist(), strict=True)),
            spread=float(squares.sum() / total) ** 0.5,
            fullest_rank=float(fullest.sum() / total),
            dead={name: tuple(numbers) for name, numbers in zip(names, dead, strict=True) if numbers},
            balance_loss=_mean_of_blocks(balance_losses),
            z_loss=_mean_of_blocks(z_losses),
        )

    def _recorded(self) -> dict[int, Tensor]:
        """Return by layer what the mixtures of this rank recorded since the last step."""
        unit = self._context.units.get(LLM)
        stages = () if unit is None else unit.stages.values()
        mixtures = {
            int(name): module
            for stage in stages
            for name, layer in stage.layers.items()
            for module in layer.modules()
            if isinstance(module, ExpertMlp)
        }
        losses = _on_host([mixture.router.take_losses() for mixture in mixtures.values()])
        loads = [mixture.loads.take() for mixture in mixtures.values()]
        return {layer: torch.cat(parts) for layer, *parts in zip(mixtures, loads, losses, strict=True)}


def _on_host(losses: list[Tensor | None]) -> list[Tensor]:
    """Return losses (2,) on the host, copied there at once; 0 for routers without any."""
    zeros, known = torch.zeros(2, dtype=torch.float64), [of_one for of_one in losses if of_one is not None]
    copies = iter(torch.stack(known).cpu().double() if known else ())
    return [zeros if of_one is None else next(copies) for of_one in losses]


def _mean_of_blocks(losses: Tensor) -> float | None:
    """Return the mean of a loss over the blocks that have one, from those of all blocks; None if none has."""
    known = losses[losses > 0]
    return float(known.mean()) if len(known) else None
