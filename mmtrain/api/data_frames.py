"""Make data frames where pandas is installed, which nothing else here needs."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mmtrain.errors import UserError

if TYPE_CHECKING:
    import pandas


def data_frame(rows: Iterable[Mapping[str, Any]], caller: str) -> "pandas.DataFrame":
    """Return rows as a data frame; what is nested in them becomes columns such as `time_s.forward`.

    Raises:
        UserError: pandas is not installed; `caller` needs it.
    """
    try:
        import pandas
    except ImportError:
        raise UserError(
            f"{caller} needs the `pandas` package, which is not installed here: pip install 'mmtrain[notebook]'"
        ) from None
    return pandas.json_normalize([dict(row) for row in rows])
