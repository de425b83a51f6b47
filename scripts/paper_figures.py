"""Say in a table's cell what the recorded answers of its runs are."""

from collections.abc import Callable, Sequence
from typing import Any

Figures = dict[str, Any]
FigureText = Callable[[Sequence[Figures], str], str]

MILLIONS = {
    "internvl-1.2m": 1.2,
    "llava-665k": 0.665,
    "lcs-558k": 0.558,
    "long-2.5w": 0.025,
}  # samples of OmniBal's data sets
PHASES = {"before": 0, "after": 1}
BUBBLE_KINDS = ("dp_gather", "dp_reduce", "pp_warmup", "pp_cooldown", "pp_other", "tp", "tp_layers", "imbalance")
NEARLY = 1.005  # ratios below it are printed as 1.00x, which is no difference


def ratio_text(slower: float, faster: float) -> str:
    """Return how many times the second figure the first is."""
    return f"{slower / faster:.2f}x"


def meshes(figures: Figures) -> str:
    """Return the placement and the meshes in words."""
    units = ", ".join(f"{unit} {mesh}" for unit, mesh in figures["meshes"].items())
    shard = f", shard {figures['shard']}" if figures["shard"] else ""
    return f"{figures['placement']}: {units}{shard}"


def gpu_days_of(figures: Figures, samples: str) -> float:
    """Return the GPU-days of one pass over a data set of OmniBal."""
    return float(figures["gpu_days_per_million_samples"]) * MILLIONS[samples or "internvl-1.2m"]


def _step(runs: Sequence[Figures], argument: str) -> str:
    figures = runs[0]
    return f"{figures['step_s']:.2f} s, MFU {figures['mfu']:.1%} ({meshes(figures)})"


def _steps(runs: Sequence[Figures], argument: str) -> str:
    """Return steps of several runs, and how much longer each takes than the last."""
    last_s = runs[-1]["step_s"]
    texts = [f"{run['step_s']:.2f} s" for run in runs]
    ratios = [ratio_text(run["step_s"], last_s) for run in runs[:-1]]
    return ", ".join(texts) + (f": {', '.join(ratios)}" if ratios else "")


def _mfu(runs: Sequence[Figures], argument: str) -> str:
    """Return the MFU of several runs, and the last over each other; with `alone` no ratios."""
    ratios = [ratio_text(runs[-1]["mfu"], run["mfu"]) for run in runs[:-1] if argument != "alone"]
    return ", ".join(f"{run['mfu']:.1%}" for run in runs) + (f": {', '.join(ratios)}" if ratios else "")


def _tokens(runs: Sequence[Figures], argument: str) -> str:
    """Return LLM tokens a second of a GPU, the last over each other, and the GPUs."""
    rates = [run["tokens_per_s_per_gpu"] for run in runs]
    ratios = [ratio_text(rates[-1], rate) for rate in rates[:-1]]
    gpus = ", ".join(dict.fromkeys(f"{run['gpus']:,}" for run in runs))
    figures = ", ".join(f"{rate:,.0f}" for rate in rates)
    return f"{figures} tokens/s/GPU" + (f": {', '.join(ratios)}" if ratios else "") + f", {gpus} GPUs"


def _gpu_days(runs: Sequence[Figures], argument: str) -> str:
    """Return GPU-days one after another, and the first over the last."""
    days = [gpu_days_of(run, argument) for run in runs]
    text = " -> ".join(f"{value:.1f}" for value in days)
    return text if len(days) == 1 else f"{text} ({ratio_text(days[0], days[-1])})"


def _partition(runs: Sequence[Figures], argument: str) -> str:
    """Return variances and volume of a partition; with a second run, the volume over that one's."""
    run = runs[0]
    parameters, layers, forward = run["variances"]
    text = f"VAR {parameters:.2g}, {layers:.3g}, {forward:.3g}"
    if len(runs) > 1:
        text += f"; sent {(run['sent_gib'] - runs[1]['sent_gib']) * 1024:+,.0f} MiB a step"
    return f"{text}; {gpu_days_of(run, argument):.1f} GPU-days"


def _memory_left(runs: Sequence[Figures], argument: str) -> str:
    left = ", ".join(f"{value:.1f}" for value in runs[0]["memory_left_gib"].values())
    return f"{left} GiB left; {gpu_days_of(runs[0], argument):.1f} GPU-days"


def _layers(runs: Sequence[Figures], argument: str) -> str:
    """Return how many layers run again, and the GPU-days before and after."""
    recomputed = ", ".join(f"{unit} {count}" for unit, count in runs[-1]["recomputed"].items())
    return f"{_gpu_days(runs, argument)}; recomputed {recomputed}; {meshes(runs[-1])}"


def _dist(score: Figures) -> str:
    dist = score["dist_ratio"]
    return f"dist {dist['vision']:.3f} / {dist['llm']:.3f}"


def _grouping(runs: Sequence[Figures], argument: str) -> str:
    score = runs[0][argument]
    return f"batch {score['mean_batch']:.1f}, pad {score['pad_ratio']:.3f}, {_dist(score)}"


