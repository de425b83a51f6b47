"""Which box of which tensor in a folder is which box of a parameter: the same data for reading and for writing.

Boxes of a parameter lie in its *full view* (`models.parameter_specs`), which tensor parallelism splits along one
dimension. Elements have the same row-major order in both boxes of a block, or that of the transposed matrix. So a rank
can read just its slice, and export can write the tensor from the parameter.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Box = tuple[tuple[int, int], ...]  # [lo, hi) along each dimension
_Runs = tuple[tuple[int, int], ...]  # where each run of features starts in a head of a tensor, and its length
# Rows of heads: tensor (None: ours are zeros), first row, number of rows, runs of a head in our order (None: as is).
_Part = tuple[str | None, int, int, _Runs | None]


@dataclass(frozen=True)
class Block:
    """A box of a tensor that is a box of a parameter's full view.

    The view may have more dimensions (in front, where its box has a size of 1) or fewer: the last dimensions of the
    tensor are flattened, and its first `num_leading` ones, where the box has a size of 1, are left out.
    """

    tensor: str
    tensor_box: Box
    view_box: Box
    num_leading: int = 0
    is_transposed: bool = False  # both are matrices but for what was said, and the tensor holds the view's transposed

    def cut(self, dim: int, start: int, stop: int) -> "Block | None":
        """Return the part whose rows along dimension `dim` of the view lie in [start, stop); None if there is none."""
        lo, hi = self.view_box[dim]
        new_lo, new_hi = max(lo, start), min(hi, stop)
        if new_lo >= new_hi:
            return None
        if (new_lo, new_hi) == (lo, hi):
            return self
        axis = dim - self.num_stacked
        assert axis >= 0, "a stacked dimension has a size of 1"
        axis = (1 - axis if self.is_transposed else axis) + self.num_leading
        is_flattened = len(self.tensor_box) - self.num_leading > len(self.view_box)
        assert dim == 0 or not is_flattened, "a flattened dimension cannot be cut"
        base = self.tensor_box[axis][0] - lo
        return replace(
            self,
            tensor_box=_with_range(self.tensor_box, axis, new_lo + base, new_hi + base),
            view_box=_with_range(self.view_box, dim, new_lo, new_hi),
        )

    @property
    def num_stacked(self) -> int:
        """Return how many dimensions the view has in front of the tensor's."""
        return max(0, len(self.view_box) - (len(self.tensor_box) - self.num_leading))


@dataclass(frozen=True)
class ParameterSource:
    """The tensors that one of our parameters is made of."""

    name: str  # plan-independent, e.g. `llm.layers.1.self_attention.linear_qkv.weight`
    blocks: tuple[Block, ...]
    may_be_padded: bool = False  # the parameter may have other rows too, which become zeros and are not exported
    may_be_missing: bool = False  # a folder may lack all tensors of all such parameters, which then start random
    has_token_rows: bool = False  # one for each token of the vocabulary, of which a recipe may have more

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that it is made of."""
        shapes: dict[str, tuple[int, ...]] = {}
        for block in self.blocks:
            ends = tuple(hi for _, hi in block.tensor_box)
            known = shapes.get(block.tensor, ends)
            shapes[block.tensor] = tuple(map(max, known, ends))
        return shapes

    def view_shape(self) -> tuple[int, ...]:
        """Return the shape of the full view that its blocks cover."""
        return tuple(
            max(hi for _, hi in sides) for sides in zip(*(block.view_box for block in self.blocks), strict=True)
        )

    def with_tokens(self, num_tokens: int) -> "ParameterSource":
        """Return the same parameter for a vocabulary of another size; one that has no row for each token as it is."""
        if not self.has_token_rows:
            return self
        return replace(
            self,
            blocks=tuple(
                replace(
                    block,
                    tensor_box=_with_range(block.tensor_box, 0, 0, num_tokens),
                    view_box=_with_range(block.view_box, 0, 0, num_tokens),
                )
                for block in self.blocks
            ),
        )

    def check_cover(self, full_shape: tuple[int, ...]) -> None:
        """Assert that the blocks cover a full view of this shape: all of it, or the first rows of one with padding."""
        for block in self.blocks:
            is_inside = all(hi <= size for (_, hi), size in zip(block.view_box, full_shape, strict=True))
            assert is_inside, f"{self.name}: {block} lies outside of {full_shape}"
        num_covered = sum(math.prod(hi - lo for lo, hi in block.view_box) for block in self.blocks)
        is_covered = self.may_be_padded or num_covered == math.prod(full_shape)
        assert is_covered, f"{self.name}: the family covers {num_covered} elements of {full_shape}"


def sources_by_tensor(
    sources: Iterable[ParameterSource],
) -> dict[str, tuple[tuple[int, ...], list[ParameterSource]]]:
    """Return the shape of every tensor that parameters are made of, with these parameters: experts may share one."""
    found: dict[str, tuple[tuple[int, ...], list[ParameterSource]]] = {}
    for source in sources:
        for tensor, shape in source.tensor_shapes().items():
            known, of_tensor = found.get(tensor, (shape, []))
            found[tensor] = (tuple(map(max, known, shape)), [*of_tensor, source])
    return found


def as_is(name: str, tensor: str, shape: Sequence[int]) -> ParameterSource:
    """Return a parameter that is the tensor."""
    box = _whole(shape)
    return ParameterSource(name, (Block(tensor, box, box),))


def transposed(name: str, tensor: str, shape: tuple[int, int]) -> ParameterSource:
    """Return a linear of this shape, (outputs, inputs), whose matrix the tensor holds as (inputs, outputs)."""
    block = Block(tensor, _whole((shape[1], shape[0])), _whole(shape), is_transposed=True)
    return ParameterSource(name, (block,))


def vocabulary(name: str, tensor: str, rows: int, width: int) -> ParameterSource:
    """Return a parameter that has the tensor's rows, and perhaps rows that pad the vocabulary."""
    return replace(as_is(name, tensor, (rows, width)), may_be_padded=True, has_token_rows=True)


