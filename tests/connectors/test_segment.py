"""One file of the disk tier: safetensors that anybody reads, and nothing in it believed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored_things import SECRET, block, checkpoint, payload

from hybrid_engine.connectors.segment import (
    MARK,
    VERSION,
    SegmentError,
    is_segment_name,
    read_payload,
    read_segment,
    write_segment,
)

ITEMS = [(block(1), payload(1)), (block(2, group_id=1), payload(2, 77)), (checkpoint(3), payload(3, 5))]


@pytest.fixture
def written(tmp_path):
    return tmp_path / write_segment(tmp_path, ITEMS, secret=SECRET).name


def test_what_was_written_is_read_back(written):
    segment = read_segment(written)
    assert list(segment.places) == [key for key, _ in ITEMS]
    for key, stored in ITEMS:
        assert np.array_equal(read_payload(written, key, segment.places[key], secret=SECRET), stored)


def test_the_writer_and_a_reader_know_the_same_of_a_file(tmp_path):
    segment = write_segment(tmp_path, ITEMS, secret=SECRET)
    assert read_segment(tmp_path / segment.name) == segment


def test_the_safetensors_library_reads_a_file(written):
    tensors = load_file(written)
    assert {key.name: stored.tolist() for key, stored in ITEMS} == {k: v.tolist() for k, v in tensors.items()}


def test_a_file_is_named_by_what_it_holds(tmp_path, written):
    assert is_segment_name(written.name)
    assert write_segment(tmp_path, ITEMS, secret=b"other").name == written.name
    assert write_segment(tmp_path, ITEMS[:2], secret=SECRET).name != written.name
    assert not is_segment_name("model.safetensors")


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 100, -1], ids=str)
def test_a_file_cut_short_is_refused(written, num_bytes):
    content = written.read_bytes()
    written.write_bytes(content[:num_bytes])
    with pytest.raises(SegmentError, match="bytes"):
        read_segment(written)


def test_a_file_with_bytes_at_its_end_is_refused(written):
    written.write_bytes(written.read_bytes() + b"more")
    with pytest.raises(SegmentError, match="should have"):
        read_segment(written)


DEEP = "[" * 200_000
GOOD = {"data_offsets": [0, 4], "checksum": "ab", "tails": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0.0, 4.0]},
        {"data_offsets": [0]},
        {"checksum": 7},
        {"checksum": "\u00e4"},
        {"tails": DEEP},
        {"tails": {block(1).name: ["", [], float("inf")]}},
    ],
    ids=["broken offsets", "one offset", "a number", "no ASCII", "too deep", "an endless position"],
)
def test_a_header_that_somebody_made_up_is_refused(tmp_path, change):
    write_header(tmp_path / "made up", **GOOD)
    read_segment(tmp_path / "made up")
    write_header(tmp_path / "made up", **GOOD | change)
    with pytest.raises(SegmentError, match="isn't one of ours"):
        read_segment(tmp_path / "made up")


def write_header(path, *, data_offsets, checksum, tails) -> None:
    """Write a file of one thing, four bytes long, with these facts in its header."""
    name = block(1).name
    metadata = {
        MARK: VERSION,
        "checksums": json.dumps({name: checksum}),
        "checkpoints": tails if isinstance(tails, str) else json.dumps(tails),
    }
    header = json.dumps({"__metadata__": metadata, name: {"data_offsets": data_offsets}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"data")


def test_a_header_nested_without_end_is_refused(written):
    header = DEEP.encode()
    written.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SegmentError, match="no JSON"):
        read_segment(written)


def test_a_file_cut_short_after_it_was_listed_is_refused_when_read(written):
    segment = read_segment(written)
    written.write_bytes(written.read_bytes()[:-3])
    with pytest.raises(SegmentError, match="ends after 2 of 5 bytes"):
        read_payload(written, checkpoint(3), segment.places[checkpoint(3)], secret=SECRET)


def test_every_changed_byte_of_a_file_is_noticed(written):
    content = bytearray(written.read_bytes())
    for index in range(0, len(content), 19):
        written.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        assert wrongly_read(written) == [], f"byte {index} of {len(content)}"


def wrongly_read(path) -> list:
    """What is read from a file and isn't what was written under its key."""
    wrong, right = [], dict(ITEMS)
    try:
        places = read_segment(path).places
    except SegmentError:
        return wrong
    for key, place in places.items():
        try:
            found = read_payload(path, key, place, secret=SECRET)
        except SegmentError:
            continue
        if key not in right or not np.array_equal(found, right[key]):
            wrong.append(key)
    return wrong


def test_a_file_of_another_key_is_refused(written):
    places = read_segment(written).places
    with pytest.raises(SegmentError, match="checksum"):
        read_payload(written, block(1), places[block(1)], secret=b"another key")


def test_bytes_under_another_things_name_are_refused(tmp_path):
    one = read_segment(tmp_path / write_segment(tmp_path, ITEMS, secret=SECRET).name)
    with pytest.raises(SegmentError, match="checksum"):
        read_payload(tmp_path / one.name, block(9), one.places[block(1)], secret=SECRET)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_segment(tmp_path / "folder" / "gone", ITEMS, secret=SECRET)
    assert list((tmp_path / "folder").iterdir()) == []
