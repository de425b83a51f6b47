"""Plans of padded baselines: the padding costs time and memory, and no metric counts it as work."""

from mmtrain.planning import Plan
from tests.planning.factory import recipe, text_lengths
from tests.plans import plan_recipe


def planned(pad: bool) -> Plan:
    settings = recipe(vision=None, parallel={"placement": "unified", "llm": {"tp": 1, "pp": 1, "dp": 2}})
    data = settings.data.model_copy(update={"grouping": "random", "pad": pad})
    settings = settings.model_copy(update={"data": data})
    return plan_recipe(settings, text_lengths(300), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)


def test_a_plan_counts_padding_as_time_and_not_as_work() -> None:
    plain, padded = planned(False).predicted, planned(True).predicted
    assert padded.tokens_per_s_per_gpu < 0.9 * plain.tokens_per_s_per_gpu
    assert padded.mfu < 0.9 * plain.mfu
