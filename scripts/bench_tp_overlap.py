"""Measure what chunks of tokens hide of tensor-parallel communication in a block (`parallel.UNIT.tp_overlap`).

    python -m scripts.bench_tp_overlap                      # a link of 400 MB/s, then no delay at all
    python -m scripts.bench_tp_overlap --megabytes-per-s 200 --chunks 4 8

Every all-reduce, reduce-scatter and all-gather of the processes takes the time of a slow link more, by its bytes, with
the core free. Two ranks run forward and backward of two blocks with all linears as they are without the
setting, and in chunks, in turn. Printed is the share of the link's time that a pass hides: 1 - (time with the link -
time without it) / time of the link, the median of pairs that follow each other. Target: at least 70% in chunks; without
a link at most 1.02x as long, or switched off, which `tp_overlap: auto` does by the costs of `mmtrain profile`.
"""

import os
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from scripts.measurements import Report, arguments, start
from scripts.slow_link import COLLECTIVES, SlowLink

LINK = SlowLink()
LINK.carry(*COLLECTIVES, "all_gather")  # before Megatron-core keeps these functions under names of its own

from mmtrain.models.build_stage import StageOptions, build_stage  # noqa: E402
from mmtrain.models.megatron import ParallelGroups  # noqa: E402
from mmtrain.models.shapes.model_shape import build_model_shape  # noqa: E402
from mmtrain.models.stage.stage_inputs import TextInput  # noqa: E402
from mmtrain.models.stage.stage_module import StageModule, StageSpec  # noqa: E402
from mmtrain.recipe import Recipe  # noqa: E402
from mmtrain.runtime.resilience.launch import launch_local  # noqa: E402
from mmtrain.runtime.world import Address, join, leave  # noqa: E402

NUM_RANKS = 2
NUM_BLOCKS = 2
LLM = {"layers": NUM_BLOCKS, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 64}
NUM_TOKENS = 2048  # with which a chunk takes tens of milliseconds, far more than the threads of the link


def main() -> None:
    """Print a line for each way to run the blocks."""
    parser = arguments(__doc__)
    parser.add_argument("--megabytes-per-s", type=float, default=400.0)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report = start("Tensor-parallel communication in chunks", options)
    report.table("sp", "chunks", "forward: link, hidden", "backward: link, hidden", "both without a link")
    for sp in (False, True):
        rate = options.megabytes_per_s * 1e6
        launch_local(NUM_RANKS, partial(_rank_main, report, sp, options.chunks, rate, options.repeats))


def _rank_main(
    report: Report, sp: bool, chunk_counts: list[int], bytes_per_s: float, repeats: int, address: Address
) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    alone = ParallelGroups.single()
    group = dist.group.WORLD
    assert group is not None
    groups = ParallelGroups(tp=group, dp=alone.dp, pp=alone.pp)
    counts = [1, *chunk_counts]
    stages = {count: _blocks(groups, sp, count) for count in counts}
    times: dict[tuple[int, float | None], list[tuple[float, float]]] = {}
    links: dict[int, tuple[float, float]] = {}
    for repeat in range(repeats + 1):
        for count in counts:
            for rate in (None, bytes_per_s):
                seconds, link_s = _pass_seconds(stages[count], sp, rate)
                if repeat:  # the first is a warm-up
                    times.setdefault((count, rate), []).append(seconds)
                if rate is not None:
                    links[count] = link_s
    if world.is_first:
        for count in counts:
            report.row(sp, count, *_cells(count, times, links[count], bytes_per_s))
    leave()


def _cells(
    count: int,
    times: dict[tuple[int, float | None], list[tuple[float, float]]],
    link_s: tuple[float, float],
    bytes_per_s: float,
) -> list[str]:
    """Return what a pass hides in each direction, and how long it takes without a link beside whole linears."""
    columns = []
    for direction in (0, 1):
        pairs = zip(times[count, bytes_per_s], times[count, None], strict=True)  # one behind the other
        added_s = statistics.median(with_link[direction] - without[direction] for with_link, without in pairs)
        hidden = 1 - added_s / link_s[direction]
        columns.append(f"{link_s[direction] * 1e3:.1f} ms, {hidden:.0%}")
    ratios = [sum(a) / sum(b) for a, b in zip(times[count, None], times[1, None], strict=True)]
    return [*columns, f"{statistics.median(ratios):.3f}x"]


def _blocks(groups: ParallelGroups, sp: bool, num_chunks: int) -> StageModule:
    recipe = Recipe.model_validate(
        {
            "name": "blocks",
            "model": {"llm": LLM},
            "data": {"sources": [{"path": "none.json"}], "tokenizer": "none.json", "seq_len": NUM_TOKENS},
            "train": {"steps": 1, "global_batch": 1, "optimizer": {"lr": 1e-3}},
        }
    )
    spec = StageSpec("llm", (1, 1 + NUM_BLOCKS), sequence_parallel=sp, tp_chunks=num_chunks)
    options = StageOptions(torch.float32, torch.device("cpu"), 0)
    return build_stage(recipe.model, build_model_shape(recipe), spec, groups, options)


def _pass_seconds(
    stage: StageModule, sp: bool, bytes_per_s: float | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of forward and backward, and those of the link in each."""
    hidden = torch.randn(NUM_TOKENS // (NUM_RANKS if sp else 1), LLM["hidden"], requires_grad=True)
    context = stage.context(TextInput((NUM_TOKENS,)), {})
    LINK.bytes_per_s = None
    dist.barrier()
    LINK.bytes_per_s = bytes_per_s
    LINK.seconds = 0.0
    start_s = time.perf_counter()
    out = stage.run(context, hidden, stage.indices)
    middle_s, forward_link_s = time.perf_counter(), LINK.seconds
    out.sum().backward()
    end_s = time.perf_counter()
    return (middle_s - start_s, end_s - middle_s), (forward_link_s, LINK.seconds - forward_link_s)


if __name__ == "__main__":
    main()
