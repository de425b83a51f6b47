"""The example package of plug-ins, installed and run; and what a plug-in that fails says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined
from mmtrain.errors import PluginError, RecipeError, UserError
from mmtrain.families.model_folder import find_family
from mmtrain.plugins import find_plugin
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.report import read_metrics
from mmtrain.runtime.training.hooks.plugin_hooks import HookRun, PluginHook
from mmtrain.runtime.training.step_hook import StepContext
from tests.flow.runs import RECIPE, SMALL, launch, request_for
from tests.report.conftest import metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins"
BROKEN = """
class Hook:
    def __init__(self, run):
        self.run = run
    def after_step(self, step):
        return 1 / (3 - step.step)

def greedy(run):
    return Greedy()

class Greedy:
    def before_step(self, step):
        step.lr = 1.0

def read(file, path):
    yield {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    raise KeyError("column")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example without its dependencies, as `pip install examples/plugins` does with them."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "plugins"
    source.mkdir()
    for name in ("pyproject.toml", "mmtrain_example.py", "README.md"):
        (source / name).write_bytes((EXAMPLE / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture
def on_path(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process find the example, and a module `broken_plugin` whose plug-ins fail."""
    (tmp_path / "broken_plugin.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    find_plugin.cache_clear()
    for name in ("broken_plugin", "mmtrain_example"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_run_with_every_plugin_of_the_example(data: Path, installed: Path, tmp_path: Path) -> None:
    entries = json.loads((data / "train.json").read_text())
    lines = []
    for entry in entries:
        if len(entry.get("image", [])) != 1:
            continue
        question, answer = (turn["value"] for turn in entry["conversations"][:2])
        lines.append(f"{entry['image'][0]}\t{question.replace('<image>', '').strip()}\t{answer}\n")
    (data / "train.tsv").write_text("".join(lines))
    run_dir = tmp_path / "run"
    settings = [
        *SMALL,
        f"data.sources.0.path={data}/train.tsv",
        "data.sources.0.format=tsv",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
        "train.loggers=[csv]",
        "train.hooks=[loss_ratio]",
        "train.metrics=[first_letter, 'mmtrain_example:first_letter', anls, exact]",
        "train.evaluate_every=3",
        "train.evaluate_questions=4",
        "train.optimizer.schedule=constant",
        "cluster.ranks=1",
        "parallel.placement=unified",
    ]
    command = [sys.executable, "-m", "mmtrain", "train", str(RECIPE), "--run-dir", str(run_dir)]
    for setting in settings:
        command += ["--set", setting]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    steps = read_metrics(run_dir)
    assert [step["extra"]["loss_ratio"] for step in steps] == [step["loss"] / steps[0]["loss"] for step in steps]
    assert ["val_first_letter" in step["extra"] for step in steps] == [False, False, True] * 2
    assert ["val_anls" in step["extra"] for step in steps] == [False, False, True] * 2
    assert not any("val_exact" in step["extra"] for step in steps), "it is a figure of its own"
    rows = [line.split(",") for line in (run_dir / "steps.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in rows] == [(step["step"], step["loss"]) for step in steps]
    assert (run_dir / "steps.end").read_text() == "done"
    assert not (run_dir / "tensorboard").exists()


def context(step: int) -> StepContext:
    ctx = StepContext(step - 1, 6, lr=0.5)
    ctx.metrics = metrics(step)
    return ctx


def hook_run(tmp_path: Path) -> HookRun:
    return HookRun(tmp_path, 0, 1, 6, {})


def test_a_hook_may_return_a_learning_rate_and_numbers(on_path: Path) -> None:
    hook = PluginHook(find_plugin("hooks", "loss_ratio", "train.hooks"), hook_run(on_path))
    rates = []
    for step in (1, 2, 3):
        ctx = context(step)
        hook.before_step(ctx)
        hook.after_step(ctx)
        rates.append(ctx.lr)
    assert rates == [0.5, 0.25, 0.5]
    assert ctx.metrics.extra == {"loss_ratio": metrics(3).loss / metrics(1).loss}
    hook.close()


def test_a_hook_that_fails_is_named(on_path: Path) -> None:
    hook = PluginHook(find_plugin("hooks", "broken_plugin:Hook", "train.hooks"), hook_run(on_path))
    with pytest.raises(PluginError, match=r"plug-in broken_plugin:Hook .*after_step of step 3: ZeroDivisionError"):
        hook.after_step(context(3))
    with pytest.raises(PluginError, match=r"after_step of step 1: returned 0.5; allowed: finite numbers by name"):
        hook.after_step(context(1))


def test_a_hook_cannot_change_a_step(on_path: Path) -> None:
    hook = PluginHook(find_plugin("hooks", "broken_plugin:greedy", "train.hooks"), hook_run(on_path))
    with pytest.raises(PluginError, match="before_step of step 1: FrozenInstanceError"):
        hook.before_step(context(1))


def test_a_format_yields_samples_and_is_named_when_it_fails(on_path: Path) -> None:
    file = on_path / "data.tsv"
    file.write_text("a.png\tWhat?\tA cat\n../b.png\tWhat?\tNo\n")
    (on_path / "a.png").touch()
    (on_path / "b.png").touch()
    limits = LimitSettings()
    first, second = read_samples(SourceSettings(path=file, format="tsv"), limits)
    assert not isinstance(first, Quarantined)
    assert [turn.text for turn in first.turns] == ["<image>What?", "A cat"]
    assert isinstance(second, Quarantined)
    assert second.kind == "image_path"
    samples = read_samples(SourceSettings(path=file, format="broken_plugin:read"), limits)
    next(samples)
    with pytest.raises(PluginError, match=r"broken_plugin:read .*data.tsv, sample 1: KeyError: 'column'"):
        next(samples)


def test_a_family_is_found_by_its_architecture(on_path: Path) -> None:
    family = find_family({"architectures": ["ExampleForCausalLM"]}, on_path / "config.json")
    assert family.name == "example_llama"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"train.hooks: there is no plug-in nothing in .* mmtrain.hooks \(installed: loss_ratio\)"),
        ("no_such_module:x", "train.hooks: no_such_module:x: there is no module no_such_module"),
        ("mmtrain_example:missing", "mmtrain_example has no missing"),
    ],
)
def test_what_is_not_there_is_named(on_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_plugin("hooks", name, "train.hooks")


def test_a_run_with_an_unknown_plugin_does_not_start(data: Path, tmp_path: Path) -> None:
    code, message = launch(request_for(data, tmp_path / "run", "train.hooks=[missing]"))
    assert (code, message.partition(" in ")[0]) == (2, "train.hooks: there is no plug-in missing")
    with pytest.raises(RecipeError, match="found 'lava'; allowed: llava, messages"):
        request_for(data, tmp_path, "data.sources.0.format=lava")
