"""What a run costs: GPU-hours, and energy and money where the recipe states watts and a price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.recipe.settings.parallel_settings import ClusterSettings

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24
WATTS_PER_KILOWATT = 1000


@dataclass(frozen=True)
class RunCost:
    """The cost of some steps of a run, without starts and restarts."""

    num_steps: int
    num_ranks: int  # the most that trained at once
    hours: float
    gpu_hours: float
    kilowatt_hours: float | None = None  # None: the recipe does not state cluster.watts_per_gpu
    money: float | None = None  # in the currency of cluster.price_per_gpu_hour; None: the recipe does not state it
    price_per_gpu_hour: float | None = None

    @classmethod
    def of_seconds(
        cls, cluster: ClusterSettings, num_steps: int, run_s: float, num_ranks: int, rank_s: float | None = None
    ) -> "RunCost":
        """Return the cost of `num_steps` that take `run_s` together.

        rank_s: the seconds of all ranks added up, where not all of them trained all the time.
        """
        gpu_hours = (run_s * num_ranks if rank_s is None else rank_s) / SECONDS_PER_HOUR
        watts, price = cluster.watts_per_gpu, cluster.price_per_gpu_hour
        return cls(
            num_steps,
            num_ranks,
            run_s / SECONDS_PER_HOUR,
            gpu_hours,
            None if watts is None else gpu_hours * watts / WATTS_PER_KILOWATT,
            None if price is None else gpu_hours * price,
            price,
        )

    @classmethod
    def of_logged(cls, cluster: ClusterSettings, metrics: Sequence[Mapping[str, Any]], num_ranks: int) -> "RunCost":
        """Return the cost of all steps in a log; one of an elastic run says how many ranks trained each step."""
        ranks = [step.get("ranks") or num_ranks for step in metrics]
        seconds = [step["step_time_s"] for step in metrics]
        rank_s = sum(num * step_s for num, step_s in zip(ranks, seconds, strict=True))
        return cls.of_seconds(cluster, len(seconds), sum(seconds), max(ranks, default=num_ranks), rank_s)

    @property
    def days(self) -> float:
        """The hours in days."""
        return self.hours / HOURS_PER_DAY

    def to_text(self) -> str:
        """Write `1,000 steps: 2.5 h on 64 ranks, 160 GPU-hours, 112 kWh, 400 at 2.5 a GPU-hour`."""
        ranks = f"{self.num_ranks:,} rank{'s' * (self.num_ranks != 1)}"
        parts = [f"{number_text(self.hours)} h on {ranks}", f"{number_text(self.gpu_hours)} GPU-hours"]
        if self.kilowatt_hours is not None:
            parts.append(f"{number_text(self.kilowatt_hours)} kWh")
        if self.money is not None:
            parts.append(f"{number_text(self.money)} at {self.price_per_gpu_hour:g} a GPU-hour")
        return f"{self.num_steps:,} step{'s' * (self.num_steps != 1)}: {', '.join(parts)}"


def states_costs(cluster: ClusterSettings) -> bool:
    """Return whether a recipe says what a GPU costs in money or in energy."""
    return cluster.price_per_gpu_hour is not None or cluster.watts_per_gpu is not None


def number_text(value: float) -> str:
    """Write a cost with three digits at least: `2.53`, `160`, `9,520`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
