"""How far predictions of published runs were off: which runs stand for a plan, and what is said where none does."""

import statistics
from dataclasses import replace

import pytest
from pydantic import ValidationError

from mmtrain.costs import PRESETS, preset
from mmtrain.costs.published_errors import (
    HIGH_SHARE,
    MIN_RUNS,
    LayoutKind,
    PublishedError,
    PublishedErrors,
    RunKind,
    bound_of_share,
    error_of,
    expected_error,
    layout_kind,
    published_errors,
)


def runs_of(hardware: str, layout: LayoutKind, *ratios: float, is_multimodal: bool = False) -> list[PublishedError]:
    """Return published runs of one kind with these ratios."""
    return [
        PublishedError(
            name=f"{hardware} {layout} {number}",
            hardware=hardware,
            layout=layout,
            is_multimodal=is_multimodal,
            ratio=ratio,
        )
        for number, ratio in enumerate(ratios)
    ]


ERRORS = PublishedErrors(
    runs=(
        *runs_of("h100-80g", "FSDP", 1.01, 1.02, 1.03, 1.04, 1 / 1.05, 1 / 1.06, 1.07, 1.08, 1.20, 1.50),
        *runs_of("h100-80g", "pipeline", 1.10, 1.20, 1 / 1.40),
        *runs_of("h100-80g", "cp", 1.16),
        *runs_of("a800-80g", "tp x dp", 0.5, 0.9),
        *runs_of("h200-141g", "FSDP", 1.1, 1.1, 1.1),
        *runs_of("h200-141g", "pipeline", 1.25, 1.25, 1.25, is_multimodal=True),
    )
)


@pytest.mark.parametrize(
    ("hardware", "layout", "is_multimodal", "text"),
    [
        (
            "h100-80g",
            "FSDP",
            False,
            "within 6% in the median and 20% in nine of ten of 10 published runs like this one with their kernels",
        ),
        (
            "h100-80g",
            "pipeline",
            False,
            "within 20% in the median and 40% at worst of 3 published runs like this one with their kernels",
        ),
        (
            "h100-80g",
            "cp",
            False,
            "within 8% in the median and 40% in nine of ten of 14 published runs on this GPU "
            "with their kernels, 1 of this layout",
        ),
        (
            "h100-80g",
            "tp x dp",
            False,
            "within 8% in the median and 40% in nine of ten of 14 published runs on this GPU "
            "with their kernels, none of this layout",
        ),
        (
            "h100-80g",
            "pipeline",
            True,
            "no multimodal runs on this GPU were compared; of text, within 20% in the median and 40% at worst of 3 "
            "published runs like this one with their kernels",
        ),
        (
            "h200-141g",
            "pipeline",
            True,
            "within 25% in the median and 25% at worst of 3 published runs like this one with their kernels",
        ),
        ("a800-80g", "tp x dp", False, "only 2 published runs on this GPU were compared"),
        ("a800-80g-4x200", "tp x dp", False, "only 2 published runs on this GPU were compared"),
        ("b200-180g", "FSDP", False, "no published run on this GPU was compared"),
        ("b200-180g", "FSDP", True, "no published run on this GPU was compared"),
    ],
)
def test_runs_like_the_planned_one_stand_for_it(
    hardware: str, layout: LayoutKind, is_multimodal: bool, text: str
) -> None:
    assert ERRORS.text(RunKind(hardware, layout, is_multimodal)) == text


def test_mixtures_of_experts_are_told_of_all_runs_of_such_and_of_dense_ones() -> None:
    kind = RunKind("h100-80g", "cp", is_multimodal=False, has_experts=True)
    dense = ERRORS.text(replace(kind, has_experts=False))
    assert ERRORS.text(kind) == f"no published run of a mixture of experts was compared; of dense models, {dense}"
    mixtures = [run.model_copy(update={"has_experts": True}) for run in runs_of("h100-80g", "FSDP", 1.2, 2.0, 2.5)]
    errors = PublishedErrors(runs=(*ERRORS.runs, *mixtures))
    of_mixtures = "within 100% in the median and 150% at worst of 3 published runs of mixtures of experts"
    assert errors.text(kind) == f"{of_mixtures}; of dense models, {dense}"


def test_a_kind_of_run_is_of_gpu_layout_and_input() -> None:
    assert layout_kind(is_sharded=True, pp=1, cp=1) == "FSDP"
    assert layout_kind(is_sharded=False, pp=2, cp=2) == "pipeline"
    assert layout_kind(is_sharded=False, pp=1, cp=2) == "cp"
    assert layout_kind(is_sharded=False, pp=1, cp=1) == "tp x dp"
    assert RunKind("a100-80g-4x200", "FSDP", is_multimodal=False).is_on("a100-80g")
    assert not RunKind("a100-80g", "FSDP", is_multimodal=False).is_on("a100-80g-4x200")
    assert not RunKind("gb200-nvl72", "FSDP", is_multimodal=False).is_on("b200-180g")


def test_an_error_is_the_same_in_both_directions() -> None:
    assert error_of(1.25) == pytest.approx(error_of(1 / 1.25)) == pytest.approx(0.25)
    assert error_of(1.0) == 0


def test_nine_of_ten_errors_do_not_exceed_the_bound() -> None:
    for count in range(1, 40):
        errors = [float(number * 7 % count) for number in range(count)]
        bound = bound_of_share(errors, HIGH_SHARE)
        assert sum(error <= bound for error in errors) >= HIGH_SHARE * count
        assert sum(error < bound for error in errors) < HIGH_SHARE * count


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_no_run_can_have_is_refused(ratio: float) -> None:
    with pytest.raises(ValidationError, match="ratio"):
        runs_of("h100-80g", "FSDP", ratio)


def test_the_file_of_the_package_holds_runs_on_presets() -> None:
    runs = published_errors().runs
    assert len(runs) == len({run.name for run in runs}) > 30
    assert {run.hardware for run in runs} <= set(PRESETS)


def test_every_figure_of_a_preset_is_that_of_the_file() -> None:
    dense = [run for run in published_errors().runs if not run.has_experts]
    for name in sorted({run.hardware for run in dense}):
        of_text = [run for run in dense if run.hardware == name and not run.is_multimodal]
        errors = [error_of(run.ratio) for run in of_text if run.layout == "FSDP"]
        text = expected_error(preset(name), "FSDP", is_multimodal=False)
        if len(errors) >= MIN_RUNS:
            assert text.startswith(f"within {statistics.median(errors):.0%} in the median and ")
            assert text.endswith(f" of {len(errors)} published runs like this one with their kernels")
        else:
            assert "published runs on this GPU" in text


def test_hardware_that_we_ran_on_states_our_own_runs() -> None:
    text = expected_error(preset("cpu-core"), "FSDP", is_multimodal=True)
    assert text == "our own runs took 1.1 to 2.9 times as long"
