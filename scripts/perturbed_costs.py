"""Cost models in which one kind of work is faster or slower than stated: what a choice of plan is sensitive to.

A modelled cost is computed anew from changed hardware. A measured one is scaled as the model's cost for the same layer,
load and group is: a table has the seconds of whole layers, and only the model knows how much of them are GEMMs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.cost_model import CostModel, LayerWork, PieceCost, TokenLoad
from mmtrain.costs.hardware import Hardware, Link
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.models.shapes.model_shape import LayerShape

T = TypeVar("T")
CostConstant = Literal["GEMM efficiency", "attention efficiency", "launch time", "link speeds", "rank spread"]
COST_CONSTANTS: tuple[CostConstant, ...] = ("GEMM efficiency", "attention efficiency", "launch time", "link speeds")
LARGEST_CHANGE = 1.25  # no perturbation multiplies a time by more, or divides it by more


@dataclass(frozen=True)
class Perturbation:
    """One constant of the hardware at so many times its stated value."""

    constant: CostConstant
    ratio: float

    def __str__(self) -> str:
        return f"{self.constant} {self.ratio:g}x"


SPREAD_PERTURBATIONS = (Perturbation("rank spread", 0.0), Perturbation("rank spread", 2.0))
PERTURBATIONS = tuple(
    Perturbation(constant, ratio) for constant in COST_CONSTANTS for ratio in (1 / LARGEST_CHANGE, LARGEST_CHANGE)
)


def perturbed_hardware(hardware: Hardware, perturbation: Perturbation) -> Hardware:
    """Return the hardware with one constant changed, under a name that says so.

    Link speeds change everything that messages and collectives take: bandwidths, latencies, and what a collective
    takes to start. An efficiency above 1 is allowed, as it only says how long a GEMM takes.
    """
    ratio = perturbation.ratio
    changed = replace(hardware, name=f"{hardware.name}, {perturbation}")
    match perturbation.constant:
        case "GEMM efficiency":
            return replace(changed, gemm_efficiency=ratio * hardware.gemm_efficiency)
        case "attention efficiency":
            return replace(
                changed,
                attention_efficiency=ratio * hardware.attention_efficiency,
                attention_backward_efficiency=ratio * hardware.attention_backward_efficiency,
            )
        case "launch time":
            return replace(changed, kernel_launch_s=ratio * hardware.kernel_launch_s)
        case "link speeds":
            return replace(
                changed,
                intra_node=_at_speed(hardware.intra_node, ratio),
                inter_node=_at_speed(hardware.inter_node, ratio),
                collective_start_s=hardware.collective_start_s / ratio,
            )
        case "rank spread":
            slowest_rank_ratio = 1 + ratio * (hardware.slowest_rank_ratio - 1)
            time_spread = hardware.time_spread.scaled(ratio)
            return replace(changed, time_spread=time_spread, slowest_rank_ratio=slowest_rank_ratio)


def _at_speed(link: Link, ratio: float) -> Link:
    return Link(ratio * link.bytes_per_s, link.latency_s / ratio, link.step_s / ratio)


def perturbed_costs(costs: CostModel, perturbation: Perturbation) -> CostModel:
    """Return the costs with one constant of the hardware changed.

    Raises:
        TypeError: the cost model is neither modelled nor measured, so that what its seconds consist of is unknown.
    """
    if isinstance(costs, AnalyticCosts):
        return _perturbed_model(costs, perturbation)
    if isinstance(costs, MeasuredCosts):
        if perturbation.constant == "rank spread":  # all layers take so many times as long
            return replace(costs, model=_perturbed_model(costs.model, perturbation))
        return PerturbedTable(costs, _perturbed_model(costs.model, perturbation))
    raise TypeError(f"{type(costs).__name__} has no constants to change")


def _perturbed_model(model: AnalyticCosts, perturbation: Perturbation) -> AnalyticCosts:
    return replace(model, hardware=perturbed_hardware(model.hardware, perturbation))


@dataclass(frozen=True)
class PerturbedTable:
    """A `CostModel` of measured costs, each scaled as the model of the same work changes."""

    measured: MeasuredCosts
    model: AnalyticCosts  # with the changed constant

    @property
    def source(self) -> str:
        """Where the table's entries come from, and what was changed."""
        return f"{self.measured.source}; scaled to {self.model.hardware.name}"

    @property
    def holds_tp_waits(self) -> bool:
        """Whether layers were measured on TP groups."""
        return self.measured.holds_tp_waits

    @property
    def sums_on_the_way(self) -> bool:
        """What the layers were measured with."""
        return self.measured.sums_on_the_way

    @property
    def tp_traffic(self) -> float:
        """What the layers were measured with."""
        return self.measured.tp_traffic

    @property
    def gradient_bytes(self) -> int:
        """What the layers' prices hold."""
        return self.measured.gradient_bytes

    @property
    def reduces_once(self) -> bool:
        """What the layers were measured with."""
        return self.measured.reduces_once

    def seconds(self, work: LayerWork) -> float:
        """Return the seconds that one rank spends on a pass; see `CostModel`."""
        return self._scaled(lambda costs: costs.seconds(work))

    def pieces(self, work: LayerWork) -> tuple[PieceCost, ...]:
        """Return the measured pieces of the layer, the compute and the collective of each scaled by itself."""
        pieces = self._of_all(lambda costs: costs.pieces(work))
        return tuple(PieceCost(*map(_scaled, *of_piece)) for of_piece in zip(*pieces, strict=True))

    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Return the bytes one rank keeps between forward and backward of `layer`, which no constant changes."""
        return self.measured.activation_bytes(layer, tp, load, recompute, input_grad=input_grad)

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Return the seconds of one message of `nbytes` between two ranks."""
        return self._scaled(lambda costs: costs.transfer(nbytes, same_node))

    def posting(self) -> float:
        """Return how many seconds each end of a message keeps its rank from computing, which is not the link's time."""
        return self.measured.posting()

    def collective(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the seconds of a collective over `group`; `nbytes` is the whole (gathered or reduced) tensor."""
        return self._scaled(lambda costs: costs.collective(kind, nbytes, group))

    def all_to_all(self, on_node_bytes: int, off_node_bytes: int, group: GroupLayout) -> float:
        """Return the seconds of an all-to-all; see `CostModel`."""
        return self._scaled(lambda costs: costs.all_to_all(on_node_bytes, off_node_bytes, group))

    def overlap_slowdown(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the share of a collective's seconds that compute beside it loses, which no constant changes."""
        return self.measured.overlap_slowdown(kind, nbytes, group)

    def cut(self) -> float:
        """Return the seconds that a pass loses each time it stops inside a layer, which no constant changes."""
        return self.measured.cut()

    def shard_copies(self, nbytes: float, kernels: int) -> float:
        """Return the seconds of copies, of whose constants the time to start a kernel may be changed."""
        return self._scaled(lambda costs: costs.shard_copies(nbytes, kernels))

    def product(self, rows: int, columns: int, inner: int) -> float:
        """Return the seconds of a product of matrices, which Muon needs."""
        return self._scaled(lambda costs: costs.product(rows, columns, inner))

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of an optimizer step, which moves memory and depends on no constant that is changed."""
        return self.measured.optimizer(parameters)

    def _scaled(self, price: Callable[[CostModel], float]) -> float:
        """Return a measured price, scaled as the modelled one changes."""
        return _scaled(*self._of_all(price))

    def _of_all(self, price: Callable[[CostModel], T]) -> tuple[T, T, T]:
        """Return a price as measured, as modelled with the changed constant, and as modelled."""
        return price(self.measured), price(self.model), price(self.measured.model)


def _scaled(measured_s: float, changed_s: float, modelled_s: float) -> float:
    return measured_s * changed_s / modelled_s if modelled_s else measured_s
