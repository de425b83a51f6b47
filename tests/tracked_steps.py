"""Read back which steps trackers hold: W&B's offline file, MLflow's file store, Trackio's database, TensorBoard."""

import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format, in which W&B writes
LOSS = "train/loss"


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline W&B file (LevelDB's log format behind a header of 7 bytes)."""
    from wandb.proto import wandb_internal_pb2

    content, position, parts = file.read_bytes(), HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + HEADER_BYTES])
        if not kind:
            return
        position += HEADER_BYTES
        parts += content[position : position + size]
        position += size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of all offline folders of a run, in the order of their names."""
    rows = []
    for file in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows.append({**row, "_step": record.history.step.num})
    return rows


def wandb_losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["_step"], row[LOSS]) for row in wandb_rows(run_dir) if LOSS in row]


def mlflow_run(run_dir: Path) -> tuple[Any, Any]:
    """Return a client and the only run of a file store."""
    import mlflow

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{run_dir}/mlruns")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = client.search_runs(experiments)
    return client, run


def mlflow_losses(run_dir: Path) -> list[tuple[int, float]]:
    client, run = mlflow_run(run_dir)
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, LOSS)]


def trackio_rows(run_dir: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Return run id, step and metrics of each row of a project's database; none before it has a table."""
    rows = []
    for path in sorted((run_dir / "trackio").glob("*.db")):
        with contextlib.closing(sqlite3.connect(path)) as database, contextlib.suppress(sqlite3.OperationalError):
            found = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
            rows += [(run_id, step, json.loads(values)) for run_id, step, values in found]
    return rows


def trackio_losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(step, values[LOSS]) for _, step, values in trackio_rows(run_dir) if LOSS in values]


def tensorboard_events(run_dir: Path) -> Any:
    """Return the events as TensorBoard's server reads them: what a later file makes void is gone, of every kind."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), tensor_size_guidance={"scalars": 0, "text": 0, "images": 0})
    return events.Reload()


def tensorboard_losses(run_dir: Path) -> list[tuple[int, float]]:
    events = tensorboard_events(run_dir)
    found = events.Tensors(LOSS) if LOSS in events.Tags()["tensors"] else []
    return [(event.step, event.tensor_proto.float_val[0]) for event in found]


LOSSES = {
    "tensorboard": tensorboard_losses,
    "wandb": wandb_losses,
    "mlflow": mlflow_losses,
    "trackio": trackio_losses,
}
