"""Measure how near colocated plans come to the shortest possible step, on fixed tables of kernels.

    python -m scripts.bench_colocated TABLE.json...

For each table and number of microbatches: T, the step of the LLM alone; the bound T + (encoder's forward of the first
microbatch - all-gather) + (encoder's backward of the last one - reduce-scatter), under the plan for which it is least;
steps of the baselines and of the coarse and the fine schedule; the share of the encoder's compute inside T; processor
seconds of the search, the LLM's timeline included. Every schedule is checked apart from the scheduler.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from mmtrain.planning.colocated.bubble_schedule import EncoderPlan, EncoderSchedule, LlmTimeline, StageKernelLists
from scripts.kernel_tables.encoder_search import compute_share_inside_llm, search_encoder_plans, search_shares
from scripts.kernel_tables.kernel_table import KernelTable, balanced_step_ms, megatron_step_ms, read_table

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
            print(table_row(path.stem, table, count), flush=True)


def table_row(name: str, table: KernelTable, count: int) -> str:
    """Return the row of one number of microbatches."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        llm = table.llm_timeline(count)
        fine = search_encoder_plans(llm, table.encoder_plans())
        seconds.append(time.process_time() - start)
    coarse = search_shares(llm, fine.plan, whole_layers=True)
    for schedule in (coarse, fine):
        check(schedule)
    bound = step_bound(llm, table.encoder_plans())
    steps = [llm.step_time, bound, megatron_step_ms(table, count), balanced_step_ms(table, count)]
    cells = [name, str(count), *(f"{ms:,.1f}" for ms in (*steps, coarse.step_time, fine.step_time))]
    cells += [f"{fine.step_time / bound:.5f}", f"tp{fine.plan.tp} pp{fine.plan.pp}"]
    cells += [f"{compute_share_inside_llm(coarse):.1%} / {compute_share_inside_llm(fine):.1%}", f"{min(seconds):.2f}"]
    return "| " + " | ".join(cells) + " |"


def step_bound(llm: LlmTimeline, plans: list[EncoderPlan]) -> float:
    """Return the bound above, of the plan for which it is least."""

    def outside_llm(stages: StageKernelLists, hidden: float) -> float:
        return sum(kernels.latency for layers in stages for kernels in layers) - hidden

    return llm.step_time + min(
        outside_llm(plan.forward, llm.gather) + outside_llm(plan.backward, llm.scatter) for plan in plans
    )


def check(schedule: EncoderSchedule) -> None:
    """Fail unless kernels lie in free time, one at a time, and every microbatch keeps its deadline and release."""
    llm, plan = schedule.llm, schedule.plan
    for (pipeline, stage), forward in schedule.forward.items():
        backward = schedule.backward[pipeline, stage]
        free_time = llm.free_times[plan.llm_pipeline_rank(pipeline, stage)]
        for computes, free in ((True, free_time.compute), (False, free_time.link)):
            spans = np.concatenate([p.spans[p.computes == computes] for p in (forward, backward)])
            spans = spans[np.argsort(spans[:, 0])]
            within = free[np.searchsorted(free[:, 0], spans[:, 0] + 1e-6) - 1]
            assert np.all(spans[1:, 0] >= spans[:-1, 1] - 1e-6), "one kernel at a time"
            assert np.all((spans >= within[:, :1] - 1e-6) & (spans <= within[:, 1:] + 1e-6)), "in free time alone"
        to_llm = llm.transfer if plan.llm_pipeline_rank(pipeline, plan.pp - 1) else 0.0
        for mb in np.unique(forward.labels):
            end = forward.spans[forward.labels == mb, 1].max()
            start = backward.spans[backward.labels == mb, 0].min()
            assert stage < plan.pp - 1 or end + to_llm <= llm.first_forwards[mb] + 1e-6, "EF <= F"
            assert start >= llm.last_backwards[mb] + to_llm - 1e-6, "EB >= B"
    assert np.all(np.diff(schedule.forward_ends) >= 0), "the i-th to end is LLM microbatch i"


if __name__ == "__main__":
    main()
