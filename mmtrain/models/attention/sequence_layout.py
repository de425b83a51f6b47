"""Where packed sequences lie, and the tensors that attention needs to find them."""

import bisect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmtrain.models.attention.index_tables import HostTable, HostTables
from mmtrain.models.attention.options import AttentionBackend
from mmtrain.models.attention.sample_chunks import SampleChunks, chunk_tables, samples_by_chunks
from mmtrain.models.shapes.layer_shape import DELTA_CHUNK_TOKENS

Spans = tuple[tuple[int, int], ...]  # [start, stop) in a microbatch's packed tokens, each inside one sequence, in order


@dataclass(frozen=True)
class LengthBuckets:
    """The sequences of a microbatch sorted by length."""

    buckets: tuple[tuple[int, int], ...]  # (length, number of sequences of this length)
    order: Tensor | None  # (T,) index of the token that moves to each position; None if no token moves
    inverse: Tensor | None  # (T,) the inverse permutation


@dataclass(frozen=True)
class SpanKeys:
    """The consecutive keys that the tokens of one span attend to."""

    first: int
    stop: int
    mask: Tensor | None  # (tokens of the span, keys): which keys are in the window of each token; None: all


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Sequences that lie one after another: their lengths, and what attention derives from them.

    All blocks of a stage that attend inside the same sequences share one layout. So tensors are made and copied to the
    device at the first block of a microbatch and not at each. Lengths are Python integers, so that no backend has to
    wait for the device to know them.
    """

    lengths: tuple[int, ...]  # tokens of each sequence
    spans: Spans = ()  # tokens of one span see each other in both directions in causal blocks, however far
    name: str = ""  # among the layouts of a stage; names its tables
    tables: Mapping[str, Tensor] | None = field(default=None, repr=False)  # `host_tables` that came to the device
    _cu_seqlens: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _length_buckets: dict[torch.device, LengthBuckets] = field(default_factory=dict, repr=False)
    _sequence_order: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _span_rows: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _span_keys: dict[tuple[int, torch.device], list[SpanKeys]] = field(default_factory=dict, repr=False)
    _sample_chunks: dict[torch.device, SampleChunks] = field(default_factory=dict, repr=False)
    _padded: dict[int, "SequenceLayout"] = field(default_factory=dict, repr=False)

    @cached_property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences together."""
        return sum(self.lengths)

    @cached_property
    def filled_lengths(self) -> tuple[int, ...]:
        """Return the lengths of the sequences that have tokens."""
        return tuple(length for length in self.lengths if length)

    @cached_property
    def max_length(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def padded(self, num_rows: int) -> "SequenceLayout":
        """Append a sequence of `num_rows` padding tokens."""
        if num_rows not in self._padded:
            name = f"{self.name}, padded"
            self._padded[num_rows] = SequenceLayout((*self.lengths, num_rows), self.spans, name, self.tables)
        return self._padded[num_rows]

    def host_tables(self, backend: AttentionBackend) -> HostTables:
        """Compute the tables that a backend needs of these sequences on the device."""
        tables: HostTables = {}
        if backend == "sdpa":
            _, order = _sort_by_length(self.filled_lengths)
            if order is not None:
                tables = {self._key("order"): order, self._key("inverse"): np.argsort(order)}
        else:
            tables[self._key("cu_seqlens")] = self._host_cu_seqlens()
        if self.spans:
            tables[self._key("span_rows")] = self._host_span_rows()
        return tables

    def host_chunk_tables(self) -> HostTables:
        """Compute the tables that the gated delta rule needs of these sequences on the device."""
        slots, places = chunk_tables(self.lengths)
        return {self._key("chunk_slots"): slots, self._key("places"): places}

    def host_context_tables(self, contexts: "SequenceLayout", backend: AttentionBackend) -> HostTables:
        """Compute the tables that a backend needs, beside `host_tables`, where keys are those of `contexts`."""
        if backend == "sdpa":
            _, order = _sort_by_length(self.filled_lengths)
            return {} if order is None else {self._key("sequence_order"): self._host_sequence_order()}
        return contexts.host_tables(backend)

    def _key(self, table: str) -> str:
        return f"{table} of {self.name}"

    def _table(self, table: str, compute: Callable[[], HostTable], device: torch.device) -> Tensor:
        """Return a table that came to the device with the microbatch; one that did not come is computed and copied."""
        if self.tables is not None and self._key(table) in self.tables:
            return self.tables[self._key(table)]
        return torch.from_numpy(compute()).to(device, non_blocking=True)

    def _host_cu_seqlens(self) -> HostTable:
        return np.cumsum((0, *self.filled_lengths), dtype=np.int32)

    def _host_sequence_order(self) -> HostTable:
        return np.argsort(np.asarray(self.lengths), kind="stable")

    def _host_span_rows(self) -> HostTable:
        return np.concatenate([np.arange(start, stop) for start, stop in self.spans])

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return the start of each sequence that has tokens and the end of the last one: (S + 1,) int32."""
        if device not in self._cu_seqlens:
            self._cu_seqlens[device] = self._table("cu_seqlens", self._host_cu_seqlens, device)
        return self._cu_seqlens[device]

    def length_buckets(self, device: torch.device) -> LengthBuckets:
        """Return the sequences that have tokens, sorted by length."""
        if device not in self._length_buckets:
            buckets, order = _sort_by_length(self.filled_lengths)
            if order is None:
                self._length_buckets[device] = LengthBuckets(buckets, None, None)
            else:
                on_device = self._table("order", lambda: order, device)
                inverse = self._table("inverse", lambda: np.argsort(order), device)
                self._length_buckets[device] = LengthBuckets(buckets, on_device, inverse)
        return self._length_buckets[device]

    def sequence_order(self, device: torch.device) -> Tensor:
        """Return the sequences in the order of `length_buckets`, if all have tokens: (S,) int64."""
        if device not in self._sequence_order:
            self._sequence_order[device] = self._table("sequence_order", self._host_sequence_order, device)
        return self._sequence_order[device]

    def sample_chunks(self, device: torch.device) -> SampleChunks:
        """Return the sequences cut into chunks of tokens."""
        if device not in self._sample_chunks:
            num_samples, _ = samples_by_chunks(self.lengths)
            slots = self._table("chunk_slots", lambda: chunk_tables(self.lengths)[0], device)
            places = self._table("places", lambda: chunk_tables(self.lengths)[1], device)
            self._sample_chunks[device] = SampleChunks(num_samples, DELTA_CHUNK_TOKENS, slots, places)
        return self._sample_chunks[device]

    def span_rows(self, device: torch.device) -> Tensor:
        """Return the tokens of all spans, one after another."""
        if device not in self._span_rows:
            self._span_rows[device] = self._table("span_rows", self._host_span_rows, device)
        return self._span_rows[device]

    def span_keys(self, window: int, device: torch.device) -> list[SpanKeys]:
        """Return the keys of each span in blocks with this window; 0: without one."""
        if (window, device) not in self._span_keys:
            self._span_keys[window, device] = _find_span_keys(self, window, device)
        return self._span_keys[window, device]


def _sort_by_length(lengths: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], HostTable | None]:
    """Return the buckets of equal lengths, and the tokens in the order of these; None if no token moves."""
    sequence_order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    grouped = itertools.groupby(lengths[i] for i in sequence_order)
    buckets = tuple((length, len(list(equal_lengths))) for length, equal_lengths in grouped)
    if len(buckets) == 1:
        return buckets, None
    if len(buckets) == len(lengths):  # all lengths differ, so every sequence is a bucket where it lies
        return tuple((length, 1) for length in lengths), None
    starts = (0, *itertools.accumulate(lengths))
    return buckets, np.concatenate([np.arange(starts[i], starts[i + 1]) for i in sequence_order])


def _find_span_keys(layout: SequenceLayout, window: int, device: torch.device) -> list[SpanKeys]:
    """Find the keys of each span: from the window of its first token, or its sequence's start, to its own end."""
    ends = [*itertools.accumulate(layout.lengths)]
    masks: dict[tuple[int, int], Tensor] = {}  # images of one size share theirs
    keys_of_spans = []
    for start, stop in layout.spans:
        sequence = bisect.bisect_right(ends, start)
        assert stop <= ends[sequence], f"the span [{start}, {stop}) leaves its sequence"
        first_key = ends[sequence] - layout.lengths[sequence]
        if window:
            first_key = max(first_key, start - window + 1)
        num_queries, num_keys = stop - start, stop - first_key
        mask = None
        if window and num_keys > window:
            if (num_queries, num_keys) not in masks:
                masks[num_queries, num_keys] = _window_mask(num_queries, num_keys, window, device)
            mask = masks[num_queries, num_keys]
        keys_of_spans.append(SpanKeys(first_key, stop, mask))
    return keys_of_spans


def _window_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return which of the keys are in the window of each query, (queries, keys); the last key is the last query's."""
    is_visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return is_visible.triu(num_keys - num_queries - window + 1)
