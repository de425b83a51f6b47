"""Names of the files in a run's folder; `run_state` names its state, `report.runlog` its metrics."""

RECIPE_FILE = "recipe.yaml"  # with all defaults filled in
PLAN_FILE = "plan.json"
CHECKPOINTS_FOLDER = "checkpoints"
QUARANTINE_FILE = "quarantine.jsonl"  # samples set aside, and why
TRACE_FILE = "trace.json"  # of the steps that `train.trace_steps` names
SKIPPED_POSITIONS_FILE = "skipped_positions.json"  # of the data, that `--skip-steps` leaves out
ABANDONED_FOLDER = "abandoned"  # what came after the checkpoints that the run went back to
SKIPPED_STEPS_FILE = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
STANDBY_PLANS_FOLDER = "plans"  # for other numbers of ranks, with `--elastic`
