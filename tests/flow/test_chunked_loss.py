"""Plans compute what one process does also where the loss is computed by chunks of tokens."""

from unittest.mock import PropertyMock, patch

import pytest

from mmtrain.models.kernels import vocab_loss
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.loss_chunks import LossSizes
from mmtrain.planning import Plan
from mmtrain.recipe import Recipe
from tests.flow.cases import plan, recipe
from tests.flow.equality import assert_equals_one_process, train_steps
from tests.flow.test_master import CASES, PLAIN, STACKED

# Tensor parallelism with and without slices of tokens, a tied matrix that trains or not, several microbatches in
# flight, layers that are computed again, and a matrix that does not train.
CHOSEN = (
    "both tp2 with slices of tokens, pp2, recomputed, partly frozen",
    "tied embeddings pp2 dp2",
    "tied embeddings frozen, pp2",
    "parts of layers frozen, tied, tp2 pp2",
    "llm tp2 pp2 vpp2",
    "frozen llm",
    "everything recomputed",
    "deepstack, adapters",
)


def train_by_chunks(
    settings: Recipe, plan: Plan, texts_between: bool
) -> tuple[list[tuple[float, float]], list[NamedShard]]:
    """Train on a rank with the logits of three tokens at a time."""
    always = patch.object(LossSizes, "uses_chunks", PropertyMock(return_value=True))
    with patch.object(vocab_loss, "CHUNK_TOKENS", 3), always, patch.object(vocab_loss, "losses_at_once", None):
        return train_steps(settings, plan, texts_between)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOSEN)
def test_a_plan_computes_by_chunks_what_one_process_computes_at_once(case: str) -> None:
    changes, meshes = (CASES | PLAIN | STACKED)[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), train=train_by_chunks)
