"""The costs of a gated DeltaNet inside a block: linear in tokens, whatever the lengths of samples.

Its rule runs in chunks of tokens, and in fp32. A gradient needs its forward once more: see `attention.delta_rule`.
"""

from typing import NamedTuple

from mmtrain.costs.cost_model import PassDirection, TokenLoad
from mmtrain.costs.hardware import Hardware
from mmtrain.costs.part_records import FP32_BYTES, Gemm, PartParameters, SavedWidths
from mmtrain.models.shapes.layer_shape import DELTA_CHUNK_TOKENS, DELTA_HEAD_TOKENS, GatedDeltaNet, LayerShape


class _Moves(NamedTuple):
    """How often numbers of a value head's token are read or written by kernels that are no product."""

    convolved: int  # the head's share of what the convolution reads
    value: int
    key: int
    chunk: int  # a row of a matrix of the chunk
    state: int  # the token's share of a state


class _Kernels(NamedTuple):
    """Kernels that compute some heads at once."""

    of_group: int  # for all chunks together
    of_step: int  # and for each step from chunk to chunk


# Counted by torch's dispatch, to which tests/costs/test_delta_net_costs.py holds them, with the four taps that all
# models have. Each tap multiplies, selects, shifts and adds, so most is read and written in the convolution.
_MOVES: dict[PassDirection, _Moves] = {
    "forward": _Moves(convolved=50, value=19, key=3, chunk=11, state=5),
    "backward": _Moves(convolved=147, value=63, key=34, chunk=51, state=15),
}
_KERNELS: dict[PassDirection, _Kernels] = {"forward": _Kernels(86, 8), "backward": _Kernels(241, 24)}
_PRODUCTS: dict[PassDirection, int] = {"forward": 1, "backward": 3}


