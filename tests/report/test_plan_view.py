"""A plan as text shows everything that a reader needs to judge it."""

import pytest

from mmtrain.planning import Alternative, Plan, Prediction, SchedulePlan, StagePlan, UnitPlan
from mmtrain.planning.artifact.plan import AS_FAST_TEXT, PlannedData, StageBalance
from mmtrain.report import plan_table


def plan(*alternatives: Alternative) -> Plan:
    return Plan(
        recipe_sha256="0" * 64,
        hardware="h100-80g",
        precision="bf16",
        world_size=10,
        placement="disaggregated",
        units={
            "vision": UnitPlan(tp=1, pp=1, dp=2, ranks=(0, 1), stages=(StagePlan(stage=0, layers=(0, 5)),)),
            "llm": UnitPlan(
                tp=2,
                pp=2,
                dp=2,
                sp=True,
                ranks=tuple(range(2, 10)),
                stages=(
                    StagePlan(stage=0, layers=(0, 7), recompute=tuple(range(7))),
                    StagePlan(stage=1, layers=(7, 12), recompute=(7, 8, 11)),
                ),
            ),
        },
        schedule=SchedulePlan(num_microbatches={"vision": 4, "llm": 4}),
        data=PlannedData(samples=0, tokens={}, largest_microbatch={}),
        predicted=Prediction(
            step_time_s=0.25,
            mfu=0.412,
            tokens_per_s_per_gpu=12345.6,
            peak_memory_gib={"0-1": 3.0, "2-5": 0.5, "6-9": 61.5},
            memory_kinds_gib={"0-1": {"parameters": 3.0}, "6-9": {"optimizer": 61.0, "buffers": 0.0, "margin": 0.5}},
            memory_gib=80.0,
            bubbles={"pp_warmup": 0.1, "tp": 0.02, "imbalance": 0.0},
            cost_source="modelled: h100-80g",
        ),
        alternatives=alternatives,
    )


@pytest.mark.parametrize(
    ("recomputed", "again", "text"),
    [
        ((), False, "0"),
        ((), True, "0 (selective)"),
        (tuple(range(1, 11)), False, "10 (full)"),
        (tuple(range(12)), True, "12 (full)"),
        (tuple(range(1, 10)), True, "9"),
    ],
)
def test_recomputation_has_the_names_of_megatron(recomputed: tuple[int, ...], again: bool, text: str) -> None:
    known = plan()
    stage = StagePlan(stage=0, layers=(0, 12), recompute=recomputed)
    llm = known.units["llm"].model_copy(update={"stages": (stage,), "recompute_activation_function": again})
    shown = plan_table(known.model_copy(update={"units": known.units | {"llm": llm}}))
    assert [line.split("\u2502")[-2].strip() for line in shown.splitlines() if "2 x 2 x 2" in line] == [text]


def test_stages_prediction_and_alternatives_are_shown() -> None:
    slower = Alternative(
        summary="unified: vision tp1 pp2 dp5",
        placement="unified",
        step_time_s=0.5,
        peak_memory_gib=70.0,
        reason="2.00x slower: idle",
    )
    too_big = Alternative(
        summary="unified: tp1", placement="unified", step_time_s=None, peak_memory_gib=None, reason="does not fit"
    )
    text = plan_table(plan(too_big, slower))
    for row in [
        ("disaggregated on 10 x h100-80g",),
        ("vision", "1 x 1 x 2", "1", "-", "4", "5", "0"),
        ("llm", "2 x 2 x 2", "1", "yes", "4", "12", "10"),
        ("0-1", "0-4", "-", "none", "3 GiB"),
        ("2-5", "-", "0-6", "llm all", "512 MiB"),
        ("6-9", "-", "7-11", "llm 7-8, 11", "61.5 GiB"),
        ("Predicted step (modelled: h100-80g): 250 ms, MFU 41.2%, 12,346 LLM tokens/s per rank (123k in total), peak",),
        ("Memory of the fullest rank: 61 GiB counted + 512 MiB margin of 80 GiB: optimizer 61 GiB.",),
        ("idle for 12.0% of the step: pipeline warm-up (pp_warmup) 10.0%, tensor-parallel collectives (tp) 2.0%.",),
        ("the next best takes 2.00x: unified: vision tp1 pp2 dp5.",),
        ("unified: vision tp1 pp2 dp5", "500 ms", "70 GiB", "2.00x slower: idle"),
        ("unified: tp1", "-", "-", "does not fit"),
    ]:
        assert any(_in_order(row, line) for line in text.splitlines()), (row, text)


