"""A guest as one stage: the whole LLM, as a module of `transformers`, which makes logits of ids.

The modules run as their authors wrote them. What they get is ours: samples that lie one after another in one row, with
positions that start anew in each, and attention inside each (`guest_attention`). A model that leaks between them is
found before the first step (`choose_packing`), and gets a row for each sample.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.errors import ModelFolderError
from mmtrain.models.attention.index_tables import brought_or_computed
from mmtrain.models.shapes.loss_chunks import CHUNK_TOKENS
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.models.stage.guest_attention import SampleAttention
from mmtrain.models.stage.llm_layers import TextContext, sum_by_source
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageContext, StageModule, StageSpec
from mmtrain.recipe.settings.model_settings import ModelSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

# How samples lie in what the modules get: in one row, with our attention or with a mask that `transformers` makes of
# positions; or each in a row of its own.
Packing = Literal["packed", "masked", "rows"]
AttendingContext = Callable[[SampleAttention], AbstractContextManager[None]]
CHECKED_LENGTHS = (37, 29)  # tokens of the two samples of `choose_packing`
# Of a loss of about 10, between samples that are packed and apart: what kernels differ by, far below what leaks change.
_MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class GuestParts:
    """The modules of a guest.

    Attributes:
        model: makes logits of ids.
        blocks: names of its blocks, in order.
        base: name of the part that makes hidden states.
        attending: sets what attends inside samples; None for a model whose attention is its own.
    """

    model: nn.Module
    blocks: Sequence[str]
    base: str
    attending: AttendingContext | None


class GuestStage(StageModule):
    """The whole LLM as one stage. Its layers are those of the model's own modules."""

    def __init__(
        self,
        settings: ModelSettings,
        shape: ModelShape,
        spec: StageSpec,
        factory: "LayerFactory",
        parts: GuestParts,
    ) -> None:
        """Take the modules of a guest.

        Args:
            settings: of the recipe's model.
            shape: of the planned model, whose layers stand for the guest's.
            spec: all layers of the LLM.
            factory: says in which type and with which kernels stages compute.
            parts: the modules.
        """
        nn.Module.__init__(self)
        self.unit, self.shape, self.factory = spec.unit, shape.unit(spec.unit), factory
        self.indices, self.recompute, self.offloaded = range(*spec.layers), spec.recompute, frozenset()
        assert self.indices == range(len(self.shape.layers)), "a guest is one stage"
        self._settings, self._is_tied = settings, False
        self._base, self._attending = parts.base, parts.attending
        config: Any = parts.model.config
        self._own_attention = config._attn_implementation
        self.layers = nn.ModuleDict()  # none of ours
        self.guest = parts.model
        self.blocks = [parts.model.get_submodule(name) for name in parts.blocks]
        self.packing: Packing = "packed" if parts.attending is not None else "masked"
        self._their_attention = "eager"  # of transformers, where ours does not run; "sdpa" once it is known to be equal
        self.packing_note: str | None = None  # where samples do not lie as ours do
        for number in self.recompute:
            if 0 < number <= len(self.blocks):
                _recompute(self.blocks[number - 1], self._around_forward)
        self._attend: SampleAttention | None = None  # of the microbatch whose forward runs

    @property
    def sharded_layers(self) -> Sequence[nn.Module]:
        """Return the blocks, whose weights are gathered one after another."""
        return self.blocks

    def layer_of(self, name: str) -> int:
        """Return 0: all gradients are reduced together."""
        return 0

    @property
    def needs_position_ids(self) -> bool:
        """Return False: positions are places in samples."""
        return False

    @property
    def units_with_spans(self) -> tuple[str, ...]:
        """Return none: a guest has no encoders among the units."""
        return ()

    def run(self, context: StageContext, hidden: Tensor | None, layers: range) -> Tensor:
        """Run the whole LLM; return the sum of the token losses, a scalar in fp32, or one for each source."""
        assert isinstance(context, TextContext)
        assert hidden is None, "a guest is one stage"
        inputs = context.inputs
        assert inputs.ids is not None, "the stage needs ids"
        assert inputs.labels is not None, "the stage needs labels"
        rows = inputs.target_positions
        if rows is None:
            rows = torch.nonzero(inputs.labels != -100).squeeze(1)
        losses = self.token_losses(context, rows, inputs.labels.index_select(0, rows))
        return sum_by_source(losses, inputs)

    def token_losses(self, context: TextContext, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (N,) in fp32 of the tokens in places `rows` of a microbatch, whose next tokens are known.

        rows, targets: (N,) int64.
        """
        outputs, places = self._hidden_states(context)
        hidden: Tensor = outputs.last_hidden_state.flatten(0, 1)
        hidden = hidden.index_select(0, rows if places is None else places.index_select(0, rows))
        parts = []
        both = zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
        for part, of_part in both:
            head = partial(self._losses_of_hidden, outputs)
            if len(targets) > CHUNK_TOKENS and torch.is_grad_enabled():  # logits of a part alone exist at once
                parts.append(checkpoint(head, part, of_part, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(head(part, of_part))
        return torch.cat(parts)

    def _hidden_states(self, context: TextContext) -> tuple[Any, Tensor | None]:
        """Run the model up to its head; return its outputs, and where tokens lie in them if not in order."""
        inputs = context.inputs
        ids, layout = inputs.ids, context.block_packing(self.shape.layers[1]).layout
        assert ids is not None
        tables = brought_or_computed(inputs.tables, context.index_tables, ids.device)
        positions = tables["rotary_positions"].long()
        base = self.guest.get_submodule(self._base)
        if self.packing != "rows":
            self._attend = SampleAttention(layout, self.factory.attention)
            with self._around_forward()():
                return base(input_ids=ids[None], position_ids=positions[None], use_cache=False), None
        longest = max(layout.lengths)
        lengths = torch.tensor(layout.lengths, device=ids.device)
        samples = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths, output_size=len(ids))
        places = samples * longest + positions
        padded_ids = ids.new_zeros(len(lengths) * longest).index_copy(0, places, ids)
        mask = ids.new_zeros(len(lengths) * longest).index_fill(0, places, 1).view(len(lengths), longest)
        outputs = base(input_ids=padded_ids.view(mask.shape), attention_mask=mask, use_cache=False)
        return outputs, places

    def _around_forward(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what sets, around a forward or one of a block again, the attention of the microbatch of now."""
        if self._attending is None or self.packing != "packed":
            return nullcontext
        assert self._attend is not None
        return partial(self._attending, self._attend)

    def _losses_of_hidden(self, outputs: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        """Make logits of hidden states (N, hidden) as the model does, and return the losses, (N,) in fp32.

        What a model does to hidden states and logits, as scaling or capping them, stands in its own forward. So it runs
        with the hidden states in the place of what its base would make of ids.
        """
        known = type(outputs)(**{**outputs, "last_hidden_state": hidden[None]})
        modules = self.guest._modules
        base = modules[self._base]
        modules[self._base] = _Known(known)
        try:
            logits = self.guest(input_ids=targets[None], use_cache=False).logits[0]
        finally:
            modules[self._base] = base
        return F.cross_entropy(logits.float(), targets, reduction="none")

    def choose_packing(self) -> None:
        """Find out how samples may lie, with the weights that the model has.

        All ranks call this together. Compares the losses of two samples that are packed and apart. Raises
        ModelFolderError for a model that sees the token which it predicts.
        """
        ids = [torch.arange(3, length + 3) * 7919 % self._settings.llm.vocab for length in CHECKED_LENGTHS]
        with torch.no_grad():
            self._pack_as("rows")
            apart = torch.cat([self._checked_losses([sample]) for sample in ids])
            self._try_sdpa(ids, apart)
            last = ids[1].clone()
            last[-1] = (last[-1] + 1) % self._settings.llm.vocab
            limit = _MAX_DIFFERENCE[self.factory.dtype]
            seen = apart[CHECKED_LENGTHS[0] - 1 : -1] - self._checked_losses([last])[:-1]
            if not seen.abs().max() <= limit:
                raise ModelFolderError(
                    f"model.hf: {self._settings.hf}: {type(self.guest).__name__} sees the token that it is to predict; "
                    "use a model for causal language modeling"
                )
            differences: dict[Packing, float] = {}
            ways: tuple[Packing, ...] = ("packed", "masked") if self._attending is not None else ("masked",)
            for way in ways:
                self._pack_as(way)
                differences[way] = (self._checked_losses(ids) - apart).abs().max().item()
                if differences[way] <= limit:
                    break
            else:
                self._pack_as("rows")
        self.packing_note = _packing_note(self.packing, differences, type(self.guest).__name__)

    def _try_sdpa(self, ids: Sequence[Tensor], apart: Tensor) -> None:
        """Take the faster attention of `transformers` if the losses stay those of its plain one, `apart`.

        It knows no caps on scores: `transformers` 5.17 leaves those of Gemma 2 out there without a word.
        """
        if not getattr(self.guest, "_supports_sdpa", False):
            return
        self._their_attention = "sdpa"
        self._pack_as("rows")
        found = torch.cat([self._checked_losses([sample]) for sample in ids])
        if not (found - apart).abs().max() <= _MAX_DIFFERENCE[self.factory.dtype]:
            self._their_attention = "eager"
            self._pack_as("rows")

    def _pack_as(self, packing: Packing) -> None:
        self.packing = packing
        is_ours = packing == "packed" or self._attending is None
        config: Any = self.guest.config
        config._attn_implementation = self._own_attention if is_ours else self._their_attention

    def _checked_losses(self, samples: Sequence[Tensor]) -> Tensor:
        """Return the losses of all tokens of samples but the first of each."""
        device = next(self.parameters()).device
        lengths = tuple(map(len, samples))
        targets = torch.cat([sample[1:] for sample in samples])
        ends = torch.tensor(lengths).cumsum(0) - 1
        places = torch.ones(sum(lengths), dtype=torch.bool).index_fill(0, ends, False).nonzero().squeeze(1)
        inputs = TextInput(lengths, torch.cat(list(samples)).to(device))
        losses: Tensor = self.run_losses(inputs, places.to(device), targets.to(device))
        return losses

    def run_losses(self, inputs: TextInput, rows: Tensor, targets: Tensor) -> Tensor:
        """Return `token_losses` of a microbatch."""
        context = self.context(inputs, {})
        assert isinstance(context, TextContext)
        return self.token_losses(context, rows, targets)


class _Known(nn.Module):
    """Stands for the base of a model, whose outputs are known."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the outputs."""
        return self._outputs


def _recompute(block: nn.Module, around_forward: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
    """Let a block keep its inputs alone, and compute the rest again in its backward."""
    forward = block.forward

    def run_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        attending = around_forward()  # of this microbatch; by the backward another one's forward may have run

        def run(*inputs: Any, **options: Any) -> Any:
            with attending():
                return forward(*inputs, **options)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    block.forward = run_again


def _packing_note(packing: Packing, differences: Mapping[Packing, float], name: str) -> str | None:
    """Say how samples lie where they do not lie as ours do."""
    if packing == "packed":
        return None
    amounts = ", ".join(f"{difference:.2g}" for difference in differences.values())
    if packing == "masked" and len(differences) == 1:
        return f"guest: samples are packed with the attention of {name} itself"
    if packing == "masked":
        return (
            "guest: samples are packed with the attention of transformers, whose masks grow with the square of a "
            f"microbatch's tokens: {name} does not attend as our attention does (loss differs by up to {amounts})"
        )
    return (
        f"guest: every sample gets a row of its own, padded to the longest of its microbatch: {name} mixes tokens of "
        f"packed samples (loss differs by up to {amounts}). Plans count no padding: `data.pad: true` with "
        "`data.grouping: length` does, and keeps it small"
    )
