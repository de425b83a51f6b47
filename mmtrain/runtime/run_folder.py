"""Names of the files in a run's folder; `run_state` names its state, `report.runlog` its metrics."""

RECIPE_FILE = "recipe.yaml"  # with all defaults filled in
PLAN_FILE = "plan.json"
CHECKPOINTS_FOLDER = "checkpoints"
QUARANTINE_FILE = "quarantine.jsonl"  # samples set aside, and why
TRACE_FILE = "trace.json"  # of the steps that `train.trace_steps` names
SKIPPED_STEPS_FILE = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
