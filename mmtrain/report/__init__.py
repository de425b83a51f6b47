"""Views of plans and runs for people: progress while training, the log on disk, tables, pages and figures.

Read `plan_view` for the table of a plan, `progress` and `runlog` for a training run, and `report_contents` for what
`mmtrain report` shows as text (`terminal`), as a page (`html`) and as figures for papers (`figure_files`).
"""

from mmtrain.report.evaluation_result import AnsweredQuestion, EvaluationResult, TemplateScore
from mmtrain.report.live_display import TrainingProgress, open_progress
from mmtrain.report.metrics_record import StepMetrics, TimeSplit
from mmtrain.report.plan_view import plan_table
from mmtrain.report.runlog import RunLog, read_metrics

__all__ = [
    "AnsweredQuestion",
    "EvaluationResult",
    "RunLog",
    "StepMetrics",
    "TemplateScore",
    "TimeSplit",
    "TrainingProgress",
    "open_progress",
    "plan_table",
    "read_metrics",
]
