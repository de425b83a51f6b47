"""The console on which everything that has colors or moves is shown."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mmtrain.printed_text import shown_text


class Console(console.Console):
    """A console of Rich that escapes what a terminal would obey in texts, and not what it writes itself."""

    def render_str(self, text: str, **options: Any) -> Text:
        """See the base. Widths are those of the escaped text."""
        return super().render_str(shown_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See the base."""
        return self._escaped(super().render(renderable, options))

    def _escaped(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            if segment.control:
                yield segment
            else:
                yield Segment(shown_text(segment.text), segment.style)
