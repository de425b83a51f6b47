"""Write weights and optimizer of a run as a folder of torch.distributed.checkpoint (DCP), under Hugging Face names.

model.NAME                          a tensor of the Hugging Face folder; master weights, where it trains
optimizer.state.NAME.exp_avg        its first moment; `exp_avg_sq` the second, and so on
optimizer.state.NAME.step           the number of updates, in fp32 as torch's optimizers count

These are the names of `torch.distributed.checkpoint.state_dict` for a model of transformers, with `model` and
`optimizer` as the outer keys.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.checkpoint import Checkpoint
from mmtrain.checkpoint.tensorfile import TensorEntry
from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.weights.dcp_folder import DcpEntry, write_dcp
from mmtrain.weights.export_weights import describe_content
from mmtrain.weights.write_tensors import ExportedFolder, TensorTarget, WeightReader, draft_folder, require_new

if TYPE_CHECKING:
    import torch

MODEL_KEY = "model"
OPTIMIZER_KEYS = ("optimizer", "state")
STEP_KEY = "step"
STATE_MARK = "#"  # between the name of a parameter and that of its optimizer state, in checkpoints
_SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def export_dcp(recipe: Recipe, checkpoint: Checkpoint, out: Path) -> ExportedFolder:
    """Write weights and optimizer state of a checkpoint, in whatever sharding, to a new folder that DCP reads.

    Every tensor has the type in which the checkpoint holds it, so no bit is lost. One parameter is in memory at a time.
    The folder appears by rename when it is complete.

    Raises UserError for a run with adapters or a generator, for one that no family can hold, and for an `out` that
    exists or cannot be written; ModelFolderError; CheckpointError.
    """
    _require_plain(recipe)
    content = describe_content(recipe)
    require_new(out)
    weights = WeightReader(content.stored, checkpoint, {})
    entries = [_weight_entry(target, weights, checkpoint) for target in content.targets]
    entries += _optimizer_entries(content.targets, checkpoint)
    try:
        with draft_folder(out, "checkpoint") as draft:
            write_dcp(draft, entries)
    finally:
        if content.stored is not None:
            content.stored.close()
    num_bytes = sum(entry.tensor.num_bytes for entry in entries)
    dtypes = tuple(sorted({entry.tensor.dtype for entry in entries}))
    return ExportedFolder(out, checkpoint.step, len(entries), num_bytes, dtypes)


def _require_plain(recipe: Recipe) -> None:
    if recipe.train.lora is not None:
        raise UserError(
            "--format dcp: this run trains adapters (train.lora), whose optimizer state belongs to no tensor of the "
            "model; leave --format out to export the model with the adapters merged, or add --adapter"
        )
    if recipe.model.generator is not None:
        raise UserError(
            "--format dcp: this run has an image generator (model.generator), which is not written in this format; "
            "leave --format out to export the model, or add --generator for the generator"
        )


def _weight_entry(target: TensorTarget, reader: WeightReader, checkpoint: Checkpoint) -> DcpEntry:
    """Describe a tensor of the model, in the widest type of the parameters that it is made of."""
    stored = [checkpoint.manifest.tensors[source.name].dtype for source in target.sources]
    dtype = max(stored, key=_SIGNIFICANT_BITS.__getitem__, default=target.entry.dtype)
    return _entry((MODEL_KEY, target.entry.name), dtype, target, reader)


def _optimizer_entries(targets: Sequence[TensorTarget], checkpoint: Checkpoint) -> Iterator[DcpEntry]:
    """Describe what the optimizer holds of each tensor that trains, in whole or in part."""
    step = float(checkpoint.state.get("num_updates", 0))
    kinds = _kinds_of_state(checkpoint)
    readers = {kind: WeightReader(None, checkpoint, {}, f"{STATE_MARK}{kind}") for kind in kinds}
    for target in targets:
        names = [source.name for source in target.sources]
        held = {
            kind: stored
            for kind in kinds
            if (stored := [checkpoint.manifest.tensors.get(f"{name}{STATE_MARK}{kind}") for name in names])
            and any(part is not None for part in stored)
        }
        for kind, stored in held.items():
            dtype = next(part.dtype for part in stored if part is not None)
            yield _entry((*OPTIMIZER_KEYS, target.entry.name, kind), dtype, target, readers[kind])
        if held:
            yield _step_entry(target.entry.name, step)


def _kinds_of_state(checkpoint: Checkpoint) -> list[str]:
    """Return what the optimizer holds of parameters, such as `exp_avg`.

    Raises UserError for what has another shape than its parameter.
    """
    kinds: dict[str, None] = {}
    for name, stored in checkpoint.manifest.tensors.items():
        parameter, mark, kind = name.partition(STATE_MARK)
        if mark:
            kinds[kind] = None
            if stored.shape != checkpoint.manifest.tensors[parameter].shape:
                raise UserError(
                    f"--format dcp: the optimizer's {kind} of {parameter} has the shape {list(stored.shape)}, which is "
                    "not that of the parameter, and cannot be written by tensors of the model"
                )
    return sorted(kinds)


def _entry(keys: tuple[str, ...], dtype: str, target: TensorTarget, reader: WeightReader) -> DcpEntry:
    def read() -> "torch.Tensor":
        return reader.read(target)

    return DcpEntry(TensorEntry(".".join(keys), dtype, target.entry.shape), keys, read)


def _step_entry(name: str, step: float) -> DcpEntry:
    def read() -> "torch.Tensor":
        import torch

        return torch.tensor(step)

    keys = (*OPTIMIZER_KEYS, name, STEP_KEY)
    return DcpEntry(TensorEntry(".".join(keys), "float32", ()), keys, read)
