"""The parts of a tensor that a checkpoint's metadata names: each element is in one of them."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from simplefsdp._torch.checkpoints import storage_info
from simplefsdp.checkpoints.metadata import metadata_of
from simplefsdp.checkpoints.pickled import read_pickle

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def metadata_with(size: tuple[int, ...], boxes: list[Box]) -> bytes:
    """The metadata of one tensor in these parts."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in boxes]
    properties = TensorProperties(torch.uint8)
    tensors = {"w": TensorStorageMetadata(properties, torch.Size(size), chunks)}
    places = {MetadataIndex("w", c.offsets): storage_info("x", 0, 2**40, None) for c in chunks}
    return pickle.dumps(Metadata(tensors, storage_data=places, storage_meta=StorageMeta()))


def is_read(data: bytes) -> bool:
    try:
        return len(metadata_of(data).state_dict_metadata) == 1
    except ValueError as error:
        if "overlap or leave gaps" not in str(error):
            raise
        return False


@pytest.mark.parametrize(
    ("size", "boxes", "fits"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,)), ((4,), (0,))], True),  # two empty shards
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        ((4,), [((0,), (3,)), ((2,), (1,))], False),
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (0, 2)), ((0, 0), (0, 2))], True),
        # A pinwheel, which no cut across the whole tensor takes apart.
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)),
                  ((1, 1), (1, 1))], True),
        # Of the volume of the tensor, together.
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], False),
        ((2, 2, 2), [((0, 0, 0), (2, 2, 1)), ((0, 0, 0), (2, 1, 2))], False),
    ],
)  # fmt: skip
def test_parts_cover_their_tensor(size: tuple[int, ...], boxes: list[Box], fits: bool) -> None:
    assert is_read(metadata_with(size, boxes)) == fits


def test_parts_at_random_cover_their_tensor_or_are_refused() -> None:
    """As found by looking at each element."""
    rng, counted = random.Random(0), {True: 0, False: 0}
    for _ in range(2000):
        size = tuple(rng.randrange(1, 4) for _ in range(rng.choice([1, 2, 2])))
        boxes = []
        covered = torch.zeros(size)
        for _ in range(rng.randrange(1, 5)):
            at = tuple(rng.randrange(n) for n in size)
            box = at, tuple(rng.randrange(1, n - a + 1) for a, n in zip(at, size, strict=True))
            boxes.append(box)
            covered[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] += 1
        fits = bool((covered == 1).all())
        assert is_read(metadata_with(size, boxes)) == fits, (size, boxes)
        counted[fits] += 1
    assert min(counted.values()) > 100


def test_parts_with_more_corners_than_bytes_are_refused() -> None:
    """Each dimension that is split doubles the corners."""
    size = (2,) * 30
    boxes = [((0,) * 30, (1,) * 30)] * 2
    with pytest.raises(ValueError, match="more parts of tensors than it has bytes"):
        metadata_of(metadata_with(size, boxes))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02(i" + b"os\nsystem\n.",  # INST
        b"\x80\x02P1\n.",  # PERSID
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",  # BYTEARRAY8, of memory that there is not
        b"\x80\x02U\x01a.",  # SHORT_BINSTRING
        b"\x80\x02]K\x01K\x02R.",  # a call of what is no function
        b"\x80\x02}(K\x01\x85K\x02u.",  # a tuple as a key, whose hash may end the process
        b"\x80\x02}}K\x01K\x02sb.",  # BUILD of what is no instance
        b"\x80\x02]",
        b"",
    ],
)
def test_instructions_that_no_data_needs_are_damage(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it is damaged$"):
        read_pickle(data, ())
