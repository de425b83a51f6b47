"""What Muon (`train.optimizer.kind: muon`) takes: state, memory and seconds of a step beside AdamW.

Weights of linears have one moment in fp32 instead of two. In a step each of them is gathered on a rank, which runs the
Newton-Schulz iterations, and sends every rank the update of what it holds: see `models.optim.matrix_exchange`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.hardware import ELEMENT_BYTES, Precision
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp, expert_shard, is_of_expert
from mmtrain.models.shapes.weight_matrices import WeightMatrices, weight_matrices

NEWTON_SCHULZ_STEPS = 5  # as `models.optim.orthogonal_update` has it, which needs torch; a test compares them
# Times that a rank holds the weight that it owns, in the weights' precision: while it travels, and as products of the
# iterations. A test measures them.
UPDATE_COPIES = 5
_DIRECTIONS = 2  # in which a weight travels: to its owner, and back

Counts: TypeAlias = tuple[tuple[WeightMatrices, int], ...]  # weights, and how many of each


class MuonMatrices(NamedTuple):
    """The weights of a layer that Muon trains."""

    joint: Counts  # that all replicas hold
    of_experts: Counts  # that each replica of an expert-parallel group holds some of

    @property
    def largest(self) -> int:
        """Return how many numbers the largest weight has."""
        return max((weight.num_weights for weight, _ in (*self.joint, *self.of_experts)), default=0)


@lru_cache(maxsize=1 << 10)
def trained_matrices(layer: LayerShape) -> MuonMatrices:
    """Return the weights of a layer that Muon trains: all of its linears that are not frozen."""
    if not layer.trains_weights:
        return MuonMatrices((), ())
    is_apart = isinstance(layer.mlp, MoeMlp) and layer.mlp.ep > 1
    joint: Counter[WeightMatrices] = Counter()
    of_experts: Counter[WeightMatrices] = Counter()
    for name, weight in weight_matrices(layer).items():
        if f"{name}.weight" not in layer.frozen:
            (of_experts if is_apart and is_of_expert(name) else joint)[weight] += 1
    return MuonMatrices(tuple(joint.items()), tuple(of_experts.items()))


@lru_cache(maxsize=1 << 10)
def num_muon_parameters(layer: LayerShape, tp: int) -> tuple[int, int]:
    """Return how many parameters of a layer that a rank holds Muon trains: of all replicas, and of experts apart."""
    matrices = trained_matrices(layer)
    ep = layer.mlp.ep if isinstance(layer.mlp, MoeMlp) else 1
    return _count(matrices.joint) // tp, _count(matrices.of_experts) // (tp * ep)


def _count(weights: Counts) -> int:
    return sum(number * weight.num_weights for weight, number in weights)


def muon_buffer_bytes(layers: Iterable[LayerShape], precision: Precision) -> int:
    """Return the bytes beside the state that a rank with these layers needs in an update."""
    return update_bytes(max((trained_matrices(layer).largest for layer in layers), default=0), precision)


def update_bytes(num_weights: int, precision: Precision) -> int:
    """Return the bytes that a rank needs in the update of a weight with so many numbers."""
    return num_weights * UPDATE_COPIES * ELEMENT_BYTES[precision]


@dataclass(frozen=True)
class MuonGroup:
    """The ranks that hold the weights of a unit together.

    tp: ranks that split a weight.
    replicas: ranks that share out what a TP rank holds: replicas with ZeRO-1, else those of one copy.
    ep: replicas that hold experts together.
    """

    tp: int
    replicas: int
    ep: int
    ranks_per_node: int

    def seconds(self, layer: LayerShape, costs: CostModel, precision: Precision) -> float:
        """Return the seconds that each rank spends on a layer: the ranks that hold a weight share all such weights."""
        matrices = trained_matrices(layer)
        seconds = 0.0
        for weight, number in matrices.joint:
            seconds += number * self._weight_seconds(weight, self.replicas, 1, costs, precision)
        replicas = expert_shard(self.replicas, self.ep)
        for weight, number in matrices.of_experts:
            seconds += number / self.ep * self._weight_seconds(weight, replicas, self.ep, costs, precision)
        return seconds

    def _weight_seconds(
        self, weight: WeightMatrices, replicas: int, step: int, costs: CostModel, precision: Precision
    ) -> float:
        """Return the part of a rank; `step`: between replicas that hold the same weight."""
        nbytes = weight.num_weights * ELEMENT_BYTES[precision]
        seconds = orthogonalization_seconds(weight, costs)
        strides = ((replicas, self.tp * step), (self.tp, 1))
        for size, stride in strides:
            layout = GroupLayout.strided(size, stride, self.ranks_per_node)
            seconds += _DIRECTIONS * _exchange_seconds(nbytes, layout, costs)
        return seconds / (self.tp * replicas)


def _exchange_seconds(nbytes: int, group: GroupLayout, costs: CostModel) -> float:
    """Return the seconds in which each rank of a group sends evenly to all, its own part of the bytes included."""
    if group.size == 1:
        return 0.0
    most, fewest, to_each = -(-group.size // group.nodes), group.fewest_per_node, nbytes / group.size
    off_node = round((group.size - fewest) * to_each) if group.nodes > 1 else 0
    return costs.all_to_all(round((most - 1) * to_each), off_node, group)


def orthogonalization_seconds(weight: WeightMatrices, costs: CostModel) -> float:
    """Return the seconds of the Newton-Schulz iterations of all matrices of a weight on one rank."""
    seconds = 0.0
    for rows, columns in weight.shapes:
        short, long = min(rows, columns), max(rows, columns)
        products = (
            costs.product(short, short, long) + costs.product(short, short, short) + costs.product(short, long, short)
        )
        seconds += NEWTON_SCHULZ_STEPS * products
    return seconds
