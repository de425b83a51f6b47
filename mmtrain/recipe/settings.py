"""What every part of a recipe is made of."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every part of a recipe: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    def _without(self, problems: list[str]) -> Self:
        """Return the section, or refuse it for all its problems together."""
        if problems:
            raise ValueError("; ".join(problems))
        return self
