"""Layers of a unit made from Megatron-core's tensor-parallel parts, for tokens packed as (T, features).

Every weight that tensor parallelism splits carries Megatron-core's own marks: `tensor_model_parallel`,
`partition_dim`, and `partition_stride` (2 for a gated MLP's first linear, whose local rows are the gate's shard
followed by the up-projection's shard).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from mmtrain.models.attention import AttentionBackend, AttentionOptions, SequenceLayout, attend
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.elementwise import activate, rms_norm, rotate_heads
from mmtrain.models.kernels.keyed_dropout import DropsInputs, HoldsDropping
from mmtrain.models.kernels.vocab_loss import LogitRules, vocab_parallel_losses
from mmtrain.models.megatron import compat
from mmtrain.models.megatron.block_parts import JointHeadNorm, LayerInput, LayerInputs, NormedAdd, ScaledAdd
from mmtrain.models.megatron.block_segments import run_block
from mmtrain.models.megatron.delta_net import DeltaNetMixer
from mmtrain.models.megatron.experts import ExpertMlp
from mmtrain.models.megatron.grouped_attention import GroupedAttention
from mmtrain.models.megatron.lora import ColumnLinear, RowLinear, add_adapter
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.shapes.layer_shape import Attention, LayerShape, LoraShape, Mixer, Mlp, MoeMlp, is_of_expert
from mmtrain.recipe.settings.encoder_settings import Activation

_ONE_TOKEN = PackedSequences(
    SequenceLayout((1,)), num_padding_rows=1
)  # keeps its tables, so that they come to a device once


class Norm(nn.Module):
    """RMSNorm without bias, or LayerNorm with bias, as selected by the config's `normalization`.

    With the config's `layernorm_zero_centered_gamma` an RMSNorm multiplies by 1 + weight, in fp32 throughout.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.zero_centered = self.zero_centered  # type: ignore[attr-defined]  # how it starts
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def is_plain_rms(self) -> bool:
        """Return whether this is an RMSNorm that multiplies by its weight itself."""
        return self.bias is None and not self.zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if self.zero_centered:
            # In bf16, 1 + weight would lose most of a small weight.
            return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HeadNorm(Norm):
    """Norm over each head of queries or keys.

    All heads of a block share its weight, and each rank of the TP group normalizes heads of its own. So the gradient
    of the weight must be summed over the group, as that of weights which see only a shard of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]


class PackedAttention(nn.Module):
    """Core attention over packed sequences. It replaces Megatron-core's, which rejects them without CUDA."""

    def __init__(self, options: AttentionOptions, fused_kernels: bool) -> None:
        """Attend with these options; the window of a block comes with the packing of its tokens."""
        super().__init__()
        self.fused_kernels = fused_kernels
        self.options = options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, *, packed_seq_params: PackedSequences, **_: object
    ) -> Tensor:
        """Attend inside each sequence: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d)."""
        packing = packed_seq_params
        if packing.rope is not None:
            q, k = rotate_heads(q, k, packing.rope, fused=self.fused_kernels)
        if packing.query_factors is not None:
            q = q * packing.query_factors
        options = replace(self.options, window=packing.window)
        if packing.context is not None:
            return packing.context.attend(q, k, v, options)
        if packing.kv_cache is not None:
            return packing.kv_cache.attend(self, q, k, v, packing.layout, options)
        return attend(q, k, v, packing.layout, options)


