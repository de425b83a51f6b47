"""An encoder's segments run correctly *inside* an LLM layer's forward and backward, with detached boundaries.

Moving encoder work into the gaps of tensor-parallel LLM layers relies on this: between a layer's attention and
its MLP, in both directions, layers of the encoder work on other microbatches, and no result changes. Recomputing
the host or the segments changes nothing either, if the host's checkpoint does not see what the segments save.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.stage_module import StageModule
from tests.models.factory import images, randomize, settings, stage, text

MODEL = settings()
NUM_SEGMENTS = 4  # patches, two blocks, projector: a layer each
HOST = "2"  # the LLM's layer, a block, that hosts them


class Encoder:
    """The vision unit cut into segments of one layer, each with a graph of its own."""

    def __init__(self, recompute: Sequence[int]) -> None:
        self.segments = [stage(MODEL, "vision", (i, i + 1), recompute=recompute) for i in range(NUM_SEGMENTS)]
        for segment in self.segments:
            randomize(segment)
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.gradient: dict[int, Tensor] = {}

    def forward(self, mb: int, segment: int, inputs: EncoderInput) -> Tensor:
        hidden = None
        if segment:
            hidden = self.saved[mb, segment - 1][1].detach().requires_grad_()
        with torch.enable_grad(), _own_saved_tensors():
            output = self.segments[segment](hidden, inputs)
        self.saved[mb, segment] = (hidden, output)
        return output.detach()

    def backward(self, mb: int, segment: int) -> None:
        hidden, output = self.saved.pop((mb, segment))
        torch.autograd.backward(output, self.gradient[mb])
        if hidden is not None:
            assert hidden.grad is not None
            self.gradient[mb] = hidden.grad


def _own_saved_tensors() -> AbstractContextManager[None]:
    """Keep what the segment saves out of a host layer that is recomputed.

    Its checkpoint would take our tensors for its own, and fail when the recomputation saves fewer. Only the innermost
    hooks are asked.
    """
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def _between_attention_and_mlp(llm: StageModule, forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """Run `forward` once in the middle of the host layer's next forward, `backward` once in that of its backward."""
    todo = {"forward": forward, "backward": backward}

    def run(kind: str) -> None:
        if kind in todo:  # recomputation passes here a second time
            todo.pop(kind)()

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        run("forward")
        if args[0].requires_grad:
            args[0].register_hook(lambda _: run("backward"))

    llm.layers[HOST].mlp.linear_fc1.register_forward_pre_hook(hook)  # type: ignore[union-attr]


def _run(inside: bool, recompute: Sequence[int]) -> list[Tensor]:
    """Run microbatch 0 through encoder and LLM, with 1 forward and 2 backward meanwhile; return all results."""
    encoder = Encoder(recompute)
    llm = stage(MODEL, "llm", recompute=recompute)
    randomize(llm)
    pictures = [images((2, 4), seed=0), images((4, 4), (2, 2), seed=1), images((2, 2), seed=2)]
    outputs: dict[int, Tensor] = {}

    def go_forward(mb: int) -> None:
        for segment in range(NUM_SEGMENTS):
            outputs[mb] = encoder.forward(mb, segment, pictures[mb])

    def go_backward(mb: int) -> None:
        for segment in reversed(range(NUM_SEGMENTS)):
            encoder.backward(mb, segment)

    go_forward(0)
    go_forward(2)
    encoder.gradient[2] = torch.ones_like(outputs[2])
    if inside:
        _between_attention_and_mlp(llm, lambda: go_forward(1), lambda: go_backward(2))
    features = outputs[0].requires_grad_()
    loss = llm(None, text(9, 5, places=(2, 3)), {"vision": features})
    assert (1 in outputs) == inside
    loss.backward()
    assert ((2, 0) not in encoder.saved) == inside
    if not inside:
        go_forward(1)
        go_backward(2)
    assert features.grad is not None
    encoder.gradient |= {0: features.grad, 1: torch.ones_like(outputs[1])}
    go_backward(0)
    go_backward(1)
    numbers = [loss.detach(), outputs[1], features.grad]
    for module in (llm, *encoder.segments):
        for name, param in module.named_parameters():
            assert param.grad is not None, f"{module.unit}.{name} has no gradient"
            numbers.append(param.grad)
    return numbers


@pytest.mark.parametrize("recompute", [(), (1, 2)], ids=["kept", "recomputed"])
def test_encoder_segments_run_inside_an_llm_layer(recompute: Sequence[int]) -> None:
    apart, inside = _run(False, recompute), _run(True, recompute)
    assert len(apart) == len(inside) > 30
    assert all(torch.equal(value, same_value) for value, same_value in zip(apart[:3], inside[:3], strict=True))
    for value, same_value in zip(
        apart[3:], inside[3:], strict=True
    ):  # gradients of microbatches add up in another order
        torch.testing.assert_close(value, same_value, rtol=1e-6, atol=1e-6)
