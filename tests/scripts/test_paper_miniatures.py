"""Miniatures of the papers' experiments: the record is whole, the page shows it, and the script's own path trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program import Backward, Forward, build_program, simulate
from mmtrain.program.ir.actions import Action, Collective
from mmtrain.program.ir.data_dependencies import participants
from scripts.linked_ranks import CoreClock
from scripts.miniature_data import image_sides
from scripts.paper_miniatures import load_miniatures, merged
from scripts.paper_miniatures_page import (
    DATA_FILE,
    FIGURE,
    load_record,
    miniatures_figure,
    miniatures_section,
    speed_ups,
)
from scripts.papers import PAGE
from scripts.replayed_steps import RecordedTiming
from tests.flow import cases
from tests.flow.cases import Mesh

ROOT = Path(__file__).parents[2]
RECORD = load_record()
MAX_RATIO_ERROR = 0.15  # of a unit's FLOPs over the LLM's, in a miniature and in the paper's recipe
MIN_COMPARED_RATIO = 0.03  # below it a unit is a few blocks of the smallest width
TINY = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64}


def test_every_miniature_is_recorded_with_its_cases(tmp_path: Path) -> None:
    miniatures = load_miniatures(tmp_path)
    assert list(RECORD["miniatures"]) == [miniature.name for miniature in miniatures]
    for miniature in miniatures:
        part = RECORD["miniatures"][miniature.name]
        assert (part["ranks"], part["title"]) == (miniature.ranks, miniature.fields["title"])
        assert all(part[key] for key in ("date", "machine", "tree"))
        asked = [(case["name"], case["settings"], case.get("baseline")) for case in miniature.fields["cases"]]
        assert [(row["name"], row["settings"], row["baseline"]) for row in part["cases"]] == asked


@pytest.mark.parametrize("name", RECORD["miniatures"])
def test_the_record_has_as_many_times_as_steps(name: str) -> None:
    rows = RECORD["miniatures"][name]["cases"]
    for row in rows:
        num_steps = len(row["samples"])
        seen = [each["core_s"] for each in row.get("rounds", ())] or [row["rehearsed_ratio"]]
        assert [len(steps) for steps in (row["predicted_s"], *seen)] == [num_steps] * (1 + len(seen))
        assert min(min(row["predicted_s"]), *map(min, seen)) > 0
        for each in row.get("rounds", ()):
            assert len(each["wall_s"]) == num_steps
            assert all(0 <= share < 1 for share in each["waited_share"])
    assert len({len(row.get("rounds", ())) for row in rows}) == 1, "rounds are compared in pairs"


@pytest.mark.parametrize("name", RECORD["miniatures"])
def test_a_miniature_keeps_the_ratios_of_its_paper(name: str) -> None:
    fields = yaml.safe_load(DATA_FILE.read_text(encoding="utf-8"))["miniatures"][name]
    ratios = RECORD["miniatures"][name]["ratios"]
    for unit, own in ratios["miniature"].items():
        paper = ratios["paper"][unit]
        assert own["items"] == pytest.approx(paper["items"], rel=0.1)
        if fields.get("keeps_ratios", True) and paper["flops"] >= MIN_COMPARED_RATIO:
            assert own["flops"] == pytest.approx(paper["flops"], rel=MAX_RATIO_ERROR)


def test_dispatch_and_placement_change_no_loss() -> None:
    """Cases that train on the same samples in the same steps have the same loss in the first of them."""
    for name in ("orchmllm", "optimus"):
        rows = RECORD["miniatures"][name]["cases"]
        losses = [row["rounds"][0]["loss"][0] for row in rows]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_the_page_shows_the_record() -> None:
    assert "\n".join(miniatures_section()) in PAGE.read_text(encoding="utf-8")
    assert FIGURE.read_text(encoding="utf-8") == miniatures_figure(RECORD)


def test_speed_ups_are_of_rounds_that_follow_each_other() -> None:
    def row(name: str, predicted_s: float, *rounds_s: float) -> dict[str, object]:
        rounds = [{"core_s": [seconds], "waited_share": [0.5]} for seconds in rounds_s]
        return {"name": name, "layout": "", "samples": [10], "predicted_s": [predicted_s], "rounds": rounds}

    first, second = speed_ups({"cases": [row("slow", 4.0, 5.0, 8.0, 6.0), row("fast", 2.0, 2.0, 8.0, 2.0)]})
    assert (first.predicted, first.seen) == (1.0, 1.0)
    assert (second.predicted, second.seen, *second.rounds) == pytest.approx((2.0, 2.5, 2.5, 1.0, 3.0))
    assert second.case.seen_s == pytest.approx(0.2)


def test_the_clock_of_a_core_waits_for_the_link_and_not_longer() -> None:
    clock = CoreClock()
    first_s = clock.carry(100.0)
    second_s = clock.carry(50.0)
    assert second_s == first_s + 50.0  # the link carries one thing after another
    clock.reach(second_s)
    assert clock.now() == pytest.approx(second_s, abs=1.0)
    waited_s = clock.waited_s
    clock.reach(first_s)
    assert clock.waited_s == waited_s


def test_replayed_predictions_are_the_prediction() -> None:
    settings = cases.recipe()
    mesh = Mesh((2,), (0, 1))
    plan = cases.plan(settings, "1f1b", vision=Mesh((), (0,)), llm=mesh)
    dp = {name: unit.dp for name, unit in plan.units.items()}
    batch = cases.batch(0, cases.samples_of(0), dp, plan.schedule.num_microbatches, plan.dispatch)
    timing = plan_timing(settings, plan, batch)
    program = build_program(timing.graph, kind=plan.schedule.kind)
    seconds: dict[Action, float] = {}
    for rank in range(plan.world_size):
        for action in program.for_rank(rank):
            if isinstance(action, Forward | Backward):
                seconds[action] = timing.compute(action)
            elif isinstance(action, Collective):
                members = participants(timing.graph, rank, action)
                seconds[action] = timing.collective(rank, action, members).seconds
    predicted_s = simulate(program, timing).step_time_s
    assert simulate(program, RecordedTiming(timing, seconds)).step_time_s == pytest.approx(predicted_s)
    slower = {action: 2 * took_s for action, took_s in seconds.items()}
    assert simulate(program, RecordedTiming(timing, slower)).step_time_s > 1.5 * predicted_s


@pytest.mark.parametrize(("patches", "sides"), [(64, (8, 8)), (40, (6, 6)), (120, (10, 12)), (1, (2, 2))])
def test_images_have_about_as_many_patches_as_asked_for(patches: float, sides: tuple[int, int]) -> None:
    assert image_sides(patches) == sides


@pytest.mark.slow  # starts a process, and ranks from it
def test_the_script_trains_a_case_and_records_it(tmp_path: Path) -> None:
    content = yaml.safe_load(DATA_FILE.read_text(encoding="utf-8"))
    own = content["miniatures"]["omnibal"]
    tiny = {"model": {"vision": TINY, "llm": TINY}, "train": {"global_batch": 2}}
    own = {**own, "recipe": merged(own["recipe"], tiny), "cases": own["cases"][1:2]}
    data_file, record_file = tmp_path / "tiny.yaml", tmp_path / "tiny.json"
    data_file.write_text(yaml.safe_dump({**content, "miniatures": {"omnibal": own}}), encoding="utf-8")
    words = ["--modelled", "--rounds", "1", "--steps", "1", "--file", str(data_file), "--record", str(record_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scripts.paper_miniatures", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
    [row] = json.loads(record_file.read_text(encoding="utf-8"))["miniatures"]["omnibal"]["cases"]
    [seen] = row["rounds"]
    assert 0 < seen["core_s"][0] < 60
    assert seen["wall_s"][0] > 0
    assert 5 < seen["loss"][0] < 8  # ln 512 is 6.2
