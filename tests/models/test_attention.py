from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models.attention import (
    AttentionBackend,
    AttentionOptions,
    SequenceLayout,
    Spans,
    attend,
    choose_backend,
    sequence_layout,
)
from mmtrain.models.kernels.elementwise import apply_rotary
from mmtrain.models.kernels.rotary_positions import Rotation, look_up_rotations
from tests.models.factory import settings, stage, text

CPU = torch.device("cpu")


def _qkv(tokens: int, heads: int, kv_heads: int, dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(tokens, n, dim, generator=generator).requires_grad_() for n in sizes]


def _forward_and_gradients(
    qkv: list[Tensor], lengths: tuple[int, ...], options: AttentionOptions, spans: Spans = ()
) -> list[Tensor]:
    out = attend(qkv[0], qkv[1], qkv[2], SequenceLayout(lengths, spans), options)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), qkv)]


@given(
    st.lists(st.integers(0, 9), max_size=8).map(tuple),
    st.sampled_from([(False, 0), (True, 0), (True, 1), (True, 2), (True, 3), (True, 8)]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_sdpa_equals_the_reference(lengths: tuple[int, ...], mask: tuple[bool, int], heads: tuple[int, int]) -> None:
    qkv = _qkv(sum(lengths), *heads)
    expected = _forward_and_gradients(qkv, lengths, AttentionOptions("reference", *mask))
    for got, want in zip(_forward_and_gradients(qkv, lengths, AttentionOptions("sdpa", *mask)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_token_sees_the_tokens_of_its_window_only(backend: AttentionBackend) -> None:
    q, k, v = _qkv(11, 2, 2)
    out = attend(q, k, v, SequenceLayout((11,)), AttentionOptions(backend, True, window=4))
    for token in range(11):
        (gradient,) = torch.autograd.grad(out[token].sum(), v, retain_graph=True)
        seen = gradient.abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
        assert seen == list(range(max(0, token - 3), token + 1))


@st.composite
def _packed_spans(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Draw packed sequences, and spans of each of them."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    spans = []
    first = 0
    for length in lengths:
        edges = sorted(draw(st.sets(st.integers(first, first + length), max_size=6)))
        spans += zip(edges[::2], edges[1::2], strict=False)
        first += length
    return tuple(lengths), tuple(spans)


@given(_packed_spans(), st.sampled_from([0, 1, 3, 8]), st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_sdpa_equals_the_reference_with_spans(
    packed: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], window: int, heads: tuple[int, int]
) -> None:
    lengths, spans = packed
    qkv = _qkv(sum(lengths), *heads)
    options = AttentionOptions("reference", True, window)
    expected = _forward_and_gradients(qkv, lengths, options, spans)
    actual = _forward_and_gradients(qkv, lengths, replace(options, backend="sdpa"), spans)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [0, 2, 4])
def test_tokens_of_a_span_see_each_other(backend: AttentionBackend, window: int) -> None:
    """The rule of Gemma 3: earlier tokens and those of the same image, of which a window hides what is far back."""
    first, last = 3, 7  # of the span
    q, k, v = _qkv(10, 2, 2)
    out = attend(q, k, v, SequenceLayout((10,), ((first, last + 1),)), AttentionOptions(backend, True, window))
    for token in range(10):
        (gradient,) = torch.autograd.grad(out[token].sum(), v, retain_graph=True)
        seen = gradient.abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
        furthest = last if first <= token <= last else token
        assert seen == list(range(max(0, token - window + 1) if window else 0, furthest + 1))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_do_not_see_each_other(backend: AttentionBackend, causal: bool) -> None:
    lengths = (3, 5, 3, 1)
    options = AttentionOptions(backend, causal, window=2 if causal else 0)
    q, k, v = _qkv(12, 4, 2)
    packed = attend(q, k, v, SequenceLayout(lengths), options)
    alone = [
        attend(*parts, SequenceLayout((len(parts[0]),)), options)
        for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_causal_token_attends_only_to_itself_and_earlier_tokens(backend: AttentionBackend) -> None:
    q, k, v = _qkv(4, 2, 2)
    out = attend(q, k, v, SequenceLayout((4,)), AttentionOptions(backend, True))
    torch.testing.assert_close(out[0], v[0])  # the first token sees itself alone
    (gradient,) = torch.autograd.grad(out[1].sum(), v)
    assert gradient[:2].abs().sum() > 0
    assert gradient[2:].abs().sum() == 0


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_empty_sequences_still_have_gradients(backend: AttentionBackend, lengths: tuple[int, ...]) -> None:
    qkv = _qkv(0, 4, 2)
    out, *grads = _forward_and_gradients(qkv, lengths, AttentionOptions(backend, True))
    assert out.shape == (0, 4, 8)
    assert [g.shape for g in grads] == [x.shape for x in qkv]


def test_rotary_scores_depend_on_distance_alone() -> None:
    positions = torch.tensor([*range(6), *range(3)])
    rope = look_up_rotations(positions, 6, Rotation(8, 100.0), torch.float32)
    assert rope[0].shape == (9, 1, 4)
    x, y = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rotated_x, rotated_y = (apply_rotary(z.expand(9, 1, 8), rope)[:, 0] for z in (x, y))
    scores = rotated_x @ rotated_y.T
    torch.testing.assert_close(scores[1, 0], scores[5, 4])
    torch.testing.assert_close(scores[2, 0], scores[8, 6])  # the second sequence counts from 0 again
    assert not torch.isclose(scores[1, 0], scores[2, 0])


def test_auto_is_sdpa_on_a_cpu() -> None:
    assert choose_backend("auto", CPU, torch.float32, 64) == "sdpa"
    assert choose_backend("reference", CPU, torch.bfloat16, 64) == "reference"


@pytest.mark.parametrize("backend", ["flash_attn_3", "flash_attn_4", "flash_attn", "varlen"])
def test_a_backend_that_cannot_run_here_is_rejected(backend: AttentionBackend) -> None:
    with pytest.raises(UserError, match=rf"train.attention: {backend} .*CUDA.* Usable .* auto, sdpa, reference"):
        choose_backend(backend, CPU, torch.float32, 64)


@pytest.mark.parametrize("llm", [{}, {"window": 4, "full_attention_blocks": (1,), "image_attention": "bidirectional"}])
def test_all_blocks_of_a_microbatch_share_the_layout(llm: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Index tensors are copied to the device once a microbatch, recomputed blocks included, and are not kept."""
    calls = []
    for name in ("_sort_by_length", "_find_span_keys"):
        function = getattr(sequence_layout, name)
        monkeypatch.setattr(sequence_layout, name, lambda *a, f=function, n=name: (calls.append(n), f(*a))[1])
    model = stage(settings(llm=llm), "llm", recompute=frozenset({2}))
    inputs = replace(text(9, 12), image_spans=((1, 4),) if llm else ())
    for _ in range(2):
        calls.clear()
        model(None, inputs).backward()
        assert calls.count("_sort_by_length") == 1
        assert calls.count("_find_span_keys") == (2 if llm else 0), "with a window and without"
