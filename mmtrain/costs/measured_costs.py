"""`MeasuredCosts`: a cost model that interpolates what `mmtrain profile` measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.block_arithmetic import attention_arithmetic, joins_attention_output
from mmtrain.costs.block_pieces import PieceCollective, piece_collectives, pieces_of, scale_pieces
from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.core_ratios import core_ratios
from mmtrain.costs.cost_model import UNDIVIDED, LayerWork, PieceCost, TokenLoad, TokenSplit
from mmtrain.costs.cost_table import (
    CostTable,
    LayerEntry,
    LayerSample,
    MessageEntry,
    TimedPass,
    layer_fields,
    layer_key,
)
from mmtrain.costs.expert_costs import expert_exchange_seconds
from mmtrain.costs.expert_spread import evenly_loaded, fullest_rank_load
from mmtrain.costs.offload_costs import offloaded_bytes, offloaded_seconds
from mmtrain.models.shapes.layer_shape import Attention, MoeMlp
from mmtrain.models.shapes.model_shape import LayerShape, num_pieces

FloatArray = npt.NDArray[np.float64]
Quantity = TimedPass | Literal["bytes"]
MIN_COMPUTE_SHARE = 0.05  # of a layer's measured time that is not spent on collectives; chosen by hand
FACTOR_BISECTIONS = 40  # a relative error below 1e-12
MIN_NODE_SPACING = 0.1  # relative; measured loads whose numbers of tokens differ by less share a node
_COMPARED: tuple[TimedPass, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Curve:
    """A quantity of a layer by load: piecewise linear in tokens, and linear in what attention and sequences add.

    value = base(tokens) + per_pair * sum_sq + per_sequence * num_sequences. With attention inside windows its pairs
    take the place of sum_sq: see `attended_load`. Beyond the outermost nodes `base` continues
    with the slope of its last segment, but never below zero.
    """

    tokens: FloatArray  # (k,) ascending nodes
    base: FloatArray  # (k,)
    per_pair: float
    per_sequence: float

    @classmethod
    def fit(cls, loads: Sequence[TokenLoad], values: Sequence[float]) -> "Curve":
        """Fit a curve to measured values by least squares of relative errors.

        Loads of about equally many tokens share a node. If all loads have the same proportions, the terms cannot be
        separated, and `base` takes everything. A term whose fit is negative, because of noise, is left out.
        """
        tokens = np.array([load.tokens for load in loads], dtype=np.float64)
        nodes = _spaced(np.unique(tokens))
        base = np.stack([np.interp(tokens, nodes, row) for row in np.eye(len(nodes))], axis=1)
        terms = np.array([[load.sum_sq, load.num_sequences] for load in loads], dtype=np.float64)
        used = [0, 1]
        # Errors are relative to what was measured, so that short loads count as much as long ones.
        weight = 1 / np.maximum(np.asarray(values, dtype=np.float64), 1e-12)
        while True:
            matrix = np.concatenate([base, terms[:, used]], axis=1) * weight[:, None]
            scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
            scaled, _, rank, _ = np.linalg.lstsq(matrix / scale, np.ones(len(loads)), rcond=1e-9)
            if rank < len(nodes) + len(used) and used:
                used.pop()
                continue
            solution = scaled / scale
            negative = [term for term, value in zip(used, solution[len(nodes) :], strict=True) if value < 0]
            if not negative:
                break
            used.remove(negative[0])
        by_term = dict(zip(used, solution[len(nodes) :].tolist(), strict=True))
        return cls(nodes, solution[: len(nodes)], by_term.get(0, 0.0), by_term.get(1, 0.0))

    def at(self, load: TokenLoad) -> float:
        """Return the value at a load."""
        x, y, t = self.tokens, self.base, float(load.tokens)
        if len(x) == 1:
            base = y[0] * t / max(x[0], 1.0)
        else:
            i = int(np.clip(np.searchsorted(x, t) - 1, 0, len(x) - 2))
            base = y[i] + (y[i + 1] - y[i]) * (t - x[i]) / (x[i + 1] - x[i])
        return max(0.0, float(base) + self.per_pair * load.sum_sq + self.per_sequence * load.num_sequences)

    def covers(self, load: TokenLoad) -> bool:
        """Return whether a load lies between the outermost nodes."""
        return bool(self.tokens[0] <= load.tokens <= self.tokens[-1])


@dataclass(frozen=True)
class MeasuredCosts:
    """A `CostModel` that interpolates a table and models what the table lacks.

    `extrapolated` collects the layers that were needed beyond their measured range, `missing` those that were modelled,
    and `replaced` the sizes of groups whose all-to-alls were priced by messages between two ranks.
    """

    table: CostTable
    model: AnalyticCosts
    extrapolated: set[str] = field(default_factory=set, compare=False)
    missing: set[str] = field(default_factory=set, compare=False)
    replaced: set[int] = field(default_factory=set, compare=False)
    _curves: dict[tuple[str, int, int, Quantity], Curve] = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self) -> str:
        """Where the table's entries come from, and which layers were modelled or extrapolated."""
        run = "a run" if self.table.run is None else f"the run {self.table.run}"
        if self.table.is_recorded and not self.table.has_entries:
            return f"modelled: {self.table.hardware}, corrected by what {run} recorded on {self.table.date}"
        parts = [f"{self.table.provenance}: {self.table.device}, {self.table.date}"]
        if self.table.held_out_error is not None:
            parts.append(f"error of layers on loads held out {self.table.held_out_error:.1%} in the median")
        if self.table.is_recorded:
            parts.append(f"corrected by what {run} recorded")
        if self.missing:
            parts.append(f"modelled ({self.model.hardware.name}): {', '.join(sorted(self.missing))}")
        if self.extrapolated:
            parts.append(f"extrapolated: {', '.join(sorted(self.extrapolated))}")
        if self.replaced:
            sizes = ", ".join(map(str, sorted(self.replaced)))
            parts.append(f"all-to-alls of {sizes} ranks, which the table lacks, by messages between two ranks")
        if self.missing or self.extrapolated or self.replaced:
            parts.append("`mmtrain profile` on such hardware measures them")
        return "; ".join(parts)

    @property
    def holds_tp_waits(self) -> bool:
        """Whether layers were measured on TP groups."""
        return any(entry.tp > 1 for entry in self.table.layers)

    @property
    def sums_on_the_way(self) -> bool:
        """Return False: tables are of mmtrain, which adds up in fp32 what arrives."""
        return False

    @property
    def tp_traffic(self) -> float:
        """Return 1: tables are of mmtrain's own layers, which move what Megatron-LM moves."""
        return 1.0

    @property
    def gradient_bytes(self) -> int:
        """Return 0: what layers were measured with is not told apart."""
        return 0

    @property
    def reduces_once(self) -> bool:
        """Return False: mmtrain reduces gradients of sharded layers after every microbatch."""
        return False

    def seconds(self, work: LayerWork) -> float:
        """Return the seconds that one rank spends on a pass; see `CostModel`.

        In chunks they are those of a layer that was measured in as many. From those of the nearest number that was
        measured, or of a layer without chunks, they differ as modelled.
        """
        layer, tp, load, kind = work.layer, work.tp, work.load, work.kind
        if layer.offload != "none":
            return offloaded_seconds(self, self.model.hardware, self.model.element_bytes, work)
        measured_split = TokenSplit(work.split.sp, self._measured_chunks(layer, tp, work.split.chunks))
        seconds = self._unscaled_seconds(work, measured_split.chunks)
        if work.split != measured_split and seconds:
            seconds *= self.model.seconds(work) / self.model.seconds(work._replace(split=measured_split))
        if layer.lora is not None and load.tokens:
            seconds += self.model.adapter_seconds(layer, tp, load, work.direction)
        if seconds:
            seconds += self.model.activation_again(layer, tp, load, kind)
            seconds += self.model.mlp_chunk_sums(layer, tp, load, kind)
            seconds += expert_exchange_seconds(work, self, self.model.hardware.ranks_per_node, self.model.element_bytes)
        if kind == "forward" and self.table.loading:
            seconds += self.table.loading_by_kind.get(layer.kind, 0.0) * load.tokens
        if not self.table.layer_scales:
            return seconds
        scale = self.table.scale_by_layer.get(_key(layer))
        if scale is None:
            return seconds
        return seconds * (scale.forward if kind == "forward" else scale.backward)

    def _unscaled_seconds(self, work: LayerWork, chunks: int) -> float:
        """Return the seconds of the layer without its adapters, for they are in no table."""
        layer, load, kind = work.layer, work.load, work.kind
        if load.tokens == 0 or (kind == "backward" and not work.has_gradient):
            return 0.0
        weight_grad, input_grad = analytic.needed_gradients(layer, work.input_grad)
        entry = self._entry(layer, work.tp, chunks)
        timed: TimedPass = kind
        no_backward_follows = kind == "forward" and not (layer.trainable or input_grad)
        if no_backward_follows and entry is not None and "forward_only" in entry.samples[0].seconds:
            timed = "forward_only"
        if kind == "backward" and not (weight_grad and input_grad):
            timed = "backward_weight" if weight_grad else "backward_input"
        if entry is not None and timed == "backward_weight" and timed not in entry.samples[0].seconds:
            timed = "backward"  # a layer whose input has no gradient has only this one
        if entry is None or timed not in entry.samples[0].seconds:
            self.missing.add(f"{layer.kind} tp{work.tp}")
            has_extras = layer.lora is not None or layer.recomputes_activation
            bare = replace(layer, lora=None, recomputes_activation=False) if has_extras else layer
            bare_work = LayerWork(bare, work.tp, load, kind, input_grad)
            return self._modelled_without_exchange(bare_work)  # which is added later
        seconds = self._interpolate(entry, timed, layer, load) * self.model.hardware.slowest_rank_ratio
        return seconds * self._fullest_rank_ratio(work)

    def _fullest_rank_ratio(self, work: LayerWork) -> float:
        """Return by what the rank whose experts have most rows is slower than one with the mean, as modelled."""
        if not isinstance(work.layer.mlp, MoeMlp) or fullest_rank_load(work.layer.mlp) == 1.0:
            return 1.0
        even = work._replace(layer=evenly_loaded(work.layer))
        return self._modelled_without_exchange(work) / self._modelled_without_exchange(even)

    def _modelled_without_exchange(self, work: LayerWork) -> float:
        ranks_per_node, element_bytes = self.model.hardware.ranks_per_node, self.model.element_bytes
        return self.model.seconds(work) - expert_exchange_seconds(work, self.model, ranks_per_node, element_bytes)

    def pieces(self, work: LayerWork) -> tuple[PieceCost, ...]:
        """Divide the measured seconds of the layer among its pieces.

        Where the table knows the layer and the collectives of its tensor-parallel group, these take what was measured,
        and the rest is divided in the modelled proportions. Else everything is.
        """
        layer, tp, load, split = work.layer, work.tp, work.load, work.split
        if num_pieces(layer.kind) == 1 or not load.tokens or not self._knows_collectives(layer, tp, sp=split.sp):
            return scale_pieces(self.model.pieces(work), self.seconds(work))
        undivided = work._replace(split=UNDIVIDED)
        total_s = self.seconds(undivided)
        nbytes = load.tokens * layer.hidden * self.model.element_bytes
        compute = self.model.block_compute(work)
        if not total_s or not any(compute):
            return scale_pieces(pieces_of(compute, {}), total_s)
        whole = self.model.compute_beside(undivided)
        measured = piece_collectives(self, nbytes, tp, work.direction, whole, UNDIVIDED)  # as the layer was profiled
        factor = _compute_factor(sum(compute), measured.values(), total_s)
        beside = self.model.compute_beside(work)
        scaled = {piece: seconds.scaled(factor) for piece, seconds in beside.items()}
        collectives = piece_collectives(self, nbytes, tp, work.direction, scaled, split)
        return pieces_of([factor * seconds for seconds in compute], collectives)

    def _knows_collectives(self, layer: LayerShape, tp: int, *, sp: bool) -> bool:
        """Return whether the table holds the layer, and the collectives of its tensor-parallel group on one node."""
        kinds = ("all_reduce", *(("reduce_scatter", "all_gather") if sp else ()))
        is_measured = tp > 1 and self._entry(layer, tp) is not None
        return is_measured and all((kind, tp, 1) in self.table.by_message for kind in kinds)

    def activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, *, input_grad: bool = True
    ) -> int:
        """Return the bytes one rank keeps between forward and backward of `layer`; see `CostModel`."""
        nbytes = self._unscaled_activation_bytes(layer, tp, load, recompute, input_grad)
        scale = self.table.scale_by_layer.get(_key(layer)) if self.table.layer_scales else None
        if recompute or scale is None or scale.activations == 1.0:
            return nbytes
        not_saved = self._unscaled_activation_bytes(layer, tp, load, True, input_grad)
        return not_saved + round(scale.activations * (nbytes - not_saved))

    def _unscaled_activation_bytes(
        self, layer: LayerShape, tp: int, load: TokenLoad, recompute: bool, input_grad: bool
    ) -> int:
        entry = self._entry(layer, tp)
        if recompute and layer.offload != "none" and (layer.trainable or input_grad):
            return offloaded_bytes(self, self.model.hardware, layer, tp, load, input_grad)
        if entry is None or recompute or load.tokens == 0 or not (layer.trainable or input_grad):
            return self.model.activation_bytes(layer, tp, load, recompute, input_grad=input_grad)
        element_bytes = self.model.element_bytes
        min_bytes = analytic.input_bytes(layer, load, element_bytes)
        not_needed = 0
        if not layer.trains_weights:
            loads = (sample.load for sample in entry.samples)
            joins_output = all(joins_attention_output(of, self.model.sorts_sequences) for of in loads)
            not_needed = analytic.weight_grad_bytes(layer, load, element_bytes, tp, joins_output)
        if layer.recomputes_activation:
            not_needed += analytic.activation_output_bytes(layer, load, element_bytes, tp)
        adapters = analytic.adapter_bytes(layer, load, element_bytes, tp)
        return max(min_bytes, round(self._interpolate(entry, "bytes", layer, load)) - not_needed) + adapters

    def transfer(self, nbytes: int, same_node: bool) -> float:
        """Return the seconds of one message of `nbytes` between two ranks."""
        measured = self._message("p2p", GroupLayout(2, 1 if same_node else 2), nbytes)
        seconds = self.model.transfer(nbytes, same_node) if measured is None else measured
        return seconds * self.table.message_scale

    def posting(self) -> float:
        """Return how many seconds each end of a message keeps its rank from computing; it is always modelled."""
        return self.model.posting()

    def collective(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the seconds of a collective over `group`; `nbytes` is the whole (gathered or reduced) tensor."""
        measured = self._message(kind, group, nbytes) if group.size > 1 else None
        seconds = self.model.collective(kind, nbytes, group) if measured is None else measured
        return seconds * self.table.reduction_scale

    def all_to_all(self, on_node_bytes: int, off_node_bytes: int, group: GroupLayout) -> float:
        """Return the seconds of an all-to-all; see `CostModel`.

        It takes as long as a measured one in which every rank moves as much as the fullest does here. What stays on a
        node is compared with an all-to-all of the node's ranks alone. Without such entries messages between two ranks
        take their place, as a table of an older version has none.
        """
        per_node = -(-group.size // group.nodes)
        seconds = []
        if group.nodes > 1:
            seconds.append(self._exchange(group, off_node_bytes, group.size - per_node, same_node=False))
        if per_node > 1:
            seconds.append(self._exchange(GroupLayout(per_node), on_node_bytes, per_node - 1, same_node=True))
        return max(seconds, default=0.0)

    def overlap_slowdown(self, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
        """Return the share of a collective's seconds that compute beside it loses."""
        entry = self._message_entry(kind, group)
        if entry is None or not entry.overlap_slowdown:
            return self.model.overlap_slowdown(kind, nbytes, group)
        return float(np.interp(nbytes, entry.nbytes, entry.overlap_slowdown))

    def shard_copies(self, nbytes: float, kernels: int) -> float:
        """Return the seconds of a sharded layer's copies; they are modelled, for cores as fast as the table's."""
        return self._of_its_cores.shard_copies(nbytes, kernels)

    @cached_property
    def _of_its_cores(self) -> AnalyticCosts:
        """The model, with the cores that the table was measured on."""
        if self.table.core_speed is None:
            return self.model
        ratios = core_ratios(self.table.core_speed, self.model.hardware, self.model.precision)
        return replace(self.model, hardware=ratios.applied(self.model.hardware))

    def cut(self) -> float:
        """Return the seconds that a pass loses each time it stops inside a layer and goes on."""
        return self.model.cut() if self.table.cut_s is None else self.table.cut_s

    def product(self, rows: int, columns: int, inner: int) -> float:
        """Return the seconds of a product of matrices; it is modelled, for cores as fast as the table's."""
        return self._of_its_cores.product(rows, columns, inner)

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of an optimizer step over `parameters` of one rank, on a line through the measurements."""
        if not self.table.optimizer:
            return self.model.optimizer(parameters) * self.table.reduction_scale
        start, per_parameter = self._optimizer_line
        return (start + per_parameter * parameters) * self.table.reduction_scale if parameters else 0.0

    @cached_property
    def _optimizer_line(self) -> tuple[float, float]:
        """Seconds of an optimizer step without parameters, and per parameter; neither is negative."""
        counts = np.array([e.parameters for e in self.table.optimizer], dtype=np.float64)
        seconds = np.maximum([e.seconds for e in self.table.optimizer], 1e-12)
        if len(counts) > 1:
            matrix = np.stack([1 / seconds, counts / seconds], axis=1)
            start, slope = np.linalg.lstsq(matrix, np.ones(len(counts)), rcond=None)[0].tolist()
            if start >= 0 and slope >= 0:
                return start, slope
        return 0.0, float(np.mean(seconds / counts))

    def _message_entry(self, kind: str, group: GroupLayout) -> MessageEntry | None:
        is_even = group.fewest_per_node * group.nodes == group.size  # only such groups are measured
        return self.table.by_message.get((kind, group.size, group.nodes)) if is_even else None

    def _message(self, kind: str, group: GroupLayout, nbytes: int) -> float | None:
        entry = self._message_entry(kind, group)
        if entry is None:
            return None
        largest, seconds = entry.nbytes[-1], entry.seconds
        if nbytes > largest:  # latency no longer matters
            return seconds[-1] * nbytes / largest
        return float(np.interp(nbytes, entry.nbytes, seconds))

    def _exchange(self, group: GroupLayout, nbytes: int, num_peers: int, same_node: bool) -> float:
        """Return the seconds in which each rank of `group` moves `nbytes` to or from `num_peers` ranks of it."""
        measured = self._message("all_to_all", group, round(nbytes * group.size / num_peers))
        if measured is not None:
            return measured * self.table.message_scale
        self.replaced.add(group.size)
        return self.transfer(nbytes, same_node) if nbytes else 0.0

    def _entry(self, layer: LayerShape, tp: int, chunks: int = 1) -> LayerEntry | None:
        return self.table.by_layer.get((_key(layer), tp, chunks))

    def _measured_chunks(self, layer: LayerShape, tp: int, chunks: int) -> int:
        """Return the measured number of chunks that is nearest to `chunks`; 1 if none was measured."""
        measured = self.table.chunk_counts.get((_key(layer), tp), ()) if chunks > 1 else ()
        return min(measured, key=lambda count: abs(count - chunks), default=1)

    def _interpolate(self, entry: LayerEntry, quantity: Quantity, layer: LayerShape, load: TokenLoad) -> float:
        key = (_key(layer), entry.tp, entry.tp_chunks, quantity)
        if key not in self._curves:
            self._curves[key] = fit_curve(entry, quantity)
        curve = self._curves[key]
        if layer.kind == "head":  # all tokens of the measured loads have targets
            load = load.of_targets()
        if not curve.covers(load):
            lo, hi = curve.tokens[[0, -1]].astype(int).tolist()
            self.extrapolated.add(f"{layer.kind} tp{entry.tp} beyond {lo} to {hi} tokens")
        return curve.at(attended_load(layer, load))


def _compute_factor(compute_s: float, collectives: Iterable[PieceCollective], total_s: float) -> float:
    """Return by what the modelled compute of a layer must be multiplied so that it takes `total_s` with collectives.

    What its own compute hides of a collective grows with that factor, so it is found by bisection. At least
    `MIN_COMPUTE_SHARE` of the layer is compute: ranks that come to a collective one after another make a measured one
    longer than those inside a layer.
    """
    of_layer = list(collectives)

    def seconds(factor: float) -> float:
        scaled = [replace(collective, beside=collective.beside.scaled(factor)) for collective in of_layer]
        return factor * compute_s + sum(collective.lengthening_s for collective in scaled)

    lowest, highest = MIN_COMPUTE_SHARE * total_s / compute_s, total_s / compute_s
    for _ in range(FACTOR_BISECTIONS):
        middle = (lowest + highest) / 2
        lowest, highest = (middle, highest) if seconds(middle) < total_s else (lowest, middle)
    return lowest


def interpolation_errors(entry: LayerEntry, held_out: Sequence[LayerSample]) -> list[float]:
    """Return the relative errors of interpolated forwards and backwards at loads that the entry does not hold."""
    curves = {timed: fit_curve(entry, timed) for timed in _COMPARED if timed in entry.samples[0].seconds}
    return [
        abs(curve.at(attended_load(entry.shape, sample.load)) / sample.seconds[timed] - 1)
        for sample in held_out
        for timed, curve in curves.items()
        if timed in sample.seconds
    ]


def fit_curve(entry: LayerEntry, quantity: Quantity) -> Curve:
    """Return the curve through an entry's samples."""
    samples = entry.samples
    values = [float(s.activation_bytes) if quantity == "bytes" else s.seconds[quantity] for s in samples]
    return Curve.fit([attended_load(entry.shape, s.load) for s in samples], values)


def attended_load(layer: LayerShape, load: TokenLoad) -> TokenLoad:
    """Return the load with the pairs inside the layer's windows in place of the squared lengths; else the load."""
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or not (mixer.window or mixer.window_side):
        return load
    return replace(load, sum_sq=attention_arithmetic(layer).query_key_pairs(load))


def _spaced(ascending: FloatArray) -> FloatArray:
    """Drop values that hardly differ from the next larger one that stays; the largest always stays."""
    spaced = [ascending[-1]]
    for value in ascending[-2::-1]:
        if value < spaced[-1] * (1 - MIN_NODE_SPACING):
            spaced.append(value)
    return np.array(spaced[::-1])


@lru_cache(maxsize=4096)
def _key(layer: LayerShape) -> str:
    return layer_key(layer_fields(layer))
