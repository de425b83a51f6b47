"""The metrics of one training step, shared by the log and the display."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, PhaseLoad


@dataclass(frozen=True)
class TimeSplit:
    """Where a step's seconds went, as means over the ranks: computing, waiting for other stages' results, in
    collectives and sends, and waiting for data.
    """

    compute: float
    wait: float
    communication: float
    data: float

    def parts(self) -> dict[str, float]:
        """Return seconds by name, in the order of display."""
        return {"compute": self.compute, "wait": self.wait, "communication": self.communication, "data": self.data}

    def shares(self) -> dict[str, float]:
        """Return shares of the total by name; all zero when nothing was measured."""
        total = sum(self.parts().values())
        return {name: seconds / total if total > 0 else 0.0 for name, seconds in self.parts().items()}


@dataclass(frozen=True)
class EdgeMetrics:
    """Traffic over an edge of the stage graph in a step, all ranks together."""

    nbytes: int  # sent, in both directions
    wait_s: float  # that ranks at either end waited for it


@dataclass(frozen=True)
class SourceMetrics:
    """What one source of samples was in a step."""

    samples: int
    tokens: int  # of the LLM
    loss: float | None  # mean over its target tokens; None without any


@dataclass(frozen=True)
class DispatchMetrics:
    """What a step of sharded units dispatched, and how even that made each phase."""

    seconds: float  # of the step in which a rank dispatched or waited for the others to do so, mean over the ranks
    phases: Mapping[str, PhaseLoad]  # by unit
    off_node: Mapping[str, OffNodeVolume] = field(default_factory=dict)  # by unit; empty on one node

    def to_json(self) -> dict[str, Any]:
        """Return the value of `dispatch` in `metrics.jsonl`; without `off_node` on one node."""
        off_node = {unit: asdict(volume) for unit, volume in self.off_node.items()}
        return {
            "seconds": _finite(self.seconds),
            "phases": {unit: asdict(load) for unit, load in self.phases.items()},
            **({"off_node": off_node} if off_node else {}),
        }


@dataclass(frozen=True)
class ExpertMetrics:
    """How a step's tokens fell on the experts of mixtures. Layers are named as `llm.layers.3`."""

    max_over_mean: Mapping[str, float]  # by layer: tokens of its fullest expert over the mean
    spread: float  # standard deviation of the experts' tokens in a pass over their mean: `parallel.llm.expert_spread`
    fullest_rank: float  # of ranks that hold experts together, tokens of the fullest in a pass over the mean
    dead: Mapping[str, tuple[int, ...]]  # by layer: experts without a token in the step
    # Losses of routers, means over the tokens of the step and over layers, without coefficients; None where they are
    # off. Balanced: 1 if the experts share each sample evenly.
    balance_loss: float | None = None
    z_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as part of an object of `metrics.jsonl`, without losses that are off."""
        losses = {"balance_loss": self.balance_loss, "z_loss": self.z_loss}
        return {
            "spread": self.spread,
            "fullest_rank": self.fullest_rank,
            "max_over_mean": dict(self.max_over_mean),
            "dead": {layer: list(experts) for layer, experts in self.dead.items()},
            **{name: _finite(loss) for name, loss in losses.items() if loss is not None},
        }


@dataclass(frozen=True)
class StepMetrics:
    """One step of the whole job, over all ranks."""

    step: int  # number of the optimizer step, counted from 1
    loss: float  # mean over the step's target tokens, and the weighted `drawing_loss` if there is one
    grad_norm: float  # of all gradients together, before clipping
    lr: float
    step_time_s: float
    samples: int  # in this step
    tokens: int  # LLM tokens in this step, without padding
    epoch: float  # passes over the training data so far
    mfu: float  # share of `peak_flops`: counts unpadded tokens, no recomputation, only gradients that training needs
    peak_flops: float  # FLOP/s of all ranks together at their stated peak
    time_s: TimeSplit
    peak_memory_bytes: int  # on the rank that needed most
    peak_reserved_bytes: int | None = None  # the same with the gaps of the GPU's allocator
    drawing_loss: float | None = None  # of a generator: mean squared error over the elements of the images to draw
    val_loss: float | None = None  # if it was measured after this step
    val_drawing_loss: float | None = None  # the generator's part of it, without its weight
    val_exact: float | None = None  # share of held-out questions answered exactly, if measured after this step
    edges: Mapping[str, EdgeMetrics] = field(default_factory=dict)  # by edge, as `vision.0>llm.0`
    slow_ranks: tuple[str, ...] = ()  # stragglers, and the work they are slow at
    bound_sample: str | None = None  # a sample above the mean load of a replica, so this step cannot be balanced
    sources: Mapping[str, SourceMetrics] = field(default_factory=dict)  # by name; empty for a run on one source
    ranks: int | None = None  # that trained this step; the number changes in elastic runs
    padding: int | None = None  # LLM tokens that only pad samples; None where nothing is padded
    dispatch: DispatchMetrics | None = None  # None where units are not sharded
    experts: ExpertMetrics | None = None  # None without mixtures of experts
    extra: Mapping[str, float] = field(default_factory=dict)  # what plug-ins measured, by their names
    resume_s: float | None = None  # since the last step before; in the first step of an elastic run that was resumed

    @property
    def tokens_per_s(self) -> float:
        """LLM tokens a second, all ranks together."""
        return self.tokens / self.step_time_s

    @property
    def samples_per_s(self) -> float:
        """Samples a second, all ranks together."""
        return self.samples / self.step_time_s

    def to_json(self) -> dict[str, Any]:
        """Return the step as an object of `metrics.jsonl`; numbers that are not finite become null.

        Left out are `drawing_loss`, `peak_reserved_bytes`, `val_loss`, `val_drawing_loss`, `val_exact`, `padding`,
        `bound_sample`, `ranks`, `resume_s`, `dispatch` and `experts` if they are None, `extra` if it is empty,
        and `sources` if there is one only.
        """
        values = {
            "step": self.step,
            "loss": self.loss,
            **({} if self.drawing_loss is None else {"drawing_loss": _finite(self.drawing_loss)}),
            **({} if self.val_loss is None else {"val_loss": self.val_loss}),
            **({} if self.val_drawing_loss is None else {"val_drawing_loss": self.val_drawing_loss}),
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
            **({} if self.peak_reserved_bytes is None else {"peak_reserved_bytes": self.peak_reserved_bytes}),
            "samples": self.samples,
            "tokens": self.tokens,
            **({} if self.padding is None else {"padding": self.padding}),
            "epoch": self.epoch,
            "slow_ranks": list(self.slow_ranks),
            **({} if self.bound_sample is None else {"bound_sample": self.bound_sample}),
            **({} if self.ranks is None else {"ranks": self.ranks}),
            **({} if self.resume_s is None else {"resume_s": self.resume_s}),
            **(
                {"sources": {name: _source_json(source) for name, source in self.sources.items()}}
                if self.sources
                else {}
            ),
            **({"extra": {name: _finite(v) for name, v in self.extra.items()}} if self.extra else {}),
            **({} if self.dispatch is None else {"dispatch": self.dispatch.to_json()}),
            **({} if self.experts is None else {"experts": self.experts.to_json()}),
            "edges": {edge: {"bytes": e.nbytes, "wait_s": e.wait_s} for edge, e in self.edges.items()},
        }
        return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}


def steady_steps(metrics: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return logged steps without the first one, which includes warm-up; a single step stays."""
    steps = list(metrics or ())
    return steps[1:] or steps


def compact_number(number: float) -> str:
    """Write a number with three digits and a suffix for thousands, for narrow columns.

    >>> compact(12345), compact(950), compact(4.5e6)
    ('12.3k', '950', '4.50M')
    """
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:#.3g}".removesuffix(".") + unit
    return f"{number:.3g}"


def _source_json(source: SourceMetrics) -> dict[str, Any]:
    loss = None if source.loss is None else _finite(source.loss)
    return {"samples": source.samples, "tokens": source.tokens, "loss": loss}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
