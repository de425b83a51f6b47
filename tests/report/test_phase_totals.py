"""Balance of phases and seconds of dispatches, in logs, texts and pages."""

import json
from dataclasses import replace

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, PhaseLoad
from mmtrain.costs.hardware import GIB
from mmtrain.planning import Plan
from mmtrain.program import Timeline
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.html import html_page
from mmtrain.report.logged_totals import measured_phases, phase_rows, predicted_phases
from mmtrain.report.metrics_record import DispatchMetrics
from mmtrain.report.plan_view import plan_table
from mmtrain.report.report_contents import report_json
from mmtrain.report.runlog import run_summary
from mmtrain.report.terminal import report_text
from tests.report.conftest import contents_of, metrics

LOADS = [
    {"vision": PhaseLoad(100.0, 300.0, 110.0), "llm": PhaseLoad(1000.0, 1200.0, 1020.0)},
    {"vision": PhaseLoad(300.0, 500.0, 330.0), "llm": PhaseLoad(1000.0, 1400.0, 1020.0)},
]
VOLUMES = [{"vision": OffNodeVolume(GIB, GIB / 2)}, {"vision": OffNodeVolume(3 * GIB, 1.5 * GIB)}]
STEPS = [
    metrics(1, dispatch=DispatchMetrics(9.0, LOADS[0], VOLUMES[0])),  # with warm-up
    metrics(2, dispatch=DispatchMetrics(0.002, LOADS[0], VOLUMES[0])),
    metrics(3, dispatch=DispatchMetrics(0.004, LOADS[1], VOLUMES[1])),
]
LOGGED = [json.loads(json.dumps(step.to_json())) for step in STEPS]
SUMMARY = "dispatches 3 ms (0.6% of a step); fullest over mean rank, before and after balancing: "


def _sharded(plan: Plan) -> Plan:
    assert plan.predicted.balance is not None
    phases = {"vision": PhaseLoad(250.0, 500.0, 250.0), "llm": PhaseLoad(1000.0, 1100.0, 1000.0)}
    balance = plan.predicted.balance.model_copy(
        update={"phases": phases, "dispatch_s": 0.001, "off_node": {"vision": OffNodeVolume(3 * GIB, GIB / 2)}}
    )
    predicted = plan.predicted.model_copy(update={"balance": balance, "step_time_s": 0.1})
    return Plan.model_validate_json(plan.model_copy(update={"predicted": predicted}).model_dump_json())


def test_the_log_ends_with_the_balance_of_steady_steps(simulated_plan: tuple[Plan, Timeline]) -> None:
    summary = run_summary(simulated_plan[0], ClusterSettings(), LOGGED)
    assert summary.endswith(
        SUMMARY + "vision 2.00 -> 1.10, llm 1.30 -> 1.02; features to other nodes: vision 2 GiB (fullest rank 1 GiB)"
    )
    assert "dispatch" not in metrics(1).to_json()
    assert measured_phases([metrics(1).to_json()]) is None
    assert measured_phases([]) is None
    on_one_node = metrics(2, dispatch=DispatchMetrics(0.002, LOADS[0])).to_json()
    assert "off_node" not in on_one_node["dispatch"]
    assert "nodes" not in run_summary(simulated_plan[0], ClusterSettings(), [LOGGED[0], on_one_node])


def test_steps_of_a_plan_without_shards_do_not_count() -> None:
    """A run may change its placement on the way."""
    measured = measured_phases([LOGGED[0], metrics(2).to_json(), LOGGED[2]])
    assert measured is not None
    assert measured.phases == LOADS[1]


def test_predicted_and_measured_rows_of_each_phase(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan, step = simulated_plan
    assert predicted_phases(plan) is None
    assert phase_rows(plan, [metrics(1).to_json()]) == []
    sharded = _sharded(plan)
    rows = phase_rows(sharded, LOGGED)
    assert rows == [
        ("vision", "predicted", "250", "500 (2.00x)", "250 (1.00x)", "3 GiB (fullest rank 512 MiB)"),
        ("vision", "measured", "200", "400 (2.00x)", "220 (1.10x)", "2 GiB (fullest rank 1 GiB)"),
        ("llm", "predicted", "1,000", "1,100 (1.10x)", "1,000 (1.00x)", "-"),
        ("llm", "measured", "1,000", "1,300 (1.30x)", "1,020 (1.02x)", "-"),
    ]
    contents = replace(contents_of(sharded, step), metrics=LOGGED)
    text, page = report_text(contents, 160), html_page(contents)
    for row in rows:
        assert all(cell in text for cell in row)
        assert "".join(f"<td>{cell}</td>" for cell in row) in page
    assert "1.0% predicted, 0.6% measured of the step" in " ".join(text.replace("│", " ").split())
    content = report_json(contents)["phases"]
    assert content["predicted"]["phases"]["vision"]["max_before"] == 500.0
    assert content["measured"]["dispatch_share"] == 0.003 / 0.5


def test_a_plan_states_its_balance_and_that_of_alternatives(simulated_plan: tuple[Plan, Timeline]) -> None:
    sharded = _sharded(simulated_plan[0])
    other = sharded.alternatives[0].model_copy(
        update={"summary": "replicated: another", "balance": sharded.predicted.balance}
    )
    table = plan_table(sharded.model_copy(update={"alternatives": (other,)}), with_details=True)
    sentence = "Balance over ranks: dispatches 1 ms (1.0% of a step); fullest over mean rank, before and after"
    assert sentence in " ".join(table.split())
    [line] = [line for line in table.splitlines() if "replicated: another" in line and "2.00 -> 1.00" in line]
    assert "1.10 -> 1.00" in line
    alone = simulated_plan[0].model_copy(update={"alternatives": ()})
    assert "Balance over the ranks" not in plan_table(alone, with_details=True)


def test_a_plan_without_shards_keeps_its_fingerprint(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan = simulated_plan[0]
    assert _sharded(plan).sha256 != plan.sha256
    older = json.loads(plan.model_dump_json())
    for predicted in (older["predicted"], *older["alternatives"]):
        if predicted["balance"] is not None and predicted["balance"]["phases"] is None:
            for key in ("phases", "dispatch_s", "off_node"):
                del predicted["balance"][key]
    assert Plan.model_validate(older).sha256 == plan.sha256
