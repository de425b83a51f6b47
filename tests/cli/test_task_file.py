"""`mmtrain data task-file`: a task as lmms-eval loads it, whose functions score as `mmtrain evaluate` does."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.runtime.evaluation.text_metrics import METRICS, TextMetric, regex

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/runtime/golden_metrics.json").read_text(encoding="utf-8"))
NAMES = ("exact", "contains", "anls", "f1", "wer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("task")
    generate_demo(here / "data", seed=2, train=30, heldout=8)
    return here


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [f"data.sources.0.path={folder}/data/train.json", f"data.tokenizer={folder}/data/tokenizer.json"]
    paths.append(f"data.validation.0.path={folder}/data/heldout.json")
    line = [sys.executable, "-m", "mmtrain", "data", "task-file", str(ROOT / "recipes/demo.yaml"), *arguments]
    line += [word for path in paths for word in ("--set", path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def load_task(path: Path) -> dict[str, Any]:
    """Load a task's YAML by the rule of lmms-eval's guide: `!function FILE.NAME` is a function of a file beside it."""

    class Loader(yaml.SafeLoader):
        pass

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Callable[..., Any]:
        module, _, name = loader.construct_scalar(node).rpartition(".")
        spec = importlib.util.spec_from_file_location(module, path.parent / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        found: Callable[..., Any] = getattr(loaded, name)
        return found

    Loader.add_constructor("!function", function)
    task: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    return task


def test_a_task_loads_asks_and_scores_as_evaluate_does(folder: Path) -> None:
    options = [word for name in (*NAMES, f"regex={GOLDEN['pattern']}") for word in ("--metric", name)]
    done = run(folder, "--out", "task", *options)
    assert done.returncode == 0, done.stderr
    assert "the task demo with 8 questions" in done.stdout
    task = load_task(folder / "task" / "demo.yaml")
    assert (task["task"], task["output_type"], task["test_split"]) == ("demo", "generate_until", "test")
    lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8").splitlines()
    docs = [json.loads(line) for line in lines]
    heldout = json.loads((folder / "data" / "heldout.json").read_text(encoding="utf-8"))
    assert [task["doc_to_target"](doc) for doc in docs] == [entry["conversations"][-1]["value"] for entry in heldout]
    for doc, entry in zip(docs, heldout, strict=True):
        [message] = task["doc_to_messages"](doc)
        marks = entry["conversations"][0]["value"].count("<image>")
        assert [part["type"] for part in message["content"]].count("image") == marks
        assert len(task["doc_to_visual"](doc)) == marks
        assert task["doc_to_text"](doc) == entry["conversations"][0]["value"].replace("<image>", "").strip()

    metrics = {metric["metric"]: metric for metric in task["metric_list"]}
    assert {name for name, metric in metrics.items() if not metric["higher_is_better"]} == {"wer"}
    rows = [row | {"answered": row["answered"].strip()} for row in GOLDEN["rows"]]
    results = [task["process_results"]({"answer": row["expected"]}, [row["answered"]]) for row in rows]
    ours = {name: TextMetric(name, METRICS[name]) for name in NAMES}
    ours["regex"] = TextMetric("regex", regex(GOLDEN["pattern"]))
    assert len(rows) == 50
    for name, metric in ours.items():
        pairs = [(row["expected"], row["answered"]) for row in rows]
        assert [result[name][0] / max(1, result[name][1]) for result in results] == [metric.score([p]) for p in pairs]
        assert metrics[name]["aggregation"]([result[name] for result in results]) == metric.score(pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "data"), "--out data: exists already; name a folder that does not"),
        (
            ("--out", "t2", "--metric", "pack:score"),
            "--metric: found 'pack:score', a plug-in, which a task cannot hold",
        ),
        (("--out", "t3", "--metric", "regex=("), "--metric: found 'regex=(', whose pattern cannot be read"),
    ],
)
def test_what_no_task_can_be_is_refused(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
