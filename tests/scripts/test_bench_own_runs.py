"""mmtrain's own runs: they are planned by the shipped table, trained as users do, and recorded by their names."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.costs.layer_arithmetic import num_parameters
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import load_recipe
from scripts import bench_own_runs
from scripts.bench_own_runs import (
    ROOT,
    Measurement,
    OwnRun,
    draw_data,
    main,
    measured_runs,
    measured_seconds,
    own_runs,
    predicted_seconds,
    profile_models,
    write_measured,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own-runs")
    draw_data(folder)
    return folder


def run_named(name: str) -> OwnRun:
    (run,) = [run for run in own_runs() if run.name == name]
    return run


def test_what_is_recorded_are_runs_that_are_listed() -> None:
    names = [run.name for run in own_runs()]
    assert len(set(names)) == len(names)
    assert measured_runs().keys() <= set(names)


def test_placements_of_the_demo_are_predicted_by_the_table_that_plans_read(data: Path) -> None:
    seconds = {run.name: predicted_seconds(run, data) for run in own_runs() if run.name.startswith("demo")}
    assert len(set(seconds.values())) == len(seconds) == 3, "each placement is planned"
    assert all(0.01 < step_s < 1 for step_s in seconds.values())


def test_the_large_model_has_as_many_parameters_as_its_name_says(data: Path) -> None:
    run = run_named("170 M parameters, unified")
    shape = build_model_shape(load_recipe(ROOT / run.recipe, run.settings_on(data)).recipe)
    counted = sum(num_parameters(layer) for unit in shape.units for layer in unit.layers)
    assert counted == pytest.approx(170e6, rel=0.02)


@pytest.mark.slow  # 10 s: a run with two ranks
def test_a_run_is_trained_as_its_settings_say(data: Path) -> None:
    assert measured_seconds(replace(run_named("demo, unified"), steps=5), data) > 0


def test_records_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_own_runs, "MEASURED_FILE", tmp_path / "own_runs.json")
    records = {"a": Measurement(0.5, "two cores"), "b": Measurement(0.25, "two cores", profiled_s=0.2)}
    write_measured(records)
    assert measured_runs() == records


def test_a_run_is_predicted_by_the_table_that_its_machine_measured(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped table, with layers that take twice as long, stands for the one that `profile` writes."""
    runs = [run for run in own_runs() if run.name.startswith("demo")]
    profiled = []
    table = json.loads((ROOT / "mmtrain/costs/tables/cpu-core.json").read_text(encoding="utf-8"))
    for sample in (sample for layer in table["layers"] for sample in layer["samples"]):
        sample["seconds"] = {name: 2 * seconds for name, seconds in sample["seconds"].items()}

    def profile(command: str, run: OwnRun, folder: Path, option: str, path: str) -> None:
        assert (command, folder, option) == ("profile", data, "--out")
        profiled.append(run)
        Path(path).write_text(json.dumps(table), encoding="utf-8")

    monkeypatch.setattr(bench_own_runs, "_run_mmtrain", profile)
    tables = profile_models(runs, data)
    assert len(profiled) == 1, "all placements have the same layers"
    for run in runs:
        by_own = predicted_seconds(run, data, f"cluster.costs={tables[run.name]}")
        assert 1.3 * predicted_seconds(run, data) < by_own < 2.1 * predicted_seconds(run, data)


@pytest.mark.parametrize(
    ("arguments", "load", "message"),
    [
        (["--write"], 0.0, "--write: nothing is measured; add --measure"),
        (["--write", "--measure"], 3.25, "--write: this machine has a load of 3.2; allowed: 0.5, as of idle cores"),
    ],
)
def test_nothing_is_recorded_that_is_no_measurement_of_idle_cores(
    arguments: list[str], load: float, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_own_runs", *arguments])
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    with pytest.raises(SystemExit):
        main()
    assert message in " ".join(capsys.readouterr().err.split())
