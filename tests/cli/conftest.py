"""Run a command in this process, and a run for the commands that show one."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mmtrain.api.simulated_steps import simulate_steps
from mmtrain.cli import main
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.program.trace.measured_timeline import MeasuredStep, run_trace
from mmtrain.recipe import dump_recipe, load_recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE
from tests.report.conftest import metrics

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
RunMmtrain = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run_mmtrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunMmtrain:
    """Return a function that runs `mmtrain` with its arguments in this process.

    Starting Python and importing takes longer than most commands. `columns` is the width of the terminal.
    """

    def run(*arguments: object, columns: int = 120) -> CompletedProcess[str]:
        command = ["mmtrain", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        code = stop.value.code if isinstance(stop.value.code, int) else 0
        return CompletedProcess(command, code, captured.out, captured.err)

    return run


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the demo on a machine that takes twice as long as predicted."""
    folder = tmp_path_factory.mktemp("runs") / "try"
    data = folder.parent / "data"
    generate_demo(data, seed=1, train=60, heldout=4)
    settings = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    recipe = load_recipe(DEMO, [*settings, f"data.tokenizer={data}/tokenizer.json"]).recipe
    simulated = simulate_steps(recipe, None)
    [step] = simulated.timelines
    spans = tuple(s._replace(start_s=2 * s.start_s, duration_s=2 * s.duration_s) for s in step.spans)
    slower = replace(step, spans=spans, step_time_s=2 * step.step_time_s, simulated=False)
    folder.mkdir()
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe))
    simulated.plan.save(folder / PLAN_FILE)
    trace = run_trace([MeasuredStep(1, 10.0, slower)], simulated.plan.sha256, 1e-6)
    (folder / TRACE_FILE).write_text(json.dumps(trace))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics(i).to_json()) + "\n" for i in (1, 2, 3)))
    return folder
