"""Tiny models of architectures that no family covers, written by `transformers`, with a tokenizer and conversations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tests.flow.tiny_families import TINY_FAMILIES
from tests.models.factory import randomize

VOCAB = 512


def _sizes(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": 2, "max_position_embeddings": 512, **changes,
    }  # fmt: skip


def olmo2() -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**_sizes()))


def phi3() -> nn.Module:
    """Make a model with joint projections, and a window that samples exceed."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_sizes(sliding_window=12)))


def starcoder2() -> nn.Module:
    """Make a model with biases, layer norms and an MLP without gate."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    return Starcoder2ForCausalLM(Starcoder2Config(**_sizes(tie_word_embeddings=True)))


def granite() -> nn.Module:
    """Make a model that scales embeddings, residuals, scores and logits."""
    from transformers import GraniteConfig, GraniteForCausalLM

    scales = {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    }  # fmt: skip
    return GraniteForCausalLM(GraniteConfig(**_sizes(**scales)))


def gemma2() -> nn.Module:
    """Make a model that caps scores and logits, with windows in every second block."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
    return Gemma2ForCausalLM(Gemma2Config(**_sizes(**caps, sliding_window=12, head_dim=16, query_pre_attn_scalar=20)))


def gpt2() -> nn.Module:
    """Make a model with learned positions, and one matrix for embedding and head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=512, vocab_size=VOCAB, eos_token_id=2)
    )


def mamba() -> nn.Module:
    """Make a model whose mixer has a state, which packed samples would share."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            hidden_size=48, num_hidden_layers=2, state_size=8, vocab_size=VOCAB, eos_token_id=2, pad_token_id=None
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "olmo2": olmo2,
    "phi3": phi3,
    "starcoder2": starcoder2,
    "granite": granite,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "mamba": mamba,
}


def write_folder(name: str, folder: Path) -> nn.Module:
    """Write a model with the tokenizer and the conversations of a tiny Llama; return it."""
    TINY_FAMILIES["llama"].write(folder)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).unlink()
    model = MODELS[name]()
    randomize(model)
    model.eval().save_pretrained(folder)
    return model
