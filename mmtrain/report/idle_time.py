"""Names and meanings of the kinds of idle time, for text and pages."""

from collections.abc import Mapping

MIN_SHOWN_SHARE = 0.0005  # a smaller share would be printed as 0.0%

IDLE_NAMES = {
    "dp_gather": "parameter gathering",
    "dp_reduce": "gradient reduction",
    "pp_warmup": "pipeline warm-up",
    "pp_cooldown": "pipeline cool-down",
    "pp_other": "pipeline stalls",
    "tp": "tensor-parallel collectives",
    "tp_layers": "tensor-parallel collectives inside layers",
    "dispatch": "dispatch of features",
    "imbalance": "load imbalance",
}
IDLE_MEANINGS = {
    "dp_gather": "gathering parameters before they are used",
    "dp_reduce": "reducing gradients, shared weights and the gradient norm",
    "pp_warmup": "waiting for the pipeline to fill",
    "pp_cooldown": "waiting for the pipeline to drain",
    "pp_other": "waiting for other stages in between",
    "tp": "collectives of tensor parallelism between passes or their parts",
    "tp_layers": "collectives of tensor parallelism inside layers, which recorded steps count as compute",
    "dispatch": "moving features, and their gradients, to the replica that needs them",
    "imbalance": "waiting for replicas with more work",
}


def idle_text(shares: Mapping[str, float]) -> str:
    """Write idle time by kind, largest first.

    >>> idle_text({"pp_warmup": 0.04, "pp_cooldown": 0.06, "tp": 0.0})
    '10.0% of the step: pipeline cool-down (pp_cooldown) 6.0%, pipeline warm-up (pp_warmup) 4.0%'
    """
    ranking = sorted(shares.items(), key=lambda item: -item[1])
    kinds = [f"{IDLE_NAMES[kind]} ({kind}) {share:.1%}" for kind, share in ranking if share >= MIN_SHOWN_SHARE]
    total = f"{sum(shares.values()):.1%} of the step"
    return f"{total}: {', '.join(kinds)}" if kinds else total
