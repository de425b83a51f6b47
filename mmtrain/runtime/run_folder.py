"""What a run's folder holds, by name. Beside these: its state (`runstate`) and its metrics (`report.runlog`)."""

RECIPE_FILE = "recipe.yaml"  # resolved, so that the folder speaks for itself
PLAN_FILE = "plan.json"
CHECKPOINTS_FOLDER = "checkpoints"
QUARANTINE_FILE = "quarantine.jsonl"  # samples set aside, and why
TRACE_FILE = "trace.json"  # of the steps in `train.trace`
SKIPPED_STEPS_FILE = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
