"""What the choice of a plan is sensitive to, as text."""

import math
from collections.abc import Iterator

from rich.table import Table

from mmtrain.plan.artifact.choice_sensitivity import PerturbedRanking, PerturbedStep, Sensitivity
from mmtrain.plan.artifact.plan import AS_FAST_RATIO
from mmtrain.report.plain_text import seconds_text

SENSITIVITY_LEGEND = (
    "Steps of the same plans with one constant of the costs changed: seconds of the chosen one, and of each rival how "
    "many times as long. ~ is scaled from the first sampled batch."
)


def fragile_sentences(sensitivity: Sensitivity) -> Iterator[str]:
    """Name each rival that a changed constant makes faster than the chosen plan, by more than 1%."""
    chosen, *rivals = sensitivity.plans
    for number, rival in enumerate(rivals, start=1):
        changes = [_where(ranking) for ranking in sensitivity.where_faster(number, AS_FAST_RATIO)]
        if changes:
            percent = max(1, math.ceil(100 * (rival.step_time_s / chosen.step_time_s - 1)))
            where = " or ".join(changes)
            yield f"Fragile: within {percent}% of `{rival.summary}`; it wins where {where}: measure both."


def sensitivity_table(sensitivity: Sensitivity) -> Table:
    """Write a row for each change of a constant, with the steps of all of them."""
    table = Table(title="Sensitivity of the choice", title_justify="left")
    table.add_column("costs")
    table.add_column("chosen plan", justify="right")
    chosen, *rivals = sensitivity.plans
    for rival in rivals:
        table.add_column(rival.summary, justify="right")
    ratios = (f"{rival.step_time_s / chosen.step_time_s:.3f}x" for rival in rivals)
    table.add_row("as stated", seconds_text(chosen.step_time_s), *ratios)
    for ranking in sensitivity.rankings:
        first, *others = ranking.steps
        cells = (f"{_mark(step)}{step.step_time_s / first.step_time_s:.3f}x" for step in others)
        table.add_row(str(ranking.perturbation), f"{_mark(first)}{seconds_text(first.step_time_s)}", *cells)
    return table


def _where(ranking: PerturbedRanking) -> str:
    return f"{ranking.constant} {'are' if ranking.constant.endswith('s') else 'is'} {ranking.ratio:g}x"


def _mark(step: PerturbedStep) -> str:
    return "~" if step.from_first_batch else ""
