"""What a run costs: GPU-hours, and energy and money where the recipe states watts and a price."""

from mmtrain.recipe.parallel_settings import ClusterSettings

SECONDS_PER_HOUR = 3600
WATTS_PER_KILOWATT = 1000


def run_cost_text(cluster: ClusterSettings, num_steps: int, run_s: float, num_ranks: int) -> str:
    """Write `1,000 steps: 2.5 h on 64 ranks, 160 GPU-hours, 112 kWh, 400 at 2.5 a GPU-hour`.

    run_s: seconds of all steps together.
    """
    hours = run_s / SECONDS_PER_HOUR
    rank_hours = hours * num_ranks
    parts = [f"{_number(hours)} h on {num_ranks:,} ranks", f"{_number(rank_hours)} GPU-hours"]
    if cluster.watts_per_gpu is not None:
        parts.append(f"{_number(rank_hours * cluster.watts_per_gpu / WATTS_PER_KILOWATT)} kWh")
    if cluster.price_per_gpu_hour is not None:
        price = cluster.price_per_gpu_hour
        parts.append(f"{_number(rank_hours * price)} at {price:g} a GPU-hour")
    return f"{num_steps:,} step{'s' * (num_steps != 1)}: {', '.join(parts)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
