"""A model that is taught once for all tests of evaluation."""

import pytest

from tests.runtime.taught import Taught


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return Taught(tmp_path_factory.mktemp("taught"))