def flattened(name: str, tensor: str, shape: Sequence[int]) -> ParameterSource:
    """Return a matrix whose rows are the tensor's, flattened: the linear form of a convolution."""
    return ParameterSource(name, (Block(tensor, _whole(shape), _whole((shape[0], math.prod(shape[1:])))),))


def convolution_of_squares(name: str, tensor: str, kernel: tuple[int, int, int]) -> ParameterSource:
    """Return the linear form of a convolution whose kernel is a square of tokens that are merged side by side.

    kernel: (outputs, inputs, side); the tensor is (outputs, inputs, side, side), and inputs of a row or a column of the
    square are neighbors in our matrix, (outputs, side * side * inputs).
    """
    outputs, inputs, side = kernel
    blocks = []
    for place in range(side**2):
        row, col = divmod(place, side)
        tensor_box = (*_whole((outputs, inputs)), (row, row + 1), (col, col + 1))
        blocks.append(Block(tensor, tensor_box, ((0, outputs), (place * inputs, (place + 1) * inputs))))
    return ParameterSource(name, tuple(blocks))


def table_of_stack(name: str, tensor: str, number: int, shape: tuple[int, int]) -> ParameterSource:
    """Return one of the matrices of `shape` that a tensor of three dimensions holds, by its number."""
    return ParameterSource(name, (Block(tensor, ((number, number + 1), *_whole(shape)), _whole(shape), 1),))


def without_leading_ones(name: str, tensor: str, shape: Sequence[int]) -> ParameterSource:
    """Return a parameter of this shape whose tensor has dimensions of size 1 before it, so that it has three."""
    num_leading = 3 - len(shape)
    box = _whole((1,) * num_leading + tuple(shape))
    return ParameterSource(name, (Block(tensor, box, _whole(shape), num_leading),))


def gate_and_up(name: str, gate: str, up: str, shape: Sequence[int]) -> ParameterSource:
    """Return the first linear of a gated MLP, whose full view stacks both tensors of `shape`."""
    box = _whole(shape)
    return ParameterSource(name, (Block(gate, box, ((0, 1), *box)), Block(up, box, ((1, 2), *box))))


def fused_gate_and_up(
    name: str, tensor: str, expert: int, shape: tuple[int, int], *, inputs_first: bool
) -> ParameterSource:
    """Return an expert's first linear, whose full view stacks gate and values of `shape`, (ffn, hidden).

    tensor: of all experts, (experts, gates and values, hidden); with `inputs_first` (experts, hidden, both).
    """
    ffn, inputs = shape[0], (0, shape[1])
    blocks = []
    for half in range(2):
        rows = (half * ffn, (half + 1) * ffn)
        matrix = (inputs, rows) if inputs_first else (rows, inputs)
        view_box = ((half, half + 1), *_whole(shape))
        blocks.append(Block(tensor, ((expert, expert + 1), *matrix), view_box, 1, inputs_first))
    return ParameterSource(name, tuple(blocks))


