"""How tokens fell on the experts of mixtures in the steps of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MAX_DEAD_LAYERS = 8  # whose dead experts are named; all are in the JSON form


@dataclass(frozen=True)
class ExpertLoads:
    """The loads of the experts of a run, medians over its steps."""

    spread: float  # standard deviation of the experts' tokens in a pass over their mean
    fullest_rank: float  # of ranks that hold experts together, tokens of the fullest over the mean
    max_over_mean: Mapping[str, float]  # by layer: tokens of its fullest expert in a step over the mean
    dead: Mapping[str, list[int]]  # by layer: experts without a token in any step
    # Losses of routers in the first and in the last step, see `ExpertMetrics`; None where they are off.
    balance_loss: tuple[float, float] | None = None
    z_loss: tuple[float, float] | None = None

    @classmethod
    def of_logged(cls, metrics: Sequence[Mapping[str, Any]] | None) -> "ExpertLoads | None":
        """Read logged steps; None if the model has no experts, or nothing was logged of them."""
        steps = [step["experts"] for step in metrics or () if isinstance(step.get("experts"), dict)]
        if not steps:
            return None
        layers = list(steps[-1]["max_over_mean"])
        dead = {layer: set.intersection(*(set(step["dead"].get(layer, ())) for step in steps)) for layer in layers}
        return cls(
            spread=median(step["spread"] for step in steps),
            fullest_rank=median(step["fullest_rank"] for step in steps),
            max_over_mean={
                layer: median(step["max_over_mean"][layer] for step in steps if layer in step["max_over_mean"])
                for layer in layers
            },
            dead={layer: sorted(experts) for layer, experts in dead.items() if experts},
            balance_loss=_ends(steps, "balance_loss"),
            z_loss=_ends(steps, "z_loss"),
        )

    def sentences(self) -> list[str]:
        """Say how uneven the loads were, and name dead experts."""
        fullest = max(self.max_over_mean, key=lambda layer: self.max_over_mean[layer])
        of_ranks = ""
        if self.fullest_rank > 1:
            of_ranks = f"; the fullest of the ranks that hold them together computed {self.fullest_rank:.2f}x the mean"
        text = (
            f"Experts: their tokens deviated by {self.spread:.0%} of the mean in a pass (parallel.llm.expert_spread "
            f"{self.spread:.2g}){of_ranks}. The fullest expert of {fullest} had {self.max_over_mean[fullest]:.1f}x the "
            "mean of its layer in a step."
        )
        sentences = [text, *self._loss_sentences()]
        if not self.dead:
            return [*sentences, "No expert was without a token in all steps."]
        named = [f"{layer}: {', '.join(map(str, experts))}" for layer, experts in self.dead.items()]
        more = f"; and in {len(named) - MAX_DEAD_LAYERS} more layers" if len(named) > MAX_DEAD_LAYERS else ""
        number = sum(map(len, self.dead.values()))
        dead = f"{number} experts had no token in any step: {'; '.join(named[:MAX_DEAD_LAYERS])}{more}."
        return [*sentences, dead]

    def _loss_sentences(self) -> list[str]:
        losses = {"balancing loss (1: even in each sample)": self.balance_loss, "z-loss": self.z_loss}
        changes = [f"{name} from {ends[0]:.4g} to {ends[1]:.4g}" for name, ends in losses.items() if ends is not None]
        if not changes:
            return []
        return [f"Routers, means over their blocks without coefficients: {', '.join(changes)}."]


def _ends(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float] | None:
    """Return a number of the first and of the last step that has it."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return (values[0], values[-1]) if values else None
