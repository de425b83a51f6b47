"""The last line of a training log: how fast the run was, what it kept of text-only efficiency, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.logged_totals import measured_phases
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.plain_text import seconds_text
from mmtrain.report.report_contents import steady_medians
from mmtrain.report.run_cost import RunCost


def run_summary(plan: Plan, cluster: ClusterSettings, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Summarize the logged steps of a run; empty if there are none.

    Throughput is that of the median step. The cost is that of all steps in the log, without starts and restarts.
    """
    medians = steady_medians(metrics)
    if "tokens_per_s" not in medians:
        return ""
    predicted, tokens_per_s = plan.predicted, medians["tokens_per_s"]
    parts = [f"median step {seconds_text(medians['step_time_s'])}", f"{compact_number(tokens_per_s)} LLM tokens/s"]
    if predicted.text_only_tokens_per_s_per_gpu is not None and predicted.text_only_share is not None:
        share = tokens_per_s / (predicted.text_only_tokens_per_s_per_gpu * plan.world_size)
        parts.append(
            f"{share:.0%} of what the LLM alone is predicted to reach on text ({predicted.text_only_share:.0%} planned)"
        )
    sentences = [", ".join(parts), RunCost.of_logged(cluster, metrics, plan.world_size).to_text()]
    phases = measured_phases(metrics)
    if phases is not None:
        sentences.append(phases.to_text())
    return "; ".join(sentences)
