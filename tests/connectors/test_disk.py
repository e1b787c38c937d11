"""The disk tier: restarts, other processes, bad files, a full disk."""

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from stored_things import SECRET, block, checkpoint, payload, store

from hybrid_engine.connectors import disk as disk_module
from hybrid_engine.connectors import segment as segment_module


def test_a_restart_finds_everything(open_disk):
    first = open_disk()
    keys = [block(1), block(1, group_id=1), checkpoint(2)]
    store(first, *keys)
    again = open_disk()
    assert set(again.keys()) == set(keys)
    assert [again.get(key).tolist() for key in keys] == [payload(number).tolist() for number in range(3)]


def test_a_thing_can_be_read_before_it_is_written(open_disk, monkeypatch):
    monkeypatch.setattr(disk_module, "GATHER_SECONDS", 60)
    tier = open_disk()
    tier.put(block(1), payload(1))
    assert block(1) in tier
    assert np.array_equal(tier.get(block(1)), payload(1))
    assert not list(tier.folder.iterdir())


def test_things_that_come_together_share_a_file(open_disk):
    tier = open_disk()
    for number in range(100):
        tier.put(block(number), payload(number))
    tier.flush()
    assert len(list(tier.folder.glob("*.safetensors"))) <= 3


def test_what_is_here_already_is_not_written_again(open_disk):
    tier = open_disk()
    files = store(tier, block(1), block(1))
    assert len(files) == 1


def test_another_process_sees_what_was_written_and_what_was_removed(open_disk):
    ours, theirs = open_disk(), open_disk()
    (file,) = store(theirs, block(1))
    ours.refresh()
    assert ours.get(block(1)) is not None
    file.unlink()
    ours.refresh()
    assert block(1) not in ours


def test_a_file_that_another_process_removed_is_a_miss(open_disk, caplog):
    tier = open_disk()
    (file,) = store(tier, block(1))
    file.unlink()
    assert tier.get(block(1)) is None
    assert block(1) not in tier
    assert not caplog.records


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "empty"])
def test_a_bad_file_is_a_miss_with_one_line_and_can_be_written_again(open_disk, caplog, damage):
    first = open_disk()
    (file,) = store(first, block(1))
    first.close()
    content = file.read_bytes()
    changed = content[:-4] + bytes([content[-4] ^ 1]) + content[-3:]
    foreign = (2).to_bytes(8, "little") + b"{}"
    file.write_bytes({"cut": content[:-1], "changed": changed, "foreign": foreign, "empty": b""}[damage])
    tier = open_disk()
    with caplog.at_level(logging.WARNING):
        assert [tier.get(block(1)) for _ in range(3)] == [None] * 3
    assert len(caplog.records) <= 1
    store(tier, block(1))
    assert np.array_equal(open_disk().get(block(1)), payload(0))


def test_a_bad_file_is_reported_by_name_and_reason(open_disk, caplog):
    (file,) = store(open_disk(), block(1))
    file.write_bytes(file.read_bytes()[:-1])
    open_disk()
    (record,) = caplog.records
    assert file.name in record.getMessage()
    assert "bytes, should have" in record.getMessage()


def test_somebody_elses_file_is_left_alone(open_disk, tmp_path, caplog):
    theirs = tmp_path / "model.safetensors"
    theirs.write_bytes(b"not ours")
    tier = open_disk()
    store(tier, block(1))
    tier.refresh()
    assert theirs.read_bytes() == b"not ours"
    assert len(caplog.records) == 1


def test_what_is_bad_and_cannot_be_removed_is_left_alone(open_disk, tmp_path):
    tier = open_disk()
    (tmp_path / f"{0:032}.safetensors").mkdir()
    tier.refresh()
    store(tier, block(1))
    assert tier.keys() == [block(1)]


def test_the_file_that_was_used_longest_ago_makes_room(open_disk):
    tier = open_disk(capacity_bytes=5000)
    store(tier, block(1), block(2), block(3))
    tier.get(block(1))
    store(tier, block(4))
    assert block(2) not in tier
    assert {block(1), block(3), block(4)} == set(tier.keys())
    assert tier.num_bytes == sum(path.stat().st_size for path in tier.folder.glob("*.safetensors")) <= 5000


