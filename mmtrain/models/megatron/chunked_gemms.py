"""GEMMs in chunks of tokens: while a chunk is computed, the collective of its neighbour runs (arXiv 2408.04275).

Under sequence parallelism a chunk holds some tokens of every rank's shard, so its rows lie apart in the tensor of all
tokens. No pass puts them in order: the GEMM reads or writes them where they lie, as one batch of a rank's rows each,
and what is gathered goes to its place when it arrives. So layers before and after know nothing of chunks, and sums over
tokens keep their order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return [start, stop) of each chunk: equally many rows but for one, and at least one, so maybe fewer chunks."""
    num_chunks = max(1, min(num_chunks, num_rows))
    bounds = [num_rows * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [(bounds[chunk], bounds[chunk + 1]) for chunk in range(num_chunks)]


def gather_then_multiply(
    shard: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup, num_chunks: int
) -> tuple[Tensor, Tensor]:
    """Gather the tokens of all ranks in chunks, and multiply each chunk while the next one arrives.

    Args:
        shard: (T / tp, ..., inputs) this rank's tokens.
        matrix: (inputs, outputs).
        bias: (outputs,), added to the products.
        group: the TP group.
        num_chunks: at most.

    Returns:
        The products (T, ..., outputs), and the gathered tokens (T, ..., inputs).
    """
    shard = shard.contiguous()
    rows = shard.view(-1, shard.shape[-1])
    size = group.size()
    gathered = rows.new_empty(size, *rows.shape)
    products = rows.new_empty(size, len(rows), matrix.shape[1])
    bounds = chunk_bounds(len(rows), num_chunks)
    arrivals = []
    for start, stop in bounds:
        places = [of_rank[start:stop] for of_rank in gathered]
        arrivals.append(dist.all_gather(places, rows[start:stop], group=group, async_op=True))
    for (start, stop), arrival in zip(bounds, arrivals, strict=True):
        arrival.wait()
        _multiply(gathered[:, start:stop], matrix, bias, products[:, start:stop])
    num_tokens = size * len(shard)
    return _with_tokens(products, num_tokens, shard), _with_tokens(gathered, num_tokens, shard)


def multiply_then_reduce(
    x: Tensor, matrix: Tensor, group: dist.ProcessGroup, num_chunks: int, *, scatters: bool
) -> tuple[Tensor, "Reductions"]:
    """Multiply tokens in chunks, and sum each chunk's products over the ranks while the next one is computed.

    Args:
        x: (T, ..., inputs) all tokens.
        matrix: (inputs, outputs).
        group: the TP group.
        num_chunks: at most.
        scatters: each rank gets the sums of its shard of the tokens, not those of all.

    Returns:
        Where the sums (T, ..., outputs), or (T / tp, ..., outputs), will be, and the reductions to wait for.
    """
    rows = x.contiguous().view(-1, x.shape[-1])
    if not scatters:
        sums = rows.new_empty(len(rows), matrix.shape[1])
        works = []
        for start, stop in chunk_bounds(len(rows), num_chunks):
            torch.mm(rows[start:stop], matrix, out=sums[start:stop])
            works.append(dist.all_reduce(sums[start:stop], group=group, async_op=True))
        return _with_tokens(sums, len(x), x), Reductions(works, [])
    size = group.size()
    of_ranks = rows.view(size, -1, rows.shape[-1])
    num_rows = of_ranks.shape[1]
    sums = rows.new_empty(num_rows, matrix.shape[1])
    works, summands = [], []
    for start, stop in chunk_bounds(num_rows, num_chunks):
        products = rows.new_empty(size, stop - start, matrix.shape[1])
        _multiply(of_ranks[:, start:stop], matrix, None, products)
        summands.append(products.view(-1, matrix.shape[1]))
        works.append(dist.reduce_scatter_tensor(sums[start:stop], summands[-1], group=group, async_op=True))
    return _with_tokens(sums, len(x) // size, x), Reductions(works, summands)


class Reductions:
    """Reductions under way, with what they read."""

    def __init__(self, works: Sequence[dist.Work], summands: Sequence[Tensor]) -> None:
        self._works = works
        self._summands = summands

    def wait(self) -> None:
        """Wait for all of them; on a GPU the current stream does."""
        for work in self._works:
            work.wait()
        self._summands = ()


def _multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write rows (ranks, n, inputs) @ matrix (+ bias) to `out` (ranks, n, outputs); the ranks' rows may lie apart."""
    matrices = matrix.expand(len(rows), *matrix.shape)
    if bias is None:
        torch.bmm(rows, matrices, out=out)
    else:
        torch.baddbmm(bias, rows, matrices, out=out)


def _with_tokens(rows: Tensor, num_tokens: int, like: Tensor) -> Tensor:
    """View rows as (tokens, ..., width) with the dimensions between those of `like`."""
    return rows.view(num_tokens, *like.shape[1:-1], rows.shape[-1])
