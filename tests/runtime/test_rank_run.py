"""Building a rank's part of a plan leaves no file open where it ends in an error."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from mmtrain.errors import UserError
from mmtrain.runtime.training import rank_run


@pytest.mark.parametrize("failing", ["build_rank_context", "require_fitting_weights"])
def test_start_weights_are_closed_where_the_model_is_not_built(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise UserError("train.init_from: another model")

    weights = MagicMock()
    session = MagicMock()
    session.request.recipe.train.seed = 0
    monkeypatch.setattr(rank_run, "open_start_weights", lambda *_: weights)
    monkeypatch.setattr(rank_run, "smallest_device_memory", MagicMock())
    monkeypatch.setattr(rank_run, "build_rank_context", MagicMock())
    monkeypatch.setattr(rank_run, failing, fail)
    with pytest.raises(UserError, match="another model"):
        rank_run.build_run(session, MagicMock())
    weights.close.assert_called_once_with()