def test_what_was_used_last_is_known_after_a_restart(open_disk):
    tier = open_disk(capacity_bytes=5000)
    files = store(tier, block(1), block(2), block(3))
    for age, file in enumerate(files):
        os.utime(file, (1_000_000 + age, 1_000_000 + age))
    tier.get(block(1))
    again = open_disk(capacity_bytes=5000)
    store(again, block(4))
    assert block(1) in again
    assert block(2) not in again


def test_a_full_disk_is_reported_once_and_nothing_breaks(open_disk, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    tier = open_disk()
    monkeypatch.setattr(disk_module, "write_segment", refuse)
    for number in range(3):
        tier.put(block(number), payload(number))
        tier.flush()
    assert tier.keys() == []
    assert tier.num_not_stored == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_all_that_a_disk_refuses_is_said_to_be_gone(open_disk, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module, "write_segment", refuse)
    monkeypatch.setattr(disk_module, "SEGMENT_BYTES", 1)
    tier, gone = open_disk(), []
    tier.on_change = gone.extend
    with tier._lock:
        tier._pending.update({key: payload(1) for key in (block(1), checkpoint(2))})
    tier.flush()
    assert set(gone) == {block(1), checkpoint(2)}


def test_a_folder_that_goes_away_is_reported_once_and_all_is_a_miss(open_disk, tmp_path, caplog):
    tier = open_disk()
    (file,) = store(tier, block(1))
    file.unlink()
    tmp_path.rmdir()
    for _ in range(3):
        tier.refresh()
    assert tier.get(block(1)) is None
    assert len(caplog.records) == 1
    tmp_path.mkdir()


def test_what_a_dead_process_had_begun_to_write_is_removed(open_disk, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = segment_module.segment_name([block(1)])
    (tmp_path / f".{name}.{dead.pid}.tmp").write_bytes(b"half")
    living = tmp_path / f".{name}.{os.getpid()}.tmp"
    living.write_bytes(b"half")
    open_disk()
    assert list(tmp_path.iterdir()) == [living]


def test_clearing_removes_the_files(open_disk):
    tier = open_disk()
    store(tier, block(1), block(2))
    tier.clear()
    assert tier.is_empty()
    assert not list(tier.folder.iterdir())


def test_a_closed_tier_has_written_all_and_takes_nothing_more(open_disk):
    tier = open_disk()
    tier.put(block(1), payload(1))
    tier.close()
    assert not tier.put(block(2), payload(2))
    assert open_disk().keys() == [block(1)]


def test_more_than_fits_into_the_memory_of_the_writer_is_not_stored(open_disk, monkeypatch):
    monkeypatch.setattr(disk_module, "MAX_PENDING_BYTES", 2500)
    monkeypatch.setattr(disk_module, "GATHER_SECONDS", 60)
    tier = open_disk()
    assert [tier.put(block(number), payload(number)) for number in range(3)] == [True, True, False]
    assert tier.num_not_stored == 1


def test_the_secret_of_the_files_is_needed_to_use_them(open_disk, caplog):
    store(open_disk(), block(1))
    assert open_disk(secret=b"x" + SECRET[1:]).get(block(1)) is None
    assert "checksum" in caplog.text


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from stored_things import SECRET, block, payload
from hybrid_engine.connectors.disk import DiskTier

tier = DiskTier(Path(sys.argv[1]), secret=SECRET, capacity_bytes=1 << 30)
for number in range(int(sys.argv[3]), 1_000_000):
    tier.put(block(number), payload(number, 20_000))
    if number % 40 == 39:
        tier.flush()
        print(number + 1, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_files_and_what_it_had_flushed(open_disk, tmp_path):
    support, chance = str(Path(__file__).parents[1] / "support"), random.Random(0)
    num_flushed = 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), support, str(num_flushed)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert writer.stdout is not None
        num_flushed = int(next(writer.stdout))
        time.sleep(chance.random() * 0.05)
        writer.kill()
        num_flushed = int([num_flushed, *writer.stdout][-1])
        writer.wait()  # until then the process is there, dead, and what it had begun counts as its own
    tier = open_disk(capacity_bytes=1 << 30)
    assert {block(number) for number in range(num_flushed)} <= set(tier.keys())
    for key in tier.keys():  # noqa: SIM118
        number = int.from_bytes(key.block_hash, "big")
        assert np.array_equal(tier.get(key), payload(number, 20_000))
    assert not list(tmp_path.glob(".*"))
