"""The arithmetic of the layer that embeds log-mel frames, on a rank that holds all of it.

Two convolutions over time are GEMMs over three frames side by side. Three convolutions over time and mel bands, each of
which halves both, are followed by a linear over all channels and bands of a token. Widths are numbers for each token.
"""

from mmtrain.costs.part_records import Gemm
from mmtrain.models.shapes.layer_shape import LayerShape

_KERNEL = 3  # of both convolutions over time
_KERNEL_2D = 3 * 3


def gemms(layer: LayerShape, tokens: int) -> tuple[Gemm, ...]:
    """Return the GEMMs of a forward, in order."""
    media, hidden = layer.media, layer.hidden
    channels = media.conv_channels
    if not channels:
        return (Gemm(2 * tokens, hidden, _KERNEL * media.mel_bins), Gemm(tokens, hidden, _KERNEL * hidden))
    first, second, third = _conv_places(layer)
    return (
        Gemm(first * tokens, channels, _KERNEL_2D),
        Gemm(second * tokens, channels, _KERNEL_2D * channels),
        Gemm(third * tokens, channels, _KERNEL_2D * channels),
        Gemm(tokens, hidden, third * channels),
    )


def num_parameters(layer: LayerShape) -> int:
    """Return the number of parameters: convolutions with their biases, the linear, learned positions."""
    media, hidden, bias = layer.media, layer.hidden, int(layer.linear_bias)
    if not media.conv_channels:
        convolutions = _KERNEL * (media.mel_bins + hidden) * hidden + 2 * bias * hidden
    else:
        convolutions = sum(gemm.num_weights for gemm in gemms(layer, 0)) + 3 * bias * media.conv_channels
    return convolutions + media.position_rows * hidden


def saved_width(layer: LayerShape) -> int:
    """Return the numbers that stay from forward to backward: inputs of convolutions, linear and activations.

    Behind a convolution over time and mel bands, what lies beyond a clip becomes zero, which needs a copy.
    """
    media, hidden = layer.media, layer.hidden
    if not media.conv_channels:
        return _KERNEL * (2 * media.mel_bins + hidden) + 3 * hidden
    return media.frames_per_token * media.mel_bins + 2 * sum(_conv_places(layer)) * media.conv_channels


def elementwise_width(layer: LayerShape) -> int:
    """Return the numbers that element-wise work of a forward reads and writes: copies, activations, positions."""
    media, hidden = layer.media, layer.hidden
    if not media.conv_channels:
        return 12 * media.mel_bins + 14 * hidden
    first, second, third = _conv_places(layer)
    activated = 2 * (first + second + third) + 2 * (first + second) + 2 * third  # and zeros, or the linear's input
    return 4 * media.frames_per_token * media.mel_bins + activated * media.conv_channels + 5 * hidden


def _conv_places(layer: LayerShape) -> tuple[int, int, int]:
    """Return the places behind each of three convolutions that belong to a token: in time, times mel bands."""
    first, second, third = layer.media.conv_bands
    return 4 * first, 2 * second, third
