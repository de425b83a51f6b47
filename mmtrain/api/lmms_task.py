"""Write held-out samples as a task of lmms-eval 0.7: its YAML, its functions and its data, in one folder."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mmtrain.data.text.greedy_settings import DEFAULT_ANSWER_TOKENS
from mmtrain.errors import UserError, writing
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.metric_names import (
    LOWER_IS_BETTER,
    METRICS_ALLOWED,
    REGEX_PREFIX,
    TEXT_METRICS,
    check_metric_name,
    shown_metric_name,
)

if TYPE_CHECKING:
    from mmtrain.data import Sample, Turn
    from mmtrain.data.media.media_bytes import Media

DATA_FILE, FUNCTIONS_FILE, MEDIA_FOLDER = "test.jsonl", "utils.py", "media"
_FUNCTIONS = '''

# What lmms-eval calls.
SCORED = {scored}


def messages_of(doc):
    import json

    return json.loads(doc["messages"])


def load_medium(part):
    if part["type"] == "image":
        from PIL import Image

        return Image.open(part["path"]).convert("RGB")
    if part["type"] == "audio":
        import soundfile

        samples, rate = soundfile.read(part["path"])
        return {{"array": samples, "sampling_rate": rate}}
    return part["path"]


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    messages = []
    for message in messages_of(doc):
        content = [
            part if part["type"] == "text" else {{"type": part["type"], "url": load_medium(part)}}
            for part in message["content"]
        ]
        messages.append({{"role": message["role"], "content": content}})
    return messages


def doc_to_visual(doc):
    parts = [part for message in messages_of(doc) for part in message["content"]]
    return [load_medium(part) for part in parts if part["type"] != "text"]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return "".join(part["text"] for part in messages_of(doc)[-1]["content"] if part["type"] == "text").strip()


def doc_to_target(doc):
    return doc["answer"]


def process_results(doc, results):
    answered = results[0].strip()
    return {{name: list(compare(doc["answer"], answered)) for name, compare in SCORED.items()}}


def aggregate(points):
    """Return the points reached by the parts there are, summed over all answers."""
    return sum(reached for reached, _ in points) / max(1, sum(parts for _, parts in points))
'''


def write_lmms_task(recipe: Recipe, out: Path, metrics: Sequence[str]) -> tuple[str, int]:
    """Write a task that asks what `mmtrain evaluate` asks; return its name and the number of its questions.

    Conversations in which the model draws are left out.

    The functions need no mmtrain: they are those that score here. Media in files are named where they lie, others are
    written beside the task.

    Args:
        recipe: with held-out samples.
        out: folder to write, which must not exist.
        metrics: names of metrics of texts, beside `exact`.

    Raises:
        UserError: `out` exists or cannot be written, a metric is none of texts, or there is nothing to ask.
    """
    from mmtrain.data import build_index

    names = list(dict.fromkeys(["exact", *metrics]))
    for name in names:
        _require_text_metric(name)
    if out.exists():
        raise UserError(f"--out {out}: exists already; name a folder that does not")
    if not recipe.data.held_out_sources:
        raise UserError("data.validation: no held-out data to ask about; add a source, or set data.validation_fraction")
    samples = build_index(recipe, "validation").samples
    asking = [sample for sample in samples if sample.cut is None and sample.last_answer and not sample.target_images]
    if not asking:
        raise UserError("data.validation: no held-out sample asks a question that a text answers")
    task = re.sub(r"\W+", "_", recipe.name).strip("_").lower() or "heldout"
    with writing("--out", out, "task"):
        out.mkdir(parents=True)
        rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(asking, out))
        (out / DATA_FILE).write_text("".join(rows), encoding="utf-8")
        (out / FUNCTIONS_FILE).write_text(_functions_text(names), encoding="utf-8")
        (out / f"{task}.yaml").write_text(_task_text(task, out, names), encoding="utf-8")
    return task, len(asking)


def _require_text_metric(name: str) -> None:
    try:
        check_metric_name(name)
    except ValueError as error:
        raise UserError(f"--metric: {error}") from None
    if name not in TEXT_METRICS and not name.startswith(REGEX_PREFIX):
        raise UserError(f"--metric: found {name!r}, a plug-in, which a task cannot hold; allowed: {METRICS_ALLOWED}")


def _rows(samples: "Iterable[Sample]", out: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample; its messages are one text, since rows of a data set have columns of one type."""
    from mmtrain.data.formats.sample import written_text

    for number, sample in enumerate(samples):
        media = _MediaPaths(sample, out / MEDIA_FOLDER, number)
        messages = [
            {"role": "user" if turn.role == "tool" else turn.role, "content": media.parts(turn)}
            for turn in sample.turns[: sample.last_answer]
        ]
        answer = written_text(sample.answer).strip()
        yield {"id": sample.id, "messages": json.dumps(messages, ensure_ascii=False), "answer": answer}


