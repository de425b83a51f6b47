"""Which attention backend runs where, and that each library's function is called as it is declared."""

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models import build_model_shape, build_stage
from mmtrain.models.attention import (
    AttentionBackend,
    AttentionOptions,
    SequenceLayout,
    attend,
    attend_to_context,
    backend_problems,
    choose_backend,
    prepare_attention,
)
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.train_settings import TrainSettings
from mmtrain.runtime.execution.attention_choice import describe_attention
from tests.models.attention_kernels import (
    INTERFACES,
    flash_attn_4,
    install,
    pretend_gpu,
    varlen_attn_2_10,
    varlen_attn_2_12,
)
from tests.models.factory import settings, stage, text

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
ALL = ("torch 2.12", "flash-attn 2.8", "FlashAttention-3", "flash-attn-4 4.0.0b36")
WHATIF = Path(__file__).parents[2] / "recipes" / "whatif"


def _forward_and_gradients(
    backend: AttentionBackend, heads: tuple[int, int], head_dim: int, causal: bool, window: int, scale: float | None
) -> list[Tensor]:
    layout = SequenceLayout((5, 0, 9, 1, 7), ((7, 10),) if causal else ())
    generator = torch.Generator().manual_seed(3)
    sizes = (heads[0], heads[1], heads[1])
    q, k, v = (torch.randn(layout.num_tokens, n, head_dim, generator=generator).requires_grad_() for n in sizes)
    out = attend(q, k, v, layout, AttentionOptions(backend, causal, window, scale))
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), (q, k, v))]


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize(
    ("causal", "window", "scale"), [(True, 0, None), (True, 3, 0.7), (True, 1, None), (False, 0, None)]
)
@pytest.mark.parametrize("case", INTERFACES)
def test_each_kernel_is_called_for_what_the_reference_computes(
    case: str, causal: bool, window: int, scale: float | None, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 12 features are padded, also those of the gradients; queries share keys or not."""
    install(monkeypatch, case)
    backend: Any = INTERFACES[case][0]
    for heads in ((4, 2), (2, 2)):
        expected = _forward_and_gradients("reference", heads, head_dim, causal, window, scale)
        actual = _forward_and_gradients(backend, heads, head_dim, causal, window, scale)
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


UNEQUAL, EQUAL = (5, 9, 5, 2), (3,) * 4


def _forward_and_gradients_in_contexts(
    backend: AttentionBackend, head_dim: int, lengths: tuple[int, ...], keys: tuple[int, ...]
) -> list[Tensor]:
    layout, contexts = SequenceLayout(lengths), SequenceLayout(keys)
    generator = torch.Generator().manual_seed(3)
    rows = (layout.num_tokens, contexts.num_tokens, contexts.num_tokens)
    q, k, v = (torch.randn(n, 2, head_dim, generator=generator).requires_grad_() for n in rows)
    out = attend_to_context(q, k, v, layout, contexts, AttentionOptions(backend, causal=False))
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), (q, k, v))]


@pytest.mark.parametrize(("lengths", "keys"), [(UNEQUAL, EQUAL), (EQUAL, UNEQUAL)])
@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("case", INTERFACES)
def test_each_kernel_attends_to_contexts_in_one_call(
    case: str, head_dim: int, lengths: tuple[int, ...], keys: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of queries and of keys have other lengths."""
    install(monkeypatch, case)
    backend: Any = INTERFACES[case][0]
    expected = _forward_and_gradients_in_contexts("sdpa", head_dim, lengths, keys)
    actual = _forward_and_gradients_in_contexts(backend, head_dim, lengths, keys)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "called_with"), [(96, (96, 96)), (97, (120, 104)), (112, (120, 112)), (113, (120, 120))]
)
def test_flash_attn_4_is_called_with_widths_that_it_compiles(
    head_dim: int, called_with: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a causal mask its backward for Hopper does not compile for heads of 97 to 112 features."""
    install(monkeypatch, "flash-attn-4 4.0.0b36")
    widths = set()

    @functools.wraps(flash_attn_4)
    def attend_and_record(**arguments: Any) -> tuple[Tensor, Tensor | None]:
        widths.update(arguments[name].shape[-1] for name in ("q", "k", "v"))
        return flash_attn_4(**arguments)

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", attend_and_record)
    expected = _forward_and_gradients("sdpa", (4, 2), head_dim, causal, 0, None)
    actual = _forward_and_gradients("flash_attn_4", (4, 2), head_dim, causal, 0, None)
    assert widths == {called_with[causal]}
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_stand_in_for_this_torch_has_its_signature() -> None:
    from torch.nn.attention.varlen import varlen_attn

    if torch.__version__ < "2.12":
        pytest.skip("torch 2.12 and 2.13 declare it alike")
    declared, standing_in = (inspect.signature(f).parameters for f in (varlen_attn, varlen_attn_2_12))
    assert [(p.name, p.kind, p.default) for p in declared.values()] == [
        (p.name, p.kind, p.default) for p in standing_in.values()
    ]


@pytest.mark.parametrize(
    ("capability", "installed", "head_dim", "chosen"),
    [
        ((9, 0), ALL, 128, "flash_attn_3"),
        ((9, 0), ("torch 2.11", "flash-attn 2.8", "flash-attn-4 4.0.0b36"), 128, "flash_attn_4"),
        ((9, 0), ALL, 256, "flash_attn_3"),
        ((9, 0), ALL, 264, "sdpa"),
        ((10, 0), ALL, 128, "flash_attn_4"),
        ((10, 0), ALL, 192, "flash_attn"),
        ((10, 0), ALL, 257, "sdpa"),
        ((12, 0), ALL, 128, "flash_attn"),
        ((8, 0), ALL, 100, "flash_attn"),
        ((8, 0), ("torch 2.11",), 100, "varlen"),
        ((9, 0), ("torch 2.11",), 256, "varlen"),
        ((7, 5), ALL, 64, "sdpa"),
    ],
)
def test_auto_selects_the_fastest_kernel_of_a_gpu(
    capability: tuple[int, int], installed: tuple[str, ...], head_dim: int, chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pretend_gpu(monkeypatch, capability)
    install(monkeypatch, *installed)
    assert choose_backend("auto", CUDA, BF16, head_dim) == chosen
    assert choose_backend("auto", CUDA, torch.float32, head_dim) == "sdpa"


def test_a_backend_that_does_not_fit_is_rejected_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *ALL)
    pretend_gpu(monkeypatch, (10, 0))
    with pytest.raises(UserError) as caught:
        choose_backend("flash_attn_4", CUDA, BF16, 192)
    assert str(caught.value) == (
        "train.attention: flash_attn_4 cannot be used here: on this GPU it takes heads of up to 128 features, and "
        "these have 192. Usable on this machine: auto, flash_attn, varlen, sdpa, reference."
    )
    with pytest.raises(UserError, match=r"flash_attn_3 .* it is for Hopper GPUs, and this is a GPU of sm_100 "):
        choose_backend("flash_attn_3", CUDA, BF16, 64)
    with pytest.raises(UserError, match=r"varlen .* computes in bf16 or fp16, and this run uses float32"):
        choose_backend("varlen", CUDA, torch.float32, 64)


def test_kernels_that_are_not_installed_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    install(monkeypatch)
    problems = backend_problems(CUDA, BF16)
    assert problems["flash_attn"] is not None
    assert problems["flash_attn"].startswith("flash_attn is not installed (pip install 'mmtrain[flash-attn]'")
    assert problems["flash_attn_4"] == "flash_attn.cute is not installed (pip install 'mmtrain[cuda]')"
    assert "has no wheels: build" in str(problems["flash_attn_3"])
    assert choose_backend("auto", CUDA, BF16, 128) == "varlen"


def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel holds `flash_attn/cute` and no `flash_attn/__init__.py`: `flash_attn` is a namespace package."""
    source = "from tests.models.attention_kernels import flash_attn_4 as flash_attn_varlen_func"
    _write_flash_attn_4(monkeypatch, tmp_path, source)
    assert importlib.util.find_spec("flash_attn") is not None, "the trap"
    pretend_gpu(monkeypatch, (9, 0))
    assert choose_backend("auto", CUDA, BF16, 128) == "flash_attn_4"
    pretend_gpu(monkeypatch, (8, 0))
    assert choose_backend("auto", CUDA, BF16, 128) == "varlen"
    with pytest.raises(UserError, match="the installed flash_attn has no flash_attn_varlen_func"):
        choose_backend("flash_attn", CUDA, BF16, 128)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_that_is_missing", "importing flash_attn.cute fails: No module named 'a_library_that_is"),
        ("raise OSError('libcuda.so.1 is missing')", "importing flash_attn.cute fails: OSError: libcuda.so.1 is"),
        ("def flash_attn_varlen_func(q, k, v): ...", "takes no `cu_seqlens_q`, `cu_seqlens_k`, "),
    ],
)
def test_a_broken_kernel_is_passed_over(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_flash_attn_4(monkeypatch, tmp_path, source)
    pretend_gpu(monkeypatch, (10, 0))
    assert choose_backend("auto", CUDA, BF16, 128) == "varlen"
    assert reason in str(backend_problems(CUDA, BF16)["flash_attn_4"])


def _write_flash_attn_4(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Write a package as the wheel of flash-attn-4 holds it, and let this test import it."""
    installed = importlib.util.find_spec("flash_attn")
    if installed is not None and installed.origin is not None:
        pytest.skip("FlashAttention-2 is installed, which is found before a namespace package")
    package = folder / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    install(monkeypatch)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name)  # `install` hid it; the end of the test restores what there was


def test_torch_2_10_cannot_mask_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn_2_10)
    assert "takes no `scale`, `window_size`" in str(backend_problems(CUDA, BF16)["varlen"])


def test_cudnn_does_not_plan_dense_attention_on_gpus() -> None:
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        prepare_attention(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        prepare_attention(CUDA)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def test_the_recipe_allows_every_backend() -> None:
    allowed = TrainSettings.model_fields["attention"].annotation
    assert get_args(allowed) == ("auto", *get_args(AttentionBackend))
    assert allowed == Literal["auto", "flash_attn_3", "flash_attn_4", "flash_attn", "varlen", "sdpa", "reference"]


def test_a_stage_with_heads_of_100_features_computes_with_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go through the blocks as they are built for a GPU: queries share keys, and one block has a window."""
    model = settings(llm={"head_dim": 100, "window": 4, "full_attention_blocks": (1,)})
    losses_and_gradients = []
    install(monkeypatch, "flash-attn-4 4.0.0b36")
    for backend in ("flash_attn_4", "reference"):
        monkeypatch.setattr(build_stage, "choose_backend", lambda *_, chosen=backend: chosen)
        llm = stage(model, "llm", recompute={2})
        loss = llm(None, text(9, 12))
        loss.backward()
        losses_and_gradients.append([loss, *(p.grad for p in llm.parameters() if p.grad is not None)])
    for got, want in zip(*losses_and_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_run_says_which_kernel_each_unit_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(WHATIF / "orchmllm_18b.yaml").recipe  # its encoder has heads of 100 features
    model = build_model_shape(recipe)
    pretend_gpu(monkeypatch, (9, 0))
    install(monkeypatch, "flash-attn-4 4.0.0b36")
    choice = describe_attention(recipe, model, CUDA, BF16)
    assert "vision flash_attn_4 (heads of 100 features padded to 120), audio flash_attn_4, llm " in choice.summary
    assert choice.warnings == ()
    choice = describe_attention(recipe, model, torch.device("cpu"), torch.float32)
    assert choice.summary == "attention: sdpa"
    assert choice.warnings == ()
    pretend_gpu(monkeypatch, (7, 0))
    choice = describe_attention(recipe, model, CUDA, BF16)
    assert choice.summary == "attention: sdpa"
    assert choice.warnings[0].startswith("attention of vision is slow: sdpa computes sequences of each length")
    assert "varlen: it is for Ampere GPUs and newer, and this is a GPU of sm_70" in choice.warnings[0]
