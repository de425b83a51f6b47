"""What one training step reports, shared by the log and the display."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TimeSplit:
    """Where a step's seconds went, mean over the ranks: computing, waiting for other stages' results, in
    collectives and sends, waiting for data.
    """

    compute: float
    wait: float
    communication: float
    data: float

    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order in which they are shown."""
        return {"compute": self.compute, "wait": self.wait, "communication": self.communication, "data": self.data}

    def shares(self) -> dict[str, float]:
        """Parts of the whole, by name; all zero when nothing was measured."""
        whole = sum(self.parts().values())
        return {name: seconds / whole if whole > 0 else 0.0 for name, seconds in self.parts().items()}


@dataclass(frozen=True)
class EdgeMetrics:
    """What went over an edge of the stage graph in a step, all ranks together."""

    nbytes: int  # sent, in both directions
    wait_s: float  # that ranks stood still for it, at either end


@dataclass(frozen=True)
class StepMetrics:
    """One step of the whole job, over all ranks."""

    step: int  # optimizer steps done, this one included: 1 for the first
    loss: float  # mean over the step's target tokens
    grad_norm: float  # of all gradients together, before clipping
    lr: float
    step_time_s: float
    samples: int  # in this step
    tokens: int  # LLM tokens in this step
    epoch: float  # passes over the training data so far
    mfu: float  # share of `peak_flops`: unpadded tokens, no recompute, only the gradients that training needs
    peak_flops: float  # FLOP/s of all ranks together at their stated peak
    time_s: TimeSplit
    peak_memory_bytes: int  # of the rank that needed most
    val_loss: float | None = None  # when it was measured after this step
    val_exact: float | None = None  # share of held-out questions answered exactly right, when asked after this step
    edges: Mapping[str, EdgeMetrics] = field(default_factory=dict)  # by edge, as `vision.0>llm.0`
    slow_ranks: tuple[str, ...] = ()  # who lags behind their peers, and at what
    bound_sample: str | None = None  # alone more than a replica's mean share of the step, so no arrangement is even

    @property
    def tokens_per_s(self) -> float:
        """LLM tokens a second, all ranks together."""
        return self.tokens / self.step_time_s

    @property
    def samples_per_s(self) -> float:
        """Samples a second, all ranks together."""
        return self.samples / self.step_time_s

    def to_json(self) -> dict[str, Any]:
        """One object of `metrics.jsonl`; what is not finite becomes null.

        `val_loss` and `val_exact` are there when measured, `bound_sample` where there is one.
        """
        values = {
            "step": self.step,
            "loss": self.loss,
            **({} if self.val_loss is None else {"val_loss": self.val_loss}),
            **({} if self.val_exact is None else {"val_exact": self.val_exact}),
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "peak_flops": self.peak_flops,
            "time_s": {name: _finite(seconds) for name, seconds in self.time_s.parts().items()},
            "peak_memory_bytes": self.peak_memory_bytes,
            "samples": self.samples,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "slow_ranks": list(self.slow_ranks),
            **({} if self.bound_sample is None else {"bound_sample": self.bound_sample}),
            "edges": {edge: {"bytes": e.nbytes, "wait_s": e.wait_s} for edge, e in self.edges.items()},
        }
        return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}


def compact_number(number: float) -> str:
    """Three digits and a unit of thousands, for columns that must stay narrow.

    >>> compact(12345), compact(950), compact(4.5e6)
    ('12.3k', '950', '4.50M')
    """
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:#.3g}".removesuffix(".") + unit
    return f"{number:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
