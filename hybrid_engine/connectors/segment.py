"""One file of the disk tier: a few stored things in a safetensors file, each with a checksum that proves it.

The format is plain safetensors (https://github.com/huggingface/safetensors): the length of a JSON header in 8 bytes,
the header, then the bytes. It is read with `pread`, not mapped: a file that somebody cuts short is then a short read
and not the end of the process. Nothing in a file is believed: sizes are compared with the file's own, a thing's name
and bytes with a keyed checksum, and a checkpoint's tokens with its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybrid_engine.transfer_plan import BlockKey, CheckpointKey, StoreKey

SUFFIX = ".safetensors"
MARK = "hybrid-engine-cache"
VERSION = "1"
MAX_HEADER_BYTES = 64 << 20
_LENGTH_BYTES = 8
_NOT_OURS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class SegmentError(Exception):
    """A file can't be used; its message says why. Never leaves the disk tier."""


class Place(NamedTuple):
    """Where a thing's bytes lie in a file, and their checksum."""

    offset: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Segment:
    """What stands in one file."""

    name: str
    """The file's name: a digest of the names of what it holds."""
    num_bytes: int
    places: Mapping[StoreKey, Place]


def segment_name(keys: Sequence[StoreKey]) -> str:
    """Return the name of the file that holds these things: the same things, the same file."""
    digest = blake2b(digest_size=16)
    for key in keys:
        digest.update(key.name.encode() + b"\n")
    return digest.hexdigest() + SUFFIX


def is_segment_name(name: str) -> bool:
    """Return whether a file is called as one of ours."""
    stem = name.removesuffix(SUFFIX)
    return stem != name and len(stem) == 32 and all(letter in "0123456789abcdef" for letter in stem)


def write_segment(folder: Path, items: Sequence[tuple[StoreKey, np.ndarray]], *, secret: bytes) -> Segment:
    """Write things to a file that is there whole or not at all, whatever happens meanwhile. Raises OSError."""
    name = segment_name([key for key, _ in items])
    header, places = _make_header(items, secret)
    # The writer's number tells a file that somebody is still writing from one that a dead process has left.
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for _, payload in items:
                file.write(payload.data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    start = _LENGTH_BYTES + len(header)
    moved = {key: place._replace(offset=start + place.offset) for key, place in places.items()}
    return Segment(name, start + sum(len(payload) for _, payload in items), moved)


def read_segment(path: Path) -> Segment:
    """Read what a file says that it holds. Raises SegmentError, or OSError when it is gone."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
            raise SegmentError(f"it has {num_bytes} bytes, its header should have {length}")
        header = _parse(file.read(length))
    start = _LENGTH_BYTES + length
    try:
        metadata = header.pop("__metadata__")
        if metadata[MARK] != VERSION:
            raise SegmentError(f"it is of version {metadata[MARK]}, not {VERSION}")
        checksums, tails = json.loads(metadata["checksums"]), json.loads(metadata["checkpoints"])
        places = {
            _key_of(name, tails): Place(start + entry["data_offsets"][0], _length(entry), _text(checksums[name]))
            for name, entry in header.items()
        }
    except _NOT_OURS as error:
        raise SegmentError(f"its header isn't one of ours ({type(error).__name__}: {error})") from error
    end = max((place.offset + place.num_bytes for place in places.values()), default=start)
    if end != num_bytes:
        raise SegmentError(f"it has {num_bytes} bytes, should have {end}")
    return Segment(path.name, num_bytes, places)


def read_payload(path: Path, key: StoreKey, place: Place, *, secret: bytes) -> np.ndarray:
    """Return the bytes of one thing, uint8. Raises SegmentError, or OSError when the file is gone."""
    payload = np.empty(place.num_bytes, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(place.offset)
        num_read = file.readinto(payload.data)
        while num_read < place.num_bytes and (more := file.readinto(payload.data[num_read:])):
            num_read += more
    if num_read < place.num_bytes:
        raise SegmentError(f"{key.name} ends after {num_read} of {place.num_bytes} bytes")
    if not compare_digest(_checksum(key.name, payload, secret), place.checksum):
        raise SegmentError(f"{key.name} is not what was written: its checksum is another one")
    return payload


def _make_header(items: Sequence[tuple[StoreKey, np.ndarray]], secret: bytes) -> tuple[bytes, dict[StoreKey, Place]]:
    places: dict[StoreKey, Place] = {}
    offset = 0
    for key, payload in items:
        places[key] = Place(offset, len(payload), _checksum(key.name, payload, secret))
        offset += len(payload)
    tails = {
        key.name: [key.parent.hex(), list(key.tail), key.position] for key in places if isinstance(key, CheckpointKey)
    }
    header: dict[str, Any] = {
        "__metadata__": {
            MARK: VERSION,
            "checksums": json.dumps({key.name: place.checksum for key, place in places.items()}),
            "checkpoints": json.dumps(tails),
        }
    }
    for key, place in places.items():
        end = place.offset + place.num_bytes
        header[key.name] = {"dtype": "U8", "shape": [place.num_bytes], "data_offsets": [place.offset, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # What follows the header begins at a multiple of 8, as the format asks.
    return text + b" " * (-len(text) % 8), places


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SegmentError(f"its header is no JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise SegmentError("its header isn't one of ours")
    if MARK not in header["__metadata__"]:
        raise SegmentError("somebody else wrote it")
    return header


def _key_of(name: str, tails: Mapping[str, Any]) -> StoreKey:
    key: StoreKey
    if name in tails:
        parent, tail, position = tails[name]
        key = CheckpointKey(bytes.fromhex(parent), tuple(map(int, tail)), int(position))
    else:
        group_id, _, digest = name.partition(".")
        key = BlockKey(int(group_id), bytes.fromhex(digest))
    if key.name != name:
        raise ValueError(f"{name} names something else than it says")
    return key


def _length(entry: Mapping[str, Any]) -> int:
    start, end = entry["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError(f"bytes {start} to {end}")
    return end - start


def _text(checksum: Any) -> str:
    if not (isinstance(checksum, str) and checksum.isascii()):
        raise ValueError(f"a checksum is {checksum!r}")
    return checksum


def _checksum(name: str, payload: np.ndarray, secret: bytes) -> str:
    digest = blake2b(name.encode() + b"\n", key=secret, digest_size=16, person=b"cache-segment")
    digest.update(payload.data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
