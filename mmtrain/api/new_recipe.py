"""Write a first recipe for a model and data: what `mmtrain init` asks for becomes commented settings that load."""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.api.recipe_index import index_recipe
from mmtrain.errors import DataError, UserError, writing
from mmtrain.families.hub_models import is_model_of_hub
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.settings.source_path import is_url

BATCH_SAMPLES = 64  # of a step: the recipes of published fine-tuning use 64 to 128
MIN_SEQ_LEN = 1024  # short conversations are packed, and shorter groups make small GEMMs
MAX_SEQ_LEN = 8192  # tokens of a group, unless the user says otherwise; longer samples are set aside
WARMUP_SHARE = 0.03  # of all steps, as in LLaVA-1.5 (arXiv 2310.03744, table 9)
NUM_CHECKPOINTS = 10


@dataclass(frozen=True)
class RecipeAnswers:
    """What the user says about a new recipe."""

    model: str  # a folder in Hugging Face's layout, or ORG/NAME of the hub
    data: str  # a path or a URL, as `data.sources.0.path` has it
    heldout: str | None = None  # samples that training does not see
    gpus: int | None = None  # None: those of the machine that runs
    hardware: str | None = None  # a preset; None: the machine that runs
    seq_len: int | None = None  # most tokens of a group; None: by the data
    name: str | None = None  # None: of the file


@dataclass(frozen=True)
class NewRecipe:
    """A recipe that was written, and what the data decided in it."""

    path: Path
    recipe: Recipe
    num_samples: int
    num_too_long: int  # samples that are set aside, since they exceed the size of a group
    num_left_out: int  # other samples that cannot be used


def write_new_recipe(answers: RecipeAnswers, path: Path) -> NewRecipe:
    """Write a recipe for fine-tuning; steps and the size of groups follow from the data, which is indexed for that.

    Raises:
        UserError: the file exists, or model, data or hardware cannot be used.
        TooManyBadSamples: more than one sample in a hundred cannot be used, or is longer than a group may be.
    """
    if path.exists():
        raise UserError(f"--out {path}: there already, and no recipe is overwritten; name another file")
    if answers.hardware is not None:
        from mmtrain.costs import preset

        preset(answers.hardware)
    seq_len = answers.seq_len or MAX_SEQ_LEN
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
        draft = Path(folder) / "draft.yaml"
        encoders = _encoders(answers, draft)
        draft.write_text(_recipe_text(answers, draft, encoders, seq_len, num_steps=1), encoding="utf-8")
        index = index_recipe(load_recipe(draft).recipe)
    if not len(index.lengths):
        raise DataError(f"{answers.data}: no sample can be used; `mmtrain data check` says why")
    if answers.seq_len is None:
        seq_len = _group_tokens(int(index.lengths.tokens.max()))
    num_steps = math.ceil(len(index.lengths) / BATCH_SAMPLES)
    with writing("--out", path, "recipe"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(_recipe_text(answers, path, encoders, seq_len, num_steps))
    too_long = sum(entry.kind == "too_long" for entry in index.quarantined)
    return NewRecipe(path, load_recipe(path).recipe, len(index.lengths), too_long, len(index.quarantined) - too_long)


def _encoders(answers: RecipeAnswers, draft: Path) -> list[str]:
    """Return the names of the model's encoders; raise RecipeError for a folder that training cannot start from."""
    draft.write_text(_recipe_text(answers, draft, (), MAX_SEQ_LEN, num_steps=1), encoding="utf-8")
    return [*load_recipe(draft).recipe.model.all_encoders]


def _group_tokens(longest_sample: int) -> int:
    """Return the power of two that holds the longest sample, within limits."""
    return min(max(1 << (longest_sample - 1).bit_length(), MIN_SEQ_LEN), MAX_SEQ_LEN)


def _recipe_text(answers: RecipeAnswers, path: Path, encoders: Sequence[str], seq_len: int, num_steps: int) -> str:
    name = answers.name or path.stem
    model = answers.model if is_model_of_hub(answers.model) else _from_folder_of(path, answers.model)
    shown = path.as_posix()
    lines = [
        f"# Fine-tuning {Path(answers.model).name} on {Path(answers.data).name}, written by `mmtrain init`.",
        "#",
        f"#     mmtrain plan {shown}",
        f"#     mmtrain train {shown}",
        f"#     mmtrain export runs/{name} --out exports/{name}",
        f"name: {_scalar(name)}",
        "",
        "model:",
        f"  hf: {_scalar(model)} # shapes, weights, tokenizer, chat template, preparation of media",
    ]
    for encoder in encoders:
        lines += [
            f"  {encoder}:",
            "    freeze: true # its projector trains; `false` for media unlike those it has seen",
        ]
    lines += [
        "",
        "data:",
        "  sources:",
        f"    - path: {_scalar(_from_folder_of(path, answers.data))} # more sources: add `- path:`, with `weight:`",
    ]
    if answers.heldout is not None:
        lines += [
            "  validation: # not trained on: `mmtrain evaluate` asks about it",
            f"    - path: {_scalar(_from_folder_of(path, answers.heldout))}",
        ]
    lines += [
        f"  seq_len: {seq_len} # most tokens of a packed sequence; longer samples are set aside",
        "",
        "train:",
        f"  steps: {num_steps} # once through the data",
        "  global_batch:",
        f"    samples: {BATCH_SAMPLES} # of a step, on average",
        "  optimizer:",
        "    lr: 1.0e-5 # low: the model has been trained before",
        f"    warmup_steps: {max(1, round(WARMUP_SHARE * num_steps))}",
        "    weight_decay: 0.0",
        "  checkpoint:",
        f"    every: {max(1, num_steps // NUM_CHECKPOINTS)} # steps",
    ]
    if answers.heldout is not None:
        lines.append(f"  validate_every: {max(1, num_steps // NUM_CHECKPOINTS)}")
    return "\n".join([*lines, *_cluster_lines(answers)]) + "\n"


def _cluster_lines(answers: RecipeAnswers) -> list[str]:
    stated: Mapping[str, object] = {"hardware": answers.hardware, "ranks": answers.gpus}
    meanings = {"hardware": "`auto` is the machine that plans", "ranks": "GPUs, one process each"}
    lines = [f"  {key}: {_scalar(value)} # {meanings[key]}" for key, value in stated.items() if value is not None]
    return ["", "cluster:", *lines] if lines else []


def _from_folder_of(recipe: Path, named: str) -> str:
    """Return a path as the recipe's file names it: relative to its folder, if both were relative."""
    if is_url(named):
        return named
    if recipe.is_absolute() or Path(named).is_absolute():
        return Path(named).absolute().as_posix()
    return Path(os.path.relpath(named, recipe.parent)).as_posix()


def _scalar(value: object) -> str:
    """Write a value in YAML; JSON is a part of it."""
    text = str(value)
    is_plain = isinstance(value, int) or (
        text.replace("/", "").replace(".", "").replace("-", "").replace("_", "").isalnum()
    )
    starts_plainly = text[:1].isalpha() or text[:1] in "./"
    return text if isinstance(value, int) or (is_plain and starts_plainly) else json.dumps(text, ensure_ascii=False)
