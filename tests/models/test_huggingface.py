"""The same weights give the same logits as in `transformers`: LLaVA (CLIP + Llama) and Qwen2."""

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe.model_settings import ModelSettings
from tests.models.factory import randomize, stage
from tests.models.huggingface import clip_unit, llm_unit, load

IMAGE_TOKEN = 99
SIDE, PATCH = 4, 4  # patches on an image's side, pixels on a patch's side


@pytest.fixture(scope="module")
def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    clip = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE * PATCH,
        patch_size=PATCH, projection_dim=16,
    )  # fmt: skip
    llama = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=clip, text_config=llama, image_token_index=IMAGE_TOKEN, vision_feature_layer=-2)
    )
    randomize(model)  # biases and norms away from 0 and 1
    assert clip.hidden_act == "quick_gelu"
    assert model.config.projector_hidden_act == "gelu"
    return model.eval()


def _llava_settings() -> ModelSettings:
    """Return the settings of the tiny LLaVA: features come from the last block but one, without a last norm."""
    return ModelSettings.model_validate(
        {
            "vision": {
                "layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "patch": PATCH, "activation": "quick_gelu",
                "norm_eps": 1e-5, "patch_bias": False, "positions": "grid", "max_side": SIDE, "class_token": True,
                "pre_norm": True, "post_norm": False, "projector": {"activation": "gelu"},
            },
            "llm": {
                "layers": 2, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 100, "rope_base": 5000.0,
                "norm_eps": 1e-5,
            },
        }
    )  # fmt: skip


def _samples() -> tuple[list[Tensor], list[Tensor]]:
    """Make token ids of three samples, and images of the first and the last, (3, height, width) each."""
    generator = torch.Generator().manual_seed(7)

    def words(n: int) -> Tensor:
        return torch.randint(0, IMAGE_TOKEN, (n,), generator=generator)

    image = torch.full((SIDE * SIDE,), IMAGE_TOKEN)
    ids = [torch.cat([words(3), image, words(6)]), words(9), torch.cat([image, words(4)])]
    pixels = [torch.randn(3, SIDE * PATCH, SIDE * PATCH, generator=generator) for _ in range(2)]
    return ids, pixels


def _patches(image: Tensor) -> Tensor:
    """Cut (3, height, width) into (patches, 3 * patch * patch), features ordered (channel, y, x)."""
    cut = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # (3, rows, cols, y, x)
    return cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def test_llava_logits(llava: nn.Module) -> None:
    ids, pixels = _samples()
    expected = []
    with torch.no_grad():
        for sample, image in zip(ids, (pixels[0], None, pixels[1]), strict=True):
            extra = {} if image is None else {"pixel_values": image[None]}
            expected.append(llava(input_ids=sample[None], **extra).logits[0])

    model = _llava_settings()
    state = llava.state_dict()
    vision, llm = stage(model, "vision"), stage(model, "llm")
    load(vision, clip_unit(state, num_blocks=2, heads=4))
    text_state = {name.replace("model.language_model.", "model."): value for name, value in state.items()}
    load(llm, llm_unit(text_state, num_blocks=2, kv_heads=2))
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    with torch.no_grad():
        features = vision(None, EncoderInput((SIDE,) * 2, (SIDE,) * 2, torch.cat([_patches(p) for p in pixels])))
        inputs = TextInput(tuple(len(sample) for sample in ids), packed, None, {"vision": places})
        logits = llm.logits(None, inputs, {"vision": features})
    assert features.shape == (2 * SIDE * SIDE, 48)
    difference = (logits[:, :100] - torch.cat(expected)).abs().max()
    assert difference < 1e-4, f"logits differ by {difference:.2e}"
    assert torch.cat(expected).std() > 0.1  # else the comparison would prove nothing


def test_qwen2_logits_and_gradients() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=100, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen2ForCausalLM(config)
    randomize(theirs)
    model = ModelSettings.model_validate(
        {
            "llm": {
                "layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 96, "vocab": 100, "rope_base": 1e6,
                "norm_eps": 1e-6, "qkv_bias": True, "tie_embeddings": True,
            }
        }
    )  # fmt: skip
    ours = stage(model, "llm")
    load(ours, llm_unit(theirs.state_dict(), num_blocks=2, kv_heads=2, bias=True, tied=True))
    ids = torch.randint(0, 100, (11,), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[1:], torch.tensor([-100])])

    expected = theirs(input_ids=ids[None]).logits[0]
    inputs = TextInput((11,), ids, labels)
    assert (ours.logits(None, inputs)[:, :100] - expected).abs().max() < 1e-4

    nn.functional.cross_entropy(expected, labels, reduction="sum").backward()
    logits = ours.logits(None, inputs)[:, :100]
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    grads["lm_head.weight"] = grads["model.embed_tokens.weight"]
    expected_grads = llm_unit(grads, num_blocks=2, kv_heads=2, bias=True, tied=True)
    for name, param in ours.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(
            param.grad[: len(expected_grads[name])],
            expected_grads[name],
            rtol=1e-3,
            atol=1e-3 * expected_grads[name].abs().max().item(),
        )