def test_the_balance_of_each_simulated_plan_is_shown_on_request() -> None:
    balance = StageBalance(
        parameter_variance=0.25,
        layer_variance=2.0,
        forward_variance=1234.0,
        sent_gib=1.5,
        memory_left_gib={"llm.0": 3.0, "llm.1": 20.0},
        gpu_days_per_million_samples=12.5,
    )
    even = Alternative(
        summary="unified: tp2", placement="unified", step_time_s=0.5, peak_memory_gib=1.0, reason="", balance=balance
    )
    assert "Balance over" not in plan_table(plan(even))
    rows = plan_table(plan(even), with_details=True).partition("Balance over")[2].splitlines()
    expected = ("unified: tp2", "0.25", "2", "1.23e+03", "1.5 GiB", "3 to 20 GiB", "12.5")
    assert any(_in_order(expected, row) for row in rows)


def test_the_title_of_a_sharded_plan_says_its_shards() -> None:
    units = {
        name: UnitPlan(tp=1, pp=1, dp=4, shard=2, ranks=(0, 1, 2, 3), stages=(StagePlan(stage=0, layers=(0, 5)),))
        for name in ("vision", "llm")
    }
    chosen = plan().model_copy(update={"placement": "replicated", "world_size": 4, "units": units})
    assert "Plan: replicated on 4 x h100-80g, shard 2" in plan_table(chosen)
    schedule = chosen.schedule.model_copy(update={"kind": "encoder_first"})
    chosen = chosen.model_copy(update={"schedule": schedule})
    assert "Plan: replicated on 4 x h100-80g, shard 2, encoders first" in plan_table(chosen)
    assert "shard" not in plan_table(plan())


def test_a_plan_without_alternatives_says_so() -> None:
    text = plan_table(plan())
    assert "Chosen because no other plan fits." in text
    assert "Alternatives" not in text


def test_alternatives_that_were_not_simulated_are_mentioned() -> None:
    behind = Alternative(
        summary="unified: tp2", placement="unified", step_time_s=None, peak_memory_gib=None, reason="at least 2x"
    )
    assert "the alternatives do not fit or cannot be as fast" in plan_table(plan(behind))


def test_a_plan_slower_than_an_alternative_is_not_called_the_fastest() -> None:
    faster = Alternative(
        summary="unified: tp2", placement="unified", step_time_s=0.2, peak_memory_gib=1.0, reason="1.25x faster"
    )
    text = " ".join(plan_table(plan(faster)).split())
    assert "Not the fastest by prediction: unified: tp2 takes 0.80x the step time (1.25x faster)." in text
    assert "Chosen because" not in text


@pytest.mark.parametrize(
    ("step_time_s", "sentence"),
    [
        (0.2501, "Chosen because it is the fastest that fits; as fast within 1%: unified: tp2."),
        (0.2490, "Chosen because it is the simplest; as fast within 1%: unified: tp2, predicted to be 0.4% faster."),
    ],
)
def test_an_equally_fast_alternative_is_named_as_such(step_time_s: float, sentence: str) -> None:
    equal = Alternative(
        summary="unified: tp2", placement="unified", step_time_s=step_time_s, peak_memory_gib=1.0, reason=AS_FAST_TEXT
    )
    assert sentence in " ".join(plan_table(plan(equal)).split())


def test_a_plan_by_a_rule_of_thumb_is_not_called_the_simplest() -> None:
    planned = Alternative(
        summary="unified: tp2", placement="unified", step_time_s=0.2490, peak_memory_gib=1.0, reason="without a rule"
    )
    text = " ".join(plan_table(plan(planned)).split())
    assert "As fast within 1%: unified: tp2 (without a rule)." in text
    assert "Chosen because" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, plan_table(plan(), width).splitlines())) <= width


def test_model_chunks_of_a_rank_share_a_row() -> None:
    stages = tuple(StagePlan(stage=i, chunk=i // 2, layers=(3 * i, 3 * i + 3), recompute=(3 * i,)) for i in range(4))
    chunked = UnitPlan(tp=1, pp=2, dp=1, vpp=2, ranks=(0, 1), stages=stages)
    two_ranks = plan().model_copy(
        update={"units": {"llm": chunked}, "schedule": SchedulePlan(num_microbatches={"llm": 4}), "world_size": 2}
    )
    text = plan_table(two_ranks)
    assert any(_in_order(("0", "0-2, 6-8", "llm 0, 6"), line) for line in text.splitlines()), text
    assert any(_in_order(("1", "3-5, 9-11", "llm 3, 9"), line) for line in text.splitlines()), text


def _in_order(cells: tuple[str, ...], line: str) -> bool:
    position = 0
    for cell in cells:
        position = line.find(cell, position) + len(cell)
        if position < len(cell):
            return False
    return True
