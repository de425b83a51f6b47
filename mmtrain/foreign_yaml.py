"""Parse YAML that others wrote: every fault of it is one kind of error, and no few lines become gigabytes."""

from typing import Any

import yaml

_MAX_DEPTH = 100  # nested levels, far fewer than Python's recursion limit
# That aliases stand for, written out: some lines of aliases to aliases stand for billions.
_MAX_ALIASED_NODES = 100_000


class _Loader(yaml.SafeLoader):
    _depth = 0
    _num_nodes = 0  # composed so far, with those that aliases stand for
    _num_aliased = 0

    def __init__(self, content: bytes | str) -> None:
        super().__init__(content)
        self._sizes: dict[str, int] = {}  # nodes below each anchor, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise ValueError(f"line {line}: `*{event.anchor}` stands inside of what it names")
            size = self._sizes.get(event.anchor or "", 0)
            self._num_nodes += size
            self._num_aliased += size
            if self._num_aliased > _MAX_ALIASED_NODES:
                raise ValueError(
                    f"line {line}: aliases stand for more than {_MAX_ALIASED_NODES} values; write them out"
                )
            return super().compose_node(parent, index)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"line {line}: nested deeper than {_MAX_DEPTH} levels")
        num_before = self._num_nodes
        self._num_nodes += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._sizes[anchor] = self._num_nodes - num_before
        return node


def parse_yaml(content: bytes | str) -> Any:
    """Parse a YAML document. Raises ValueError for every fault, also for bombs of aliases."""
    try:
        return yaml.load(content, Loader=_Loader)
    except ValueError:
        raise
    except Exception as error:  # values of stated types fail with whatever Python raises for them
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
