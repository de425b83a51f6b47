"""Measure how near colocated plans come to the shortest possible step, on fixed tables of kernels.

    python -m scripts.bench_colocated TABLE.json...

For each table and number of microbatches: T, the step of the LLM alone; the bound T + (encoder's forward of the first
microbatch - all-gather) + (encoder's backward of the last one - reduce-scatter), under the plan for which it is least;
steps of the baselines and of the coarse and the fine schedule; the share of the encoder's compute inside T; processor
seconds of the search, the LLM's timeline included. Every schedule is checked apart from the scheduler.
"""

from pathlib import Path

import numpy as np

from mmtrain.planning.colocated.bubble_schedule import EncoderPlan, EncoderSchedule, LlmTimeline, StageKernelLists
from scripts.kernel_tables.encoder_search import compute_share_inside_llm, search_encoder_plans, search_shares
from scripts.kernel_tables.kernel_table import KernelTable, balanced_step_ms, megatron_step_ms, read_table
from scripts.measurements import arguments, least_seconds, start

COLUMNS = (
    "table", "microbatches", "T ms", "bound ms", "megatron", "balanced", "coarse", "fine", "fine / bound", "plan",
    "efficiency coarse / fine", "search s",
)  # fmt: skip


def main() -> None:
    """Print one line for each table and number of microbatches."""
    parser = arguments(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    options = parser.parse_args()
    report = start("Encoders in the LLM's bubbles, on fixed tables", options)
    report.table(*COLUMNS)
    for path in options.tables:
        table = read_table(path)
        for count in table.microbatches:
            report.row(path.stem, *cells(table, count))


def cells(table: KernelTable, count: int) -> list[str]:
    """Return the cells of one number of microbatches."""
    seconds, (llm, fine) = least_seconds(lambda: _search(table, count))
    coarse = search_shares(llm, fine.plan, whole_layers=True)
    for schedule in (coarse, fine):
        check(schedule)
    bound = step_bound(llm, table.encoder_plans())
    steps = [llm.step_time, bound, megatron_step_ms(table, count), balanced_step_ms(table, count)]
    figures = [str(count), *(f"{ms:,.1f}" for ms in (*steps, coarse.step_time, fine.step_time))]
    figures += [f"{fine.step_time / bound:.5f}", f"tp{fine.plan.tp} pp{fine.plan.pp}"]
    return [
        *figures,
        f"{compute_share_inside_llm(coarse):.1%} / {compute_share_inside_llm(fine):.1%}",
        f"{seconds:.2f}",
    ]


def _search(table: KernelTable, count: int) -> tuple[LlmTimeline, EncoderSchedule]:
    llm = table.llm_timeline(count)
    return llm, search_encoder_plans(llm, table.encoder_plans())


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