def _threshold(runs: Sequence[Figures], argument: str) -> str:
    """Return batch and dist ratios of ISF, whose groups are not padded."""
    score = runs[0]["thresholds"][int(argument)]
    return f"batch {score['mean_batch']:.1f}, {_dist(score)}"


def _rounds(runs: Sequence[Figures], argument: str) -> str:
    """Return the dist ratios of the LLM before ISF's first round and after 1, 5 and 10."""
    rows = runs[0]["rounds"]
    shown = [(number, rows[number]["dist_ratio"]) for number in (0, 1, 5, 10) if number < len(rows)]
    return ", ".join(f"{number}: {dist['vision']:.3f} / {dist['llm']:.3f}" for number, dist in shown)


def _bubbles(runs: Sequence[Figures], argument: str) -> str:
    return ", ".join(f"{kind} {runs[0]['bubbles'].get(kind, 0.0):.1%}" for kind in argument.split())


def _efficiency(runs: Sequence[Figures], argument: str) -> str:
    run = runs[0]
    if run["efficiency"] is None:
        return "no encoder work inside the LLM's step"
    coarse = "-" if run["coarse_efficiency"] is None else f"{run['coarse_efficiency']:.1%}"
    return f"{coarse} coarse, {run['efficiency']:.1%} fine"


def _memory_over(runs: Sequence[Figures], argument: str) -> str:
    """Return the peak of the first run, and over the least peak of the others."""
    least = min(run["peak_gib"] for run in runs[1:])
    return f"{runs[0]['peak_gib']:.1f} GiB, {runs[0]['peak_gib'] / least - 1:+.0%}"


def _memory(runs: Sequence[Figures], argument: str) -> str:
    return ", ".join(f"MFU {run['mfu']:.1%} at {run['peak_gib']:.1f} GiB" for run in runs)


def _allocation(runs: Sequence[Figures], argument: str) -> str:
    seconds = runs[0]["allocation_s"]
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _dispatch(runs: Sequence[Figures], argument: str) -> str:
    """Return the dispatches of a step and their share of it."""
    run = runs[0]
    return (
        f"{run['dispatch_s'] * 1000:.1f} ms, {run['dispatch_s'] / run['step_s']:.2%} of a step of {run['step_s']:.2f} s"
    )


def _off_node(runs: Sequence[Figures], argument: str) -> str:
    """Return by unit the volume between nodes of the fullest ranks of the first run over that of the second."""
    pairs = zip(runs[0]["off_node"].items(), runs[1]["off_node"].values(), strict=True)
    return ", ".join(f"{unit} x {one['fullest'] / other['fullest']:.3f}" for (unit, one), other in pairs)


def _composition(runs: Sequence[Figures], argument: str) -> str:
    share = runs[0][argument]
    return f"share of a sample's tokens {share['mean']:.0%}, deviation {share['deviation']:.0%}"


def _waits(runs: Sequence[Figures], argument: str) -> str:
    """Return how much longer the fullest rank computes than the mean one, of each run."""
    texts = []
    for run in runs:
        units = ", ".join(f"{unit} {ratio:.2f}x" for unit, ratio in run["over_mean"].items())
        texts.append(f"{run['samples']} samples: {run['together']:.2f}x ({units})")
    return "; ".join(texts)


def _spread(runs: Sequence[Figures], argument: str) -> str:
    """Return means and deviations, over the `stages` or of the `first` stage over time."""
    spread = runs[0][argument]
    tokens, forward_ms = ("{:,.0f} ± {:,.0f}".format(*spread[name]) for name in ("tokens", "forward_ms"))
    memory = "{:.0f} ± {:.0f} GiB".format(*spread["peak_gib"]) if "peak_gib" in spread else "memory is reserved"
    return f"{tokens} tokens, {forward_ms} ms, {memory}"


def _shared(runs: Sequence[Figures], argument: str) -> str:
    """Return the SP-ratio of a plan whose ranks share sequences, and its GPU-days."""
    ratios = ", ".join(f"{unit} {ratio:.3f}" for unit, ratio in runs[0]["sp_ratio"].items())
    return f"SP-ratio {ratios}; {gpu_days_of(runs[0], argument):.1f} GPU-days"


def _reordering(runs: Sequence[Figures], argument: str) -> str:
    run = runs[0]
    return f"{run['inside_ms']:.1f} ms, {run['between_ms']:.1f} ms for {run['microbatches']} microbatches"


FIGURES: dict[str, FigureText] = {
    "step": _step,
    "steps": _steps,
    "mfu": _mfu,
    "tokens": _tokens,
    "gpu_days": _gpu_days,
    "partition": _partition,
    "memory_left": _memory_left,
    "layers": _layers,
    "grouping": _grouping,
    "threshold": _threshold,
    "rounds": _rounds,
    "bubbles": _bubbles,
    "efficiency": _efficiency,
    "memory_over": _memory_over,
    "memory": _memory,
    "allocation": _allocation,
    "dispatch": _dispatch,
    "off_node": _off_node,
    "composition": _composition,
    "waits": _waits,
    "spread": _spread,
    "shared": _shared,
    "reordering": _reordering,
}
