"""The card of an exported model (`README.md`): what it was trained from, on what, how, and how good it became."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmtrain.errors import MmtrainError
from mmtrain.families.hub_models import hub_name_of
from mmtrain.foreign_yaml import parse_yaml
from mmtrain.planning.artifact.plan_files import load_plan
from mmtrain.recipe import Recipe
from mmtrain.redaction import Redactor
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE
from mmtrain.version import __version__

CARD_FILE = "README.md"
_CARD_DATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_LICENSE_FILES = ("LICENSE*", "LICENCE*", "USAGE_POLICY*")
_LIBRARIES = {"model": "transformers", "adapter": "peft", "generator": "diffusers"}
_METRICS = ("loss", "val_loss", "val_drawing_loss", "val_exact")


def model_card(run: Path, recipe: Recipe, step: int, part: str) -> str:
    """Write the card of what a run is exported to.

    Local paths are shown by their last names alone, and credentials are masked: a card is made to be published.

    Args:
        run: folder of the run, for its plan and its metrics.
        recipe: of the run.
        step: after which the checkpoint was saved.
        part: what is exported: `model`, `adapter` or `generator`.
    """
    base = recipe.model.hf
    metrics = read_metrics(run)
    total = max(recipe.train.steps or 0, max((entry["step"] for entry in metrics), default=step))
    sections = [
        _head(base, part),
        f"# {recipe.name}\n\nTrained with mmtrain {__version__}: the weights after step {step:,} of {total:,}.",
        f"## Base model\n\n{_base_text(base)}",
        "## Data\n\n" + "\n".join(_data_lines(recipe)),
        f"## Results\n\n{_results(metrics, step)}",
        f"## Plan\n\n{_plan_text(run)}",
        f"## Recipe\n\n```yaml\n{yaml.safe_dump(_shown(recipe.model_dump(mode='json')), sort_keys=False)}```",
    ]
    return Redactor()("\n\n".join(sections) + "\n")


def _head(base: Path | None, part: str) -> str:
    """Return what the hub reads of a card."""
    data: dict[str, Any] = {"library_name": _LIBRARIES[part], "tags": ["mmtrain"]}
    name = None if base is None else hub_name_of(base)
    if name is not None:
        data["base_model"] = name
    license_name = None if base is None else _license_name(base)
    if license_name is not None:
        data["license"] = license_name
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _base_text(base: Path | None) -> str:
    if base is None:
        return "None: the weights started from random values."
    files = sorted(path.name for pattern in _LICENSE_FILES for path in base.glob(pattern))
    stated = _license_name(base)
    if stated is None and not files:
        terms = "Its folder states no licence: look for the terms of its publisher before you pass this model on"
    else:
        terms = f"Its licence: {' and '.join([*([stated] if stated else []), *files])}"
    return f"{hub_name_of(base) or base.name}. {terms}."


def _license_name(base: Path) -> str | None:
    """Return the licence that the card in a folder states; None if it has no card or states none."""
    try:
        match = _CARD_DATA.match((base / CARD_FILE).read_text(encoding="utf-8"))
        data = parse_yaml(match[1]) if match else None
    except (OSError, ValueError):
        return None
    stated = data.get("license") if isinstance(data, dict) else None
    return stated if isinstance(stated, str) else None


def _data_lines(recipe: Recipe) -> Iterator[str]:
    for source in recipe.data.sources:
        yield f"* {_shown(str(source.path))}"
    fraction = recipe.data.validation_fraction
    if fraction is not None:
        yield f"* held out: {fraction:g} of all samples"
    for source in recipe.data.validation:
        yield f"* held out: {_shown(str(source.path))}"


def _results(metrics: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return a table of the last values measured up to a step."""
    last: dict[str, tuple[float, int]] = {}
    for entry in metrics:
        if entry["step"] > step:
            continue
        values = {name: entry[name] for name in _METRICS if entry.get(name) is not None}
        values |= {name: value for name, value in entry.get("extra", {}).items() if name.startswith("val_")}
        last |= {name: (value, entry["step"]) for name, value in values.items()}
    if not last:
        return "The log of the run has no measurements up to this step."
    rows = [f"| {name} | {value:.4g} | {at_step:,} |" for name, (value, at_step) in last.items()]
    return "\n".join(["| metric | value | step |", "|---|---|---|", *rows])


def _plan_text(run: Path) -> str:
    try:
        plan = load_plan(run / PLAN_FILE)
    except MmtrainError:
        return "The folder of the run has no plan that can be read."
    meshes = ", ".join(f"{name} {unit.mesh_text}" for name, unit in plan.units.items())
    return f"{plan.placement}, {plan.world_size} ranks of {plan.hardware}: {meshes}."


def _shown(value: Any) -> Any:
    """Return settings with the last names of local paths in place of the paths."""
    if isinstance(value, dict):
        return {key: _shown(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_shown(child) for child in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