class _MediaPaths:
    """Gives the media of one sample paths, in the order of their marks."""

    def __init__(self, sample: "Sample", folder: Path, number: int) -> None:
        self._media = {kind: iter(media) for kind, media in sample.media.items()}
        self._marks = re.compile("|".join(f"<{kind}>" for kind, media in sample.media.items() if media) or r"(?!)")
        self._folder, self._number = folder, number
        self._num_written = 0

    def parts(self, turn: "Turn") -> list[dict[str, str]]:
        """Return the texts and media of a turn in order."""
        from mmtrain.data.formats.sample import MEDIA_ROLES, written_text

        if turn.role not in MEDIA_ROLES:
            return [{"type": "text", "text": written_text(turn.text)}]
        parts: list[dict[str, str]] = []
        start = 0
        for mark in self._marks.finditer(turn.text):
            kind = mark.group()[1:-1]
            parts.append({"type": "text", "text": written_text(turn.text[start : mark.start()])})
            parts.append({"type": kind, "path": self._path(next(self._media[kind]))})  # type: ignore[index]
            start = mark.end()
        parts.append({"type": "text", "text": written_text(turn.text[start:])})
        return [part for part in parts if part.get("text") != ""]

    def _path(self, medium: "Media") -> str:
        """Return where a medium lies, which is written to a file of its own if it is inside another file."""
        from mmtrain.data.media.media_bytes import FileMedia

        if isinstance(medium, FileMedia) and "://" not in str(medium):
            return str(Path(str(medium)).absolute())
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._number}-{self._num_written}{Path(medium.name).suffix}"
        self._num_written += 1
        with medium.open() as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        return str(path.absolute())


def _functions_text(names: Sequence[str]) -> str:
    """Return the functions of the task: those that score here, and what calls them."""
    source = files("mmtrain.runtime.evaluation").joinpath("text_metrics.py").read_text(encoding="utf-8")
    compared = [
        f'"regex": regex({name.removeprefix(REGEX_PREFIX)!r})' if name.startswith(REGEX_PREFIX) else f'"{name}": {name}'
        for name in names
    ]
    return source + _FUNCTIONS.format(scored="{" + ", ".join(compared) + "}")


class _Function(str):
    """A function of the task's file, which YAML of lmms-eval names by a tag."""


class _Dumper(yaml.SafeDumper):
    """Writes functions with their tag."""


_Dumper.add_representer(_Function, lambda dumper, name: dumper.represent_scalar("!function", f"utils.{name}"))


def _task_text(task: str, out: Path, names: Sequence[str]) -> str:
    metrics = [
        {
            "metric": shown_metric_name(name),
            "aggregation": _Function("aggregate"),
            "higher_is_better": name not in LOWER_IS_BETTER,
        }
        for name in names
    ]
    called = ("doc_to_messages", "doc_to_visual", "doc_to_text", "doc_to_target", "process_results")
    settings = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((out / DATA_FILE).absolute())}},
        "test_split": "test",
        "output_type": "generate_until",
        **{name: _Function(name) for name in called},
        "generation_kwargs": {"max_new_tokens": DEFAULT_ANSWER_TOKENS, "temperature": 0, "do_sample": False},
        "metric_list": metrics,
        "metadata": [{"version": 0.0}],
    }
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
