"""Memory of a rank: how much it took at most, and what to say when it was not enough."""

import resource
from collections.abc import Mapping, Sequence

import torch

from mmtrain.balance import BatchMeta
from mmtrain.program import LLM, Action, Compute, Microbatch

KIB, GIB = 1024, 1024**3
MAX_NAMED_SAMPLES = 5


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes at the fullest moment so far: of the CUDA allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or (torch has no type for that) on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def explain_out_of_memory(
    doing: Action | str,
    meta: BatchMeta,
    names: Sequence[str],
    measured_bytes: int,
    predicted_gib: float | None,
) -> str:
    """Say which stage ran out of memory, on which samples, and how that compares with the plan.

    `names` are the users' names of `meta`'s samples, row by row.
    """
    where, samples, ways = "", "", "parallel.<unit>.tp or pp, a smaller data.seq_len"
    if isinstance(doing, Compute):
        rows = _rows(doing.mb, meta)
        tokens = int(meta.tokens[rows].sum())
        shown = ", ".join(names[row] for row in rows[:MAX_NAMED_SAMPLES])
        more = f" and {len(rows) - MAX_NAMED_SAMPLES} more" if len(rows) > MAX_NAMED_SAMPLES else ""
        where = f" in stage {doing.stage}, microbatch {doing.mb}"
        samples = f"; samples {shown}{more} ({tokens} LLM tokens)"
        ways = (
            f"parallel.{doing.stage.unit}.recompute: all, parallel.{doing.stage.unit}.tp or pp, a smaller data.seq_len"
        )
    predicted = "" if predicted_gib is None else f"{predicted_gib:.2f} GiB predicted at most, "
    return f"out of memory{where}{samples}; {predicted}{measured_bytes / GIB:.2f} GiB measured before. Try {ways}"


def predicted_peak_gib(rank: int, peaks: Mapping[str, float]) -> float | None:
    """Look a rank up in a plan's peaks, whose keys are a rank (`3`) or a range of ranks (`0-3`)."""
    for key, gib in peaks.items():
        first, _, last = key.partition("-")
        if int(first) <= rank <= int(last or first):
            return gib
    return None


def _rows(mb: Microbatch, meta: BatchMeta) -> list[int]:
    """The samples whose text or items a microbatch holds, each once."""
    if mb.unit == LLM:
        return [int(row) for row in meta.microbatch(mb.replica, mb.index)]
    items = meta.items[mb.unit]
    return list(dict.fromkeys(int(items.sample[item]) for item in items.microbatch(mb.replica, mb.index)))
