"""What people see of plans and runs: progress while training, the log on disk, tables afterwards."""

from mmtrain.report.evaluation_result import AnsweredQuestion, EvaluationResult, TemplateScore
from mmtrain.report.metrics_record import StepMetrics, TimeSplit
from mmtrain.report.plan_view import plan_table
from mmtrain.report.progress import TrainingProgress, open_progress
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
