"""Pixels that are normalized on the device."""

import numpy as np
import pytest
import torch

from mmtrain.models.stage.stage_inputs import EncoderInput, PixelScale

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
CPU = torch.device("cpu")


def test_every_byte_becomes_what_a_processor_makes_of_it() -> None:
    patches = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 12))
    per_feature = [np.repeat(np.array(values, dtype=np.float32), 4) for values in (MEAN, STD)]
    expected = (patches.astype(np.float32) / np.float32(255) - per_feature[0]) / per_feature[1]
    scaled = PixelScale.of(MEAN, STD, 12, CPU).normalize(torch.from_numpy(patches))
    np.testing.assert_allclose(scaled.numpy(), expected, rtol=0, atol=1e-6)


def test_items_that_cannot_be_seen_are_zeros_and_not_black() -> None:
    cells = torch.zeros(5, 12, dtype=torch.uint8)
    inputs = EncoderInput((5,), (1,), cells, PixelScale.of(MEAN, STD, 12, CPU), blank_cells=((1, 3),))
    numbers = inputs.numbers(torch.bfloat16)
    assert numbers is not None
    assert numbers.dtype == torch.bfloat16
    assert (numbers == 0).all(dim=1).tolist() == [False, True, True, False, False]


def test_numbers_stay_as_they_are() -> None:
    cells = torch.randn(3, 4)
    assert EncoderInput((3,), (1,), cells).numbers(torch.float32) is cells
    assert EncoderInput((3,), (1,)).numbers(torch.float32) is None
    with pytest.raises(AssertionError):
        EncoderInput((3,), (1,), cells.byte()).numbers(torch.float32)
