"""How near colocated plans come to the least step there is, on fixed tables of kernels (issue: the planner).

    python scripts/bench_colocated.py TABLE.json...

For each table and number of microbatches: T, the LLM's own step; the bound T + (encoder's forward of the first
microbatch - all-gather) + (encoder's backward of the last one - reduce-scatter), under the plan for which it is least;
steps of the baselines and of the coarse and the fine schedule; the share of the encoder's compute inside T; processor
seconds of the search, the LLM's timeline included. Every schedule is held to what could run.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from mmtrain.plan.colocated.bubble_schedule import (
    EncoderPlan,
    EncoderSchedule,
    LayerKernelSequences,
    LlmTimeline,
    search_encoder_plans,
    search_shares,
)
from mmtrain.plan.colocated.kernel_table import KernelTable, balanced_step_ms, megatron_step_ms, read_table

REPEATS = 3
HEADER = (
    "| table | microbatches | T ms | bound ms | megatron | balanced | coarse | fine | fine / bound | plan "
    "| efficiency coarse / fine | search s |"
)


def main() -> None:
    """Print one line for each table and number of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    print(HEADER)
    print("|" + "---|" * HEADER.count(" |"))
    for path in parser.parse_args().tables:
        table = read_table(path)
        for count in table.microbatches:
            print(line(path.stem, table, count), flush=True)


def line(name: str, table: KernelTable, count: int) -> str:
    """One row of the table."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.process_time()
        host = table.host(count)
        fine = search_encoder_plans(host, table.encoder_plans())
        seconds.append(time.process_time() - begun)
    coarse = search_shares(host, fine.plan, whole_layers=True)
    for found in (coarse, fine):
        hold_to_host(found)
    least = least_step(host, table.encoder_plans())
    figures = [host.step_time, least, megatron_step_ms(table, count), balanced_step_ms(table, count)]
    cells = [name, str(count), *(f"{ms:,.1f}" for ms in (*figures, coarse.step_time, fine.step_time))]
    cells += [f"{fine.step_time / least:.5f}", f"tp{fine.plan.tp} pp{fine.plan.pp}"]
    cells += [f"{coarse.efficiency:.1%} / {fine.efficiency:.1%}", f"{min(seconds):.2f}"]
    return "| " + " | ".join(cells) + " |"


def least_step(host: LlmTimeline, plans: list[EncoderPlan]) -> float:
    """The issue's bound, of the plan for which it is least."""

    def around(stages: tuple[LayerKernelSequences, ...], hidden: float) -> float:
        return sum(kernels.latency for layers in stages for kernels in layers) - hidden

    return host.step_time + min(around(p.forward, host.gather) + around(p.backward, host.scatter) for p in plans)


def hold_to_host(found: EncoderSchedule) -> None:
    """Fail unless kernels lie in free time, one at a time, and no microbatch is late or early."""
    for (pipeline, stage), forward in found.forward.items():
        backward = found.backward[pipeline, stage]
        free = found.host.free_times[found.plan.place(pipeline, stage)]
        for computes, intervals in ((True, free.compute), (False, free.link)):
            spans = np.concatenate([p.spans[p.computes == computes] for p in (forward, backward)])
            spans = spans[np.argsort(spans[:, 0])]
            within = intervals[np.searchsorted(intervals[:, 0], spans[:, 0] + 1e-6) - 1]
            assert np.all(spans[1:, 0] >= spans[:-1, 1] - 1e-6), "one kernel at a time"
            assert np.all((spans >= within[:, :1] - 1e-6) & (spans <= within[:, 1:] + 1e-6)), "in free time alone"
        way = found.host.transfer if found.plan.place(pipeline, found.plan.pp - 1) else 0.0
        for mb in np.unique(forward.chains):
            end, begin = forward.spans[forward.chains == mb, 1].max(), backward.spans[backward.chains == mb, 0].min()
            assert stage < found.plan.pp - 1 or end + way <= found.host.first_forwards[mb] + 1e-6, "EF <= F"
            assert begin >= found.host.last_backwards[mb] + way - 1e-6, "EB >= B"
    assert np.all(np.diff(found.forward_ends) >= 0), "the i-th to end is LLM microbatch i"


if __name__ == "__main__":
    main()