class DeltaNetArithmetic:
    """The costs of a gated DeltaNet."""

    __slots__ = ("layer", "mixer")

    def __init__(self, layer: LayerShape, mixer: GatedDeltaNet) -> None:
        self.layer = layer
        self.mixer = mixer

    num_passes = 1  # how often its products without weights are computed

    def gemms(self, tokens: int, tp: int) -> tuple[Gemm, ...]:
        """Return the GEMMs with weights that one of `tp` ranks computes in forward."""
        hidden, mixer = self.layer.hidden, self.mixer
        return Gemm(tokens, mixer.first_width // tp, hidden), Gemm(tokens, hidden, mixer.inner_width // tp)

    def flops(self, load: TokenLoad, tp: int) -> int:
        """Return the forward FLOPs of the products without weights.

        Of each key head: products of keys, and of queries, with the keys of a chunk. Of each value head: the solution
        of the chunk's triangular system, what its scores make of that, and three products with the state.
        """
        mixer, chunk = self.mixer, DELTA_CHUNK_TOKENS
        key, value = mixer.key_head_dim, mixer.value_head_dim
        of_key_head = 4 * chunk * key
        of_value_head = chunk * (key + value) + 2 * chunk * value + 6 * key * value
        return load.tokens * (mixer.key_heads * of_key_head + mixer.value_heads * of_value_head) // tp

    def num_parameters(self) -> PartParameters:
        """Return the number of parameters: linears, convolution, two numbers of each value head, and the norm."""
        mixer, hidden = self.mixer, self.layer.hidden
        divided = (mixer.first_width + mixer.inner_width) * hidden
        divided += mixer.convolved_width * mixer.taps + 2 * mixer.value_heads
        return PartParameters(divided, mixer.value_head_dim)

    def saved(self, load: TokenLoad, element_bytes: int, tp: int, sorts_sequences: bool) -> SavedWidths:
        """Return what it keeps: what the first linear makes, and what the last one reads."""
        return SavedWidths(self.mixer.first_width + self.mixer.inner_width)

    def read_by_weight_gradients(self, tp: int, joins_output: bool) -> dict[str, int]:
        """Return, by module, the numbers that a rank keeps of a token only for gradients of the module's weights."""
        first, projection = self.mixer.linears
        return {first: self.layer.hidden, projection: self.mixer.inner_width // tp}

    @property
    def gradient_width(self) -> int:
        """Numbers of a token in gradients at the peak of backward: of the output, and of what the first linear made."""
        return self.mixer.inner_width + self.mixer.first_width

    def working_bytes(self, load: TokenLoad, tp: int) -> int:
        """Return what its backward makes again, with the gradients of that, for the heads that it computes at once.

        Ranks that share a sequence have all of its tokens for some heads.
        """
        ratio = self.mixer.value_heads // self.mixer.key_heads
        value_heads = self.mixer.value_heads // tp
        of_key_head = max(load.tokens, load.max_len) * ratio
        at_once = min(load.tokens * value_heads, max(DELTA_HEAD_TOKENS, of_key_head))
        return round(FP32_BYTES * at_once * _WORKING_SHARE * self._width_between_linears)

    @property
    def elementwise_width(self) -> int:
        """How many numbers element-wise work moves for a token in forward: see `rule_seconds`, which counts it."""
        return 0

    def rule_seconds(self, hardware: Hardware, load: TokenLoad, tp: int, direction: PassDirection) -> float:
        """Return the seconds between the two linears. Backward computes its forward again, and gradients."""
        mixer, chunk = self.mixer, DELTA_CHUNK_TOKENS
        num_chunks = self._num_chunks(load)
        heads = mixer.value_heads // tp
        padded = TokenLoad(num_chunks * chunk, 0, load.max_len, load.num_sequences)
        peak = hardware.clock * hardware.peak_flops("fp32") / hardware.slowest_rank_ratio
        share = hardware.efficiency_at(num_chunks * chunk * heads, mixer.value_head_dim, chunk)
        products_s = _PRODUCTS[direction] * self.flops(padded, tp) / (peak * share)
        moved_s = FP32_BYTES * self.moved_numbers(load, tp, direction) / hardware.moved_bytes_per_s
        return products_s + moved_s + self.num_kernels(load, tp, direction) * hardware.kernel_launch_s

    def moved_numbers(self, load: TokenLoad, tp: int, direction: PassDirection) -> float:
        """Return how many numbers element-wise kernels read and write, as `_Moves` counts them."""
        mixer, moves = self.mixer, _MOVES[direction]
        key, value, chunk = mixer.key_head_dim, mixer.value_head_dim, DELTA_CHUNK_TOKENS
        of_token = moves.convolved * mixer.convolved_width / mixer.value_heads + moves.value * value
        of_place = moves.key * key + moves.chunk * chunk + moves.state * key * value / chunk
        return mixer.value_heads // tp * (load.tokens * of_token + self._num_chunks(load) * chunk * of_place)

    def num_kernels(self, load: TokenLoad, tp: int, direction: PassDirection) -> int:
        """Return how many kernels run: some for all chunks together, and some for each step from chunk to chunk."""
        num_groups = -(-load.tokens * (self.mixer.value_heads // tp) // DELTA_HEAD_TOKENS)
        num_steps = -(-load.max_len // DELTA_CHUNK_TOKENS)
        kernels = _KERNELS[direction]
        return num_groups * (kernels.of_group + kernels.of_step * num_steps)

    def _num_chunks(self, load: TokenLoad) -> int:
        """Return the chunks of all samples. The last one of a sample is filled by half in the mean."""
        if load.max_len <= DELTA_CHUNK_TOKENS:
            return load.num_sequences
        return -(-(load.tokens + load.num_sequences * DELTA_CHUNK_TOKENS // 2) // DELTA_CHUNK_TOKENS)

    @property
    def _width_between_linears(self) -> float:
        """Numbers that are made of a token of one value head between the linears.

        These are the convolution's sums, queries, keys and values, four matrices of the chunk, the two sides of its
        system, what reads and writes the state, a share of the states themselves, and the output.
        """
        mixer, chunk = self.mixer, DELTA_CHUNK_TOKENS
        key, value = mixer.key_head_dim, mixer.value_head_dim
        convolved = mixer.convolved_width / mixer.value_heads
        return 4 * convolved + 4 * chunk + 2 * (key + value) + 2 * key + 4 * value + 2 * key * value / chunk


# Of the numbers between the linears, how many are alive at once in a backward, gradients among them.
_WORKING_SHARE = 1.25
