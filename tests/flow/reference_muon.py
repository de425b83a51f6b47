"""Muon of whole matrices by their singular values, in float64: what the iterations would compute without rounding."""

import re

import torch
from torch import Tensor, nn

from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.llm_settings import LlmSettings

# Linears of blocks and projectors; `linear_1` and so on of projectors, `linear_qkv` and so on of blocks.
TRAINED = re.compile(r"layers\.[1-9]\d*\..*\b(linear|linear_\w+|proj)\.weight$")


class ReferenceMuon:
    """Muon for the linears of a unit."""

    def __init__(self, settings: Recipe, unit: str, scales: list[float], trained: dict[str, nn.Parameter]) -> None:
        self.optimizer, self.own = settings.train.optimizer, settings.model.unit(unit)
        self.scales, self.weights = scales, trained
        self.momenta = {name: torch.zeros_like(weight) for name, weight in trained.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights by their gradients."""
        beta = self.optimizer.muon_momentum
        decay = self.optimizer.weight_decay if self.own.weight_decay is None else self.own.weight_decay
        for name, weight in self.weights.items():
            assert weight.grad is not None
            momentum = self.momenta[name] = beta * self.momenta[name] + (1 - beta) * weight.grad
            direction = (1 - beta) * weight.grad + beta * momentum
            update = torch.empty_like(weight)
            for rows in self.matrices(name, len(weight)):
                update[rows] = 0.2 * max(len(rows), weight.shape[1]) ** 0.5 * orthogonal(direction[rows])
            lr = self.optimizer.lr * self.own.lr_scale * self.scales[int(name.split(".")[1])]
            weight -= lr * (decay * weight + update)

    def matrices(self, name: str, num_rows: int) -> list[Tensor]:
        """Return the rows of each matrix of a weight."""
        rows = torch.arange(num_rows)
        if name.endswith("linear_qkv.weight"):
            return self._attention_rows(rows)
        if name.endswith("linear_in.weight"):
            assert isinstance(self.own, LlmSettings)
            net = self.own.delta_net
            assert net is not None
            ratio = net.value_heads // net.key_heads
            widths = [net.key_head_dim] * 2 + [ratio * net.value_head_dim] * 2 + [ratio] * 2
            return [part.flatten() for part in rows.view(net.key_heads, -1).split(widths, dim=1)]
        if name.endswith("linear_kv.weight"):  # of a resampler
            heads = self.own.projector.heads  # type: ignore[union-attr]
            return [part.flatten() for part in rows.view(heads, 2, -1).unbind(1)]
        is_gated = isinstance(self.own, LlmSettings) or getattr(self.own, "gated_mlp", False)
        if name.endswith("linear_fc1.weight") and is_gated:
            return list(rows.chunk(2))
        return [rows]

    def _attention_rows(self, rows: Tensor) -> list[Tensor]:
        """Return those of queries, their gates, keys and values."""
        heads = self.own.heads
        kv_heads = getattr(self.own, "kv_heads", None) or heads
        head_dim = getattr(self.own, "head_dim", None) or self.own.hidden // heads
        of_heads = rows.view(kv_heads, -1, head_dim)
        queries = of_heads[:, :-2].chunk(2, dim=1) if getattr(self.own, "attention_gate", False) else [of_heads[:, :-2]]
        return [part.flatten() for part in (*queries, of_heads[:, -2], of_heads[:, -1])]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values as five Newton-Schulz iterations make them."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values @ right).to(matrix.dtype)
