"""Copies of ranks' parts of a checkpoint in host memory."""

import math
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import Shard, ShardSpec, Snapshot, memory_copies, tensorfile
from mmtrain.checkpoint.folders import tensor_file
from mmtrain.checkpoint.memory_copies import CopyRecord, slot_folder

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6)
NORM = torch.arange(3, dtype=torch.bfloat16)  # an odd number of bytes behind the last word


def shards_of(rank: int) -> list[Shard]:
    """Return what one of two ranks saves: half of the rows of a weight, and one of them a norm, too."""
    rows = Shard("weight", ShardSpec((4, 6), 0, 2 * rank, 2 * rank + 2), WEIGHT[2 * rank : 2 * rank + 2])
    return [rows] if rank else [Shard("norm", ShardSpec((3,)), NORM), rows]


def copy(root: Path, rank: int, step: int, slot: int) -> CopyRecord:
    """Copy what a rank holds, as training does."""
    shards = tensorfile.in_file_order(shards_of(rank))
    folder = slot_folder(root, slot)
    memory_copies.invalidate(folder, rank)
    memory = memory_copies.map_file(folder / tensor_file(rank), memory_copies.num_file_bytes(shards))
    memory_copies.write_header(memory, tensorfile.header_of(shards))
    for place, shard in zip(memory_copies.tensors_in(memory, shards), shards, strict=True):
        place.copy_(shard.tensor)
    record = CopyRecord.of(Snapshot(step, shards, {"next_step": step}, {"rng": rank}), "course", rank, 2, memory)
    memory_copies.commit(folder, record)
    return record


def test_copies_of_all_ranks_read_like_a_checkpoint_in_any_sharding(tmp_path: Path) -> None:
    for rank in range(2):
        copy(tmp_path, rank, 7, slot=1)
    folder = slot_folder(tmp_path, 1)
    assert memory_copies.find_copied_ranks(tmp_path) == [(1, 0), (1, 1)]
    records = [memory_copies.read_record(folder, rank) for rank in range(2)]
    checkpoint = memory_copies.open_copy(folder, [record for record in records if record is not None])
    assert (checkpoint.step, checkpoint.world_size, checkpoint.state) == (7, 2, {"next_step": 7})
    assert torch.equal(checkpoint.read("norm", ShardSpec((3,))), NORM)
    for columns in ((0, 3), (3, 6)):
        piece = checkpoint.read("weight", ShardSpec((4, 6), 1, *columns))
        assert torch.equal(piece, WEIGHT[:, slice(*columns)])


def test_only_files_that_are_needed_are_named(tmp_path: Path) -> None:
    records = [copy(tmp_path, rank, 7, slot=0) for rank in range(2)]
    checkpoint = memory_copies.open_copy(slot_folder(tmp_path, 0), records)
    below = ("weight", ShardSpec((4, 6), 0, 2, 4))
    assert memory_copies.files_needed(checkpoint, [below]) == {1}
    assert memory_copies.files_needed(checkpoint, [("norm", ShardSpec((3,)))]) == {0}
    assert memory_copies.files_needed(checkpoint, [("weight", ShardSpec((4, 6), None, flat=(0, 12)))]) == {0}
    assert memory_copies.files_needed(checkpoint, [("weight", ShardSpec((4, 6)))]) == {0, 1}


def test_every_changed_bit_makes_a_copy_unusable(tmp_path: Path) -> None:
    copy(tmp_path, 0, 7, slot=0)
    folder = slot_folder(tmp_path, 0)
    path = folder / tensor_file(0)
    content = path.read_bytes()
    for number in range(0, 8 * len(content), 13):  # each bit of a byte comes up
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        path.write_bytes(changed)
        assert memory_copies.read_record(folder, 0) is None
    path.write_bytes(content[:-1])
    assert memory_copies.read_record(folder, 0) is None
    path.write_bytes(content)
    assert memory_copies.read_record(folder, 0) is not None
    record = memory_copies.record_file(folder, 0)
    content = record.read_bytes()
    for number in range(0, 8 * len(content), 13):
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        record.write_bytes(changed)
        assert memory_copies.read_record(folder, 0) is None


def test_a_copy_that_is_being_overwritten_is_none(tmp_path: Path) -> None:
    copy(tmp_path, 0, 7, slot=0)
    memory_copies.invalidate(slot_folder(tmp_path, 0), 0)
    assert memory_copies.find_copied_ranks(tmp_path) == []
    assert list(memory_copies.ranks_in(slot_folder(tmp_path, 0))) == [0]
    memory_copies.remove_all(tmp_path)
    assert not tmp_path.exists()


def test_files_whose_size_stays_are_used_again_and_others_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "copy-0" / tensor_file(0)
    memory_copies.map_file(path, 64).fill_(3)
    number = path.stat().st_ino
    assert memory_copies.map_file(path, 64).sum() == 3 * 64
    assert path.stat().st_ino == number
    assert memory_copies.map_file(path, 128).sum() == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 64])
def test_the_sum_is_that_of_little_endian_words(num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    content = bytes(memory.tolist())
    words = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(math.ceil(num_bytes / 8))]
    assert memory_copies.bit_sum(memory) == sum(words) % 2**64