def fused_down(name: str, tensor: str, expert: int, shape: tuple[int, int], *, inputs_first: bool) -> ParameterSource:
    """Return an expert's second linear of `shape`, (hidden, ffn).

    tensor: of all experts, (experts, hidden, ffn); with `inputs_first` (experts, ffn, hidden).
    """
    matrix = _whole(shape[::-1] if inputs_first else shape)
    return ParameterSource(name, (Block(tensor, ((expert, expert + 1), *matrix), _whole(shape), 1, inputs_first),))


def query_key_value(
    name: str,
    tensors: tuple[str, str | None, str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    inputs: Sequence[int],
    turning: int | None = None,
) -> ParameterSource:
    """Return the joint projection: for each KV head the rows of its query heads, then of its key, then of its value.

    tensors: of queries, keys and values. Models whose keys have no bias have None for it, and zeros in our parameter.
    inputs: the dimensions after the rows, (hidden,) of weights, () of biases. turning: see `head_features`.
    """
    queries, keys, values = tensors
    query_rows, runs = heads // kv_heads * head_dim, _runs_of_turning(head_dim, turning)
    parts: list[_Part] = []
    for head in range(kv_heads):
        parts.append((queries, head * query_rows, query_rows, runs))
        parts += _key_and_value((keys, values), head, head_dim, runs)
    return ParameterSource(name, _stacked(parts, inputs, head_dim), may_be_padded=keys is None)


def axial_query_key_value(
    name: str, tensors: tuple[str, str, str], heads: int, head_dim: int, inputs: Sequence[int]
) -> ParameterSource:
    """Return the joint projection of an encoder whose tensors have the features of a head as `axial_head_features`."""
    queries, keys, values = tensors
    runs = _axial_runs(head_dim)
    parts: list[_Part] = []
    for head in range(heads):
        parts.append((queries, head * head_dim, head_dim, runs))
        parts += _key_and_value((keys, values), head, head_dim, runs)
    return ParameterSource(name, _stacked(parts, inputs, head_dim))


def gated_query_key_value(
    name: str,
    tensors: tuple[str, str, str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    inputs: Sequence[int],
    turning: int | None = None,
) -> ParameterSource:
    """Return the joint projection of attention whose output is gated, as `query_key_value` does.

    The tensor of queries holds for each head its query, then its gate; ours has the gates of a KV head's queries behind
    these.
    """
    queries, keys, values = tensors
    ratio, runs = heads // kv_heads, _runs_of_turning(head_dim, turning)
    parts: list[_Part] = []
    for head in range(kv_heads):
        of_head = range(head * ratio, (head + 1) * ratio)
        parts += [(queries, 2 * query * head_dim, head_dim, runs) for query in of_head]
        parts += [(queries, (2 * query + 1) * head_dim, head_dim, None) for query in of_head]
        parts += _key_and_value((keys, values), head, head_dim, runs)
    return ParameterSource(name, _stacked(parts, inputs, head_dim))


def _key_and_value(
    tensors: tuple[str | None, str], head: int, head_dim: int, runs: _Runs | None
) -> tuple[_Part, _Part]:
    """Return the parts of a KV head's key and value."""
    keys, values = tensors
    return (keys, head * head_dim, head_dim, runs), (values, head * head_dim, head_dim, None)


def _stacked(parts: Iterable[_Part], inputs: Sequence[int], head_dim: int) -> tuple[Block, ...]:
    """Return the blocks of a parameter that has the rows of the parts one after the other."""
    blocks: list[Block] = []
    row = 0
    for tensor, first, number, runs in parts:
        if tensor is not None:
            blocks += _rows_of_heads(tensor, (first, number), row, inputs, (head_dim, runs))
        row += number
    return tuple(blocks)


def head_features(name: str, tensor: str, head_dim: int, turning: int | None) -> ParameterSource:
    """Return a vector over the features of a head.

    turning: how many features rotary positions turn, where these are not all. A tensor has them first, half of each
        pair in front of the other halves. Ours pairs a head's first half with its second one, with these pairs first.
    """
    runs = _runs_of_turning(head_dim, turning)
    return ParameterSource(name, tuple(_rows_of_heads(tensor, (0, head_dim), 0, (), (head_dim, runs))))


def axial_head_features(name: str, tensor: str, head_dim: int) -> ParameterSource:
    """Return a vector over the features of a head of which one half turns by the column, the other by the row.

    A tensor pairs features inside each half. Ours pairs the head's halves, rows before columns in both.
    """
    head = (head_dim, _axial_runs(head_dim))
    return ParameterSource(name, tuple(_rows_of_heads(tensor, (0, head_dim), 0, (), head)))


def _axial_runs(head_dim: int) -> _Runs:
    quarter = head_dim // 4
    return tuple((place * quarter, quarter) for place in (2, 0, 3, 1))


def _runs_of_turning(head_dim: int, turning: int | None) -> _Runs | None:
    """Return the runs of a head of which `turning` features turn: see `head_features`."""
    if turning is None or turning == head_dim:
        return None
    half, still = turning // 2, (head_dim - turning) // 2
    return (0, half), (turning, still), (half, half), (turning + still, still)


def _rows_of_heads(
    tensor: str, rows: tuple[int, int], row: int, inputs: Sequence[int], head: tuple[int, _Runs | None]
) -> list[Block]:
    """Return the blocks of rows (first, number) of some heads of a tensor, which are ours from `row` on."""
    (first, number), (head_dim, runs), rest = rows, head, _whole(inputs)
    if runs is None:
        return [Block(tensor, ((first, first + number), *rest), ((row, row + number), *rest))]
    blocks = []
    for start in range(first, first + number, head_dim):
        for offset, length in runs:
            theirs, ours = start + offset, (row, row + length)
            blocks.append(Block(tensor, ((theirs, theirs + length), *rest), (ours, *rest)))
            row += length
    return blocks


def joint_query_key_value(name: str, tensor: str, heads: int, head_dim: int, inputs: Sequence[int]) -> ParameterSource:
    """Return the joint projection from a tensor with the rows of all queries, then of all keys, then of all values."""
    rows = heads * head_dim
    return parts_by_head(name, [(tensor, kind * rows, rows) for kind in range(3)], heads, inputs)


def by_head(name: str, tensors: Sequence[str], heads: int, shape: Sequence[int]) -> ParameterSource:
    """Return a joint projection from tensors of one shape: for each head its rows of the first tensor, and so on."""
    return parts_by_head(name, [(tensor, 0, shape[0]) for tensor in tensors], heads, shape[1:])


def parts_by_head(
    name: str,
    parts: Sequence[tuple[str, int, int]],
    heads: int,
    inputs: Sequence[int],
    view_inputs: Sequence[int] | None = None,
) -> ParameterSource:
    """Return a parameter with the rows of one head after the other, from parts that hold those of all heads.

    parts: (tensor, first row, number of rows) each. inputs: the dimensions after the rows in tensors; view_inputs: in
        the parameter, where these are flattened.
    """
    rest, view_rest = _whole(inputs), _whole(inputs if view_inputs is None else view_inputs)
    blocks = []
    row = 0
    for head in range(heads):
        for tensor, first, number in parts:
            rows = number // heads
            start = first + head * rows
            blocks.append(Block(tensor, ((start, start + rows), *rest), ((row, row + rows), *view_rest)))
            row += rows
    return ParameterSource(name, tuple(blocks))


def swapped_halves(name: str, tensor: str, shape: Sequence[int]) -> ParameterSource:
    """Return a parameter with the second half of the tensor's rows before the first."""
    half, rest = shape[0] // 2, _whole(shape[1:])
    lower, upper = ((0, half), *rest), ((half, 2 * half), *rest)
    return ParameterSource(name, (Block(tensor, upper, lower), Block(tensor, lower, upper)))


def channels_first(name: str, tensor: str, positions: int, channels: int, inputs: Sequence[int]) -> ParameterSource:
    """Return a parameter with rows in the order (channel, position) from a tensor in the order (position, channel)."""
    rest = _whole(inputs)
    blocks = []
    for channel in range(channels):
        for position in range(positions):
            ours, theirs = channel * positions + position, position * channels + channel
            blocks.append(Block(tensor, ((theirs, theirs + 1), *rest), ((ours, ours + 1), *rest)))
    return ParameterSource(name, tuple(blocks))


def respell(sources: Iterable[ParameterSource], spelling: Sequence[tuple[str, str]]) -> list[ParameterSource]:
    """Return the sources with the names of tensors in one spelling of the family."""
    return [
        replace(
            source,
            blocks=tuple(replace(block, tensor=_rename(block.tensor, spelling)) for block in source.blocks),
        )
        for source in sources
    ]


def _rename(tensor: str, spelling: Sequence[tuple[str, str]]) -> str:
    """Replace the first prefix of the spelling that the name has."""
    for prefix, replacement in spelling:
        if tensor.startswith(prefix):
            return replacement + tensor.removeprefix(prefix)
    return tensor


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _with_range(box: Box, axis: int, lo: int, hi: int) -> Box:
    return (*box[:axis], (lo, hi), *box[axis + 1 :])
