"""What a run's folder holds, by name. Beside these: its state (`runstate`) and its metrics (`report.runlog`)."""

RECIPE = "recipe.yaml"  # resolved, so that the folder speaks for itself
PLAN = "plan.json"
CHECKPOINTS = "checkpoints"
QUARANTINE = "quarantine.jsonl"  # samples set aside, and why
TRACE = "trace.json"  # of the steps in `train.trace`
SKIPPED = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
