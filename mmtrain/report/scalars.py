"""The numbers of a logged step, by the names under which trackers show them."""

from collections.abc import Mapping
from typing import Any

_ROUTER_LOSSES = ("balance_loss", "z_loss")  # of runs that train with them
NOT_CURVES = ("step", "slow_ranks", "bound_sample")  # entries of a logged step that are no numbers


def step_scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the curves of an entry of `metrics.jsonl`, such as `train/loss`, without those that have no value."""
    rest = dict(entry)
    scalars = {f"time_s/{name}": value for name, value in rest.pop("time_s", {}).items()}
    for edge, edge_values in rest.pop("edges", {}).items():
        scalars |= {f"edge_{name}/{edge}": value for name, value in edge_values.items()}
    for source, source_values in rest.pop("sources", {}).items():
        scalars |= {f"source_{name}/{source}": value for name, value in source_values.items()}
    scalars |= {f"extra/{name}": value for name, value in rest.pop("extra", {}).items()}
    dispatch = dict(rest.pop("dispatch", {}))
    for unit, load in dispatch.pop("phases", {}).items():
        scalars |= {f"phase_{name}/{unit}": value for name, value in load.items()}
    for unit, volume in dispatch.pop("off_node", {}).items():
        scalars |= {f"off_node_{name}/{unit}": value for name, value in volume.items()}
    scalars |= {f"dispatch/{name}": value for name, value in dispatch.items()}
    if experts := rest.pop("experts", None):
        scalars |= {
            f"experts/{name}": experts[name] for name in ("spread", "fullest_rank", *_ROUTER_LOSSES) if name in experts
        }
        scalars["experts/max_over_mean"] = max(experts["max_over_mean"].values(), default=0.0)
        scalars["experts/dead"] = sum(map(len, experts["dead"].values()))
    scalars |= {f"train/{name}": value for name, value in rest.items() if name not in NOT_CURVES}
    return {name: float(value) for name, value in scalars.items() if isinstance(value, int | float)}