class PackedTransformerBlock(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types
    """One pre-norm transformer block on packed tokens, of Megatron-core's modules."""

    dropping: Sequence[DropsInputs] = ()  # adapters that drop inputs

    def __init__(
        self,
        *args: Any,
        activation: Activation,
        is_gated: bool,
        fused_kernels: bool,
        recomputes_activation: bool,
        chunks_mlp: bool,
        layer_input: LayerInput | None,
        has_scale: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fused_kernels = fused_kernels
        self.recomputes_activation = recomputes_activation
        self.chunks_mlp = chunks_mlp
        self.activation = activation
        self.is_gated = is_gated
        self.layer_input = layer_input
        self.output_scale = nn.Parameter(torch.ones(1, dtype=self.config.params_dtype)) if has_scale else None
        if not isinstance(self.mlp, ExpertMlp):
            self.mlp.linear_fc1.skip_bias_add = False  # its GEMM adds the bias

    def forward(self, hidden: Tensor, packing: PackedSequences) -> Tensor | tuple[Tensor, ...]:
        """Map (T, hidden) to (T, hidden), and to keys and values if later blocks read them: see `GroupedAttention`."""
        if hidden.shape[0] == 0:
            # Megatron-core cannot reshape an empty tensor. A row that is dropped again gives weights a zero gradient.
            # Where ranks share sequences, one without tokens still takes part in what they exchange.
            beside = packing.layer_input, packing.shared_kv
            packing = _ONE_TOKEN if packing.context is None else packing.padded(1)
            layer_input, shared_kv = (None if rows is None else F.pad(rows, (0, 0, 0, 1)) for rows in beside)
            packing = replace(packing, layer_input=layer_input, shared_kv=shared_kv)
            # A call of the block would run FSDP2's hooks twice, and before torch 2.13 reduce its gradients twice.
            outputs = self._run(F.pad(hidden, (0, 0, 0, 1)), packing)
            return outputs[:0] if isinstance(outputs, Tensor) else tuple(rows[:0] for rows in outputs)
        return self._run(hidden, packing)

    def _run(self, hidden: Tensor, packing: PackedSequences) -> Tensor | tuple[Tensor, ...]:
        if isinstance(self.mlp, ExpertMlp):
            return cast(Tensor, self.mlp.experts(partial(run_block, self), hidden, packing))
        return run_block(self, hidden, packing)


@dataclass(frozen=True)
class LayerFactory:
    """Builds the layers of one unit. `block` is the shape of the unit's transformer blocks.

    Under sequence parallelism (arXiv 2205.05198) blocks and head read and return this rank's shard of the tokens.
    Weights that see only this shard are marked `sequence_parallel`: their gradients must be summed over the TP group.
    So are weights that see only this rank's heads.
    """

    block: LayerShape
    activation: Activation
    norm_eps: float
    groups: ParallelGroups
    dtype: torch.dtype
    attention: AttentionBackend
    sequence_parallel: bool
    fused_kernels: bool = False  # where an operation has a fused form: see `models.kernels.choice`
    tp_chunks: int = 1  # of the tokens in linears of blocks; with more, communication overlaps with GEMMs
    query_scale: float | None = None  # scores are divided by its square root; by default that of a head's width

    @cached_property
    def config(self) -> TransformerConfig:
        """Describe the unit to Megatron-core. Weights are created on the CPU, uninitialized."""
        shape, attention, mlp = self.block, self.block.attention, self.block.mlp
        assert mlp is not None, "blocks have an MLP"
        return TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_attention_heads=attention.heads,
            num_query_groups=attention.kv_heads,
            kv_channels=attention.head_dim,
            ffn_hidden_size=mlp.ffn,
            gated_linear_unit=mlp.gated,
            normalization="RMSNorm" if shape.rms_norm else "LayerNorm",
            layernorm_epsilon=self.norm_eps,
            layernorm_zero_centered_gamma=shape.zero_centered_norms,
            add_bias_linear=shape.linear_bias,
            add_qkv_bias=attention.qkv_bias,
            qk_layernorm=attention.qk_norm or attention.joint_qk_norm,  # 0.19 rejects such norms in the spec without it
            attention_output_gate=attention.output_gate,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=self.groups.tp_size,
            params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            use_cpu_initialization=True,
            perform_initialization=False,
            # Fusions need Transformer Engine, Apex or a compiler's warm-up; on a CPU they cost more than they save.
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            **compat.no_cuda_graphs(),
        )

    @cached_property
    def sequence_parallel_config(self) -> TransformerConfig:
        """Describe the unit for layers that work on this rank's shard of the tokens, if the unit shards them."""
        return replace(self.config, sequence_parallel=self.sequence_parallel)

    def scatter_tokens(self, hidden: Tensor) -> Tensor:
        """Return this rank's shard of tokens (T, width); zeros are added so that all ranks have equally many rows."""
        padded = F.pad(hidden, (0, 0, 0, self.num_padding_rows(len(hidden))))
        shard: Tensor = scatter_to_sequence_parallel_region(padded, group=self.groups.tp)
        return shard.clone()  # a slice would keep the tokens of all ranks alive until backward

    def gather_tokens(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Gather the shards of all ranks into (num_tokens, width), without padding.

        In backward every rank must bring the same gradient.
        """
        tokens: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.groups.tp
        )
        return tokens[:num_tokens]

    def num_padding_rows(self, num_tokens: int) -> int:
        """Return how many rows `scatter_tokens` adds; every rank gets at least one row, even without tokens."""
        tp = self.groups.tp_size
        return -num_tokens % tp if num_tokens else tp

    @cached_property
    def collection(self) -> ProcessGroupCollection:
        """Return the unit's process groups for Megatron-core."""
        return self.groups.collection()

    def transformer_block(self, shape: LayerShape, chunks_mlp: bool = False) -> nn.Module:
        """Build one `PackedTransformerBlock`: mixer and MLP with residual connections.

        shape: that of the block; blocks of a unit may differ in mixers and MLPs. Where it says so, the block keeps no
            output of the MLP's activation function: see `block_segments`.
        chunks_mlp: compute the MLP of many tokens in chunks, for a block that is recomputed: see `chunked_mlp`.
        """
        mixer, mlp = shape.mixer, shape.mlp
        assert mixer is not None, "blocks have a mixer"
        assert mlp is not None, "blocks have an MLP"
        add_output: Any = get_bias_dropout_add
        if self.block.post_norms:
            build_norm = partial(self.norm, self.block.hidden, on_sequence_shards=True)
            add_output = ModuleSpec(module=NormedAdd, params={"build_norm": build_norm})
        if self.block.layer_scale:
            add_output = ModuleSpec(module=ScaledAdd, params={"config": self.sequence_parallel_config})
        spec = TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=self._mixer_spec(mixer),
            self_attn_bda=add_output,
            pre_mlp_layernorm=Norm,
            mlp=self._mlp_spec(mlp),
            mlp_bda=add_output,
        )
        config = replace(self.sequence_parallel_config, ffn_hidden_size=mlp.ffn, gated_linear_unit=mlp.gated)
        if isinstance(mixer, Attention):
            config = replace(config, num_query_groups=mixer.kv_heads, kv_channels=mixer.head_dim)
        layer = PackedTransformerBlock(
            config,
            spec,
            pg_collection=self.collection,
            activation=self.activation,
            is_gated=mlp.gated,
            fused_kernels=self.fused_kernels,
            recomputes_activation=shape.recomputes_activation,
            chunks_mlp=chunks_mlp,
            layer_input=self._layer_input(shape.layer_input),
            has_scale=shape.output_scale,
        )
        self._mark_shards(layer, mlp)
        if self.groups.tp_size > 1:
            set_tp_chunks(layer, self.tp_chunks)
        return cast(nn.Module, layer)

    def _layer_input(self, width: int) -> LayerInput | None:
        """Build what adds a block's own input of so many features to its output; None without one."""
        if not width:
            return None
        norm = self.norm(self.block.hidden, on_sequence_shards=True)
        activate_gate = partial(activate, activation=self.activation)
        return LayerInput(self.sequence_parallel_config, width, norm, activate_gate)

    def layer_inputs(self, rows: int, width: int, num_blocks: int) -> LayerInputs:
        """Build what makes the own inputs of all blocks, for a vocabulary of so many rows."""
        table = self.vocab_embedding(rows, num_blocks * width)
        return LayerInputs(self.config, table, self.norm(width), width, num_blocks)

    def take_heads(self, rows: Tensor, num_heads: int, is_sharded: bool) -> Tensor:
        """Return this rank's heads of keys and values of all `num_heads`, (T, width), that another stage sent.

        is_sharded: under sequence parallelism `rows` are this rank's tokens; the result is for all.
        """
        tp = self.groups.tp_size
        if is_sharded:
            rows = gather_from_sequence_parallel_region(rows, group=self.groups.tp)
        elif self.sequence_parallel:
            rows = F.pad(rows, (0, 0, 0, self.num_padding_rows(len(rows))))
        elif tp > 1:
            rows = self.copy_inputs(rows)
        num_parts = min(num_heads, tp)
        return rows.chunk(num_parts, dim=1)[self.groups.tp_rank * num_parts // tp]

    def join_heads(self, rows: Tensor, width: int) -> Tensor:
        """Return keys and values of all heads, (T, width), from those of this rank, for another stage.

        Under sequence parallelism these are this rank's tokens of the result.
        """
        tp = self.groups.tp_size
        if tp > 1:
            num_parts = width // rows.shape[1]
            all_ranks: Tensor = gather_from_tensor_model_parallel_region(rows, group=self.groups.tp)
            rows = all_ranks.view(len(rows), num_parts, tp // num_parts, -1)[:, :, 0].flatten(1)
        return scatter_to_sequence_parallel_region(rows, group=self.groups.tp) if self.sequence_parallel else rows

    def _mixer_spec(self, mixer: Mixer) -> Any:
        """Say to Megatron-core how to build a block's mixer."""
        if isinstance(mixer, Attention):
            return self._attention_spec(mixer)
        shape, groups = mixer, self.groups
        norm_config = replace(self.config, normalization="RMSNorm", layernorm_zero_centered_gamma=False)

        class MixerOfGroup(DeltaNetMixer):
            """The mixer for this group: as `NormOfGroup`, a class for 0.16, which 0.19 calls."""

            def __init__(self, config: TransformerConfig, **_: object) -> None:
                norm = HeadNorm(norm_config, shape.value_head_dim, config.layernorm_epsilon)
                super().__init__(shape, config, groups, norm)

        return MixerOfGroup

    def _attention_spec(self, attention: Attention) -> ModuleSpec:
        """Say to Megatron-core how to build a block's attention."""

        def build_qkv(*args: Any, bias: bool, **kwargs: Any) -> nn.Module:
            # Megatron-core gives qkv a bias whenever the other linears have one; here it is a setting of its own.
            inputs, _, *others = args  # those of Megatron-core's linear always have both keys and values
            linear = ColumnLinear(inputs, attention.first_width, *others, bias=attention.qkv_bias, **kwargs)
            if attention.qkv_bias and not attention.key_bias:
                linear.bias_mask = self._mask_without_keys(linear.bias)
            return cast(nn.Module, linear)

        def build_core_attention(**_: object) -> nn.Module:
            options = AttentionOptions(self.attention, attention.causal, scale=self._score_scale)
            return PackedAttention(options, self.fused_kernels)

        return ModuleSpec(
            module=GroupedAttention,
            params={
                "shape": attention,
                "attn_mask_type": AttnMaskType.causal if attention.causal else AttnMaskType.no_mask,
            },
            submodules=SelfAttentionSubmodules(
                linear_qkv=build_qkv,
                core_attention=build_core_attention,
                linear_proj=RowLinear,
                q_layernorm=self._head_norm,
                k_layernorm=IdentityOp if attention.reads_kv else self._head_norm,
            ),
        )

    def _mlp_spec(self, mlp: Mlp) -> Any:
        """Say to Megatron-core how to build a block's MLP."""
        if isinstance(mlp, MoeMlp):
            mixture, groups = mlp, self.groups

            class ExpertMlpOfGroup(ExpertMlp):
                """The mixture for this group: as `NormOfGroup`, a class for 0.16, which 0.19 calls."""

                def __init__(self, config: TransformerConfig, **_: object) -> None:
                    super().__init__(mixture, config, groups)

            return ExpertMlpOfGroup
        return compat.mlp_builder(MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear), mlp.ffn)

    def _mark_shards(self, block: PackedTransformerBlock, mlp: Mlp) -> None:
        """Say along which dimension tensor parallelism splits the weights of a block."""
        _mark(block.self_attention.first_linear, dim=0)
        _mark(block.self_attention.linear_proj, dim=1)
        parts: Iterable[Any] = (block.mlp,)
        if isinstance(block.mlp, ExpertMlp):
            parts = (*block.mlp.experts.held(), *((block.mlp.shared,) if block.mlp.shared is not None else ()))
        for part in parts:
            _mark(part.linear_fc1, dim=0, stride=2 if mlp.gated else 1)
            _mark(part.linear_fc2, dim=1)
        if self.block.attention.joint_qk_norm and isinstance(block.self_attention, GroupedAttention):
            _mark(block.self_attention.q_layernorm, dim=0)
            _mark(block.self_attention.k_layernorm, dim=0)

    def add_adapters(self, layer: nn.Module, lora: LoraShape, layer_name: str) -> None:
        """Give the linears of a layer that `lora` names their adapters, with uninitialized weights.

        Experts of other ranks are left out. `layer_name` is plan-independent.
        """
        modules = dict(layer.named_modules())
        adapters = [
            add_adapter(modules[name], lora, layer_name, name, self.groups.tp_rank)
            for name in lora.linears
            if name in modules or not is_of_expert(name)
        ]
        if lora.dropout:
            cast(HoldsDropping, layer).dropping = adapters

    def join_backward(self, block: nn.Module) -> None:
        """Let a block take part in the backward of experts, which train, also if this rank holds none that does."""
        assert isinstance(block.mlp, ExpertMlp), "other blocks have no experts"
        if not any(param.requires_grad for param in block.mlp.experts.parameters()):
            block.mlp.join_backward()

    @property
    def _score_scale(self) -> float | None:
        """Return the factor on scores; None for 1 / sqrt(head_dim)."""
        return None if self.query_scale is None else self.query_scale**-0.5

    def _mask_without_keys(self, bias: Tensor) -> Tensor:
        """Return zeros for the keys' part of this rank's shard of a joint bias, and ones for the rest."""
        attention = self.block.attention
        query_rows = attention.heads // attention.kv_heads * attention.head_dim
        rows_of_head = query_rows + 2 * attention.head_dim
        row = torch.arange(len(bias)) + self.groups.tp_rank * len(bias)
        is_key = (row % rows_of_head >= query_rows) & (row % rows_of_head < query_rows + attention.head_dim)
        return (~is_key).to(bias.dtype)

    @property
    def _head_norm(self) -> Any:
        """Say to Megatron-core how to build the norms of queries and of keys."""
        if self.block.attention.joint_qk_norm:
            tp_group = self.groups.tp

            class NormOfGroup(JointHeadNorm):
                """The norm for this group: 0.16 takes a class or a ModuleSpec here, 0.19 calls what it gets."""

                def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
                    super().__init__(config, hidden_size, eps, tp_group)

            return NormOfGroup
        return HeadNorm if self.block.attention.qk_norm else None

    def projector_norm(self, shape: LayerShape, width: int, eps: float | None) -> Norm:
        """Build a projector's own norm, which may be of another kind than those of its encoder."""
        normalization = "RMSNorm" if shape.rms_norm else "LayerNorm"
        is_zero_centered = shape.zero_centered_norms
        config = replace(self.config, normalization=normalization, layernorm_zero_centered_gamma=is_zero_centered)
        return Norm(config, width, self.norm_eps if eps is None else eps)

    def norm(self, width: int, on_sequence_shards: bool = False) -> Norm:
        """Build a norm over `width` features, of the unit's kind and with its epsilon.

        on_sequence_shards: under sequence parallelism the norm sees only this rank's shard of the tokens.
        """
        config = self.sequence_parallel_config if on_sequence_shards else self.config
        return Norm(config, width, self.norm_eps)

    def column_linear(self, inputs: int, outputs: int, bias: bool, gated: bool = False) -> nn.Module:
        """Build a linear whose outputs are split over the TP group; it returns `(output, None)`.

        gated: outputs are gates, then values, and each rank holds its part of both.
        """
        linear = ColumnLinear(inputs, outputs, config=self.config, init_method=None, bias=bias, tp_group=self.groups.tp)
        return _mark(linear, dim=0, stride=2 if gated else 1)

    def row_linear(self, inputs: int, outputs: int, bias: bool, splits_inputs: bool = False) -> nn.Module:
        """Build a linear whose inputs are split over the TP group; it returns `(output, None)`.

        splits_inputs: every rank calls it with all inputs, and the linear takes the rank's part itself.
        """
        linear = RowLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=None,
            bias=bias,
            input_is_parallel=not splits_inputs,
            skip_bias_add=False,
            tp_group=self.groups.tp,
        )
        return _mark(linear, dim=1)

    def vocab_embedding(self, rows: int, width: int) -> nn.Module:
        """Build an embedding table whose rows are split over the TP group."""
        table = VocabParallelEmbedding(rows, width, init_method=None, config=self.config, tp_group=self.groups.tp)
        return _mark(table, dim=0)

    def vocab_linear(self, width: int, rows: int, own_weight: bool) -> nn.Module:
        """Build the projection to the vocabulary, split over the TP group.

        Without `own_weight` the weight is an argument of each call.
        """
        linear = ColumnParallelLinear(
            width,
            rows,
            config=self.sequence_parallel_config,
            init_method=None,
            bias=False,
            skip_weight_param_allocation=not own_weight,
            tp_group=self.groups.tp,
        )
        return _mark(linear, dim=0) if own_weight else linear

    def copy_inputs(self, rows: Tensor) -> Tensor:
        """Return the inputs of a linear whose outputs are split: in backward, the group sums their gradients."""
        copied: Tensor = copy_to_tensor_model_parallel_region(rows, group=self.groups.tp)
        return copied

    def gather_inputs(self, shard: Tensor) -> Tensor:
        """Gather the shards (T / tp, width) of all ranks; in backward, each gets the summed gradient of its own."""
        rows: Tensor = gather_from_sequence_parallel_region(shard, group=self.groups.tp)
        return rows

    def losses_of_targets(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, logit_cap: float | None = None
    ) -> Tensor:
        """Return the cross-entropy (N,) of rows (N, hidden) against their targets; see `vocab_parallel_losses`."""
        return vocab_parallel_losses(hidden, weight, targets, vocab_size, self.groups.tp, logit_cap)

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """Gather the logits (T, vocab / tp) of all ranks of the TP group into (T, vocab)."""
        all_logits: Tensor = gather_from_tensor_model_parallel_region(logits, group=self.groups.tp)
        return all_logits

    def greedy_tokens(self, logits: Tensor, vocab_size: int, rules: LogitRules | None = None) -> Tensor:
        """Return the id below `vocab_size` of the largest of logits (T, vocab / tp), the same on all ranks: (T,) int64.

        `rules` change the logits first. The lowest of equally likely ids wins. Each rank sends two numbers for each
        token instead of its logits.
        """
        first_id = self.groups.tp_rank * logits.shape[1]
        is_padding = torch.arange(first_id, first_id + logits.shape[1], device=logits.device) >= vocab_size
        logits = logits.float() if rules is None else rules.apply(logits.float(), first_id)
        best, ids = logits.masked_fill(is_padding, float("-inf")).max(dim=-1)  # max takes the first of equals
        if self.groups.tp_size == 1:
            return ids
        candidate = torch.stack((best.double(), (ids + first_id).double()))
        candidates = [torch.empty_like(candidate) for _ in range(self.groups.tp_size)]
        dist.all_gather(candidates, candidate, group=self.groups.tp)
        all_logits, all_ids = torch.stack(candidates, dim=1)
        tokens: Tensor = all_ids.gather(0, all_logits.argmax(dim=0, keepdim=True))[0].long()
        return tokens


def set_tp_chunks(module: nn.Module, num_chunks: int) -> None:
    """Let the linears of all blocks in a module run in so many chunks of tokens."""
    for block in module.modules():
        if isinstance(block, PackedTransformerBlock):
            for linear in block.modules():
                if isinstance(linear, ColumnLinear | RowLinear):
                    linear.num_chunks = num_chunks


def _mark(module: nn.Module, dim: int, stride: int = 1) -> nn.Module:
    """Mark the weight as split along `dim`, and the bias too if the outputs are split.

    Megatron-core does so only when it initializes weights itself. Every rank holds all of a bias that follows split
    inputs.
    """
    marked = [module.weight] if dim == 1 else [module.weight, getattr(module, "bias", None)]
    for param in marked:
        if isinstance(param, nn.Parameter):
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = dim  # type: ignore[attr-defined]
            param.partition_stride = stride  # type: ignore[attr-defined]
    return module
