"""Whose bytes a folder holds, and the key that names them."""

import stat

import pytest

from hybrid_engine.connectors.folder import open_folder, read_or_make_key
from hybrid_engine.errors import ConfigError

FACTS = {"weights": "abc", "groups": [{"kind": "full_attention", "layers": [0, 1]}]}


def test_a_key_is_drawn_once_and_only_its_owner_reads_it(tmp_path):
    key = read_or_make_key(tmp_path / "cache")
    file = tmp_path / "cache" / "hash_key"
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (key, 0o600)
    assert read_or_make_key(tmp_path / "cache") == key
    assert read_or_make_key(tmp_path / "other") != key
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["hash_key"]


def test_the_same_facts_give_the_same_folder(tmp_path):
    assert open_folder(tmp_path, FACTS, hash_key=b"k") == open_folder(tmp_path, dict(FACTS), hash_key=b"k")


@pytest.mark.parametrize(
    ("facts", "hash_key"),
    [({**FACTS, "weights": "abd"}, b"k"), ({**FACTS, "groups": []}, b"k"), (FACTS, b"l")],
    ids=["weights", "groups", "hash key"],
)
def test_other_facts_give_another_folder(tmp_path, facts, hash_key):
    assert open_folder(tmp_path, facts, hash_key=hash_key) != open_folder(tmp_path, FACTS, hash_key=b"k")


def test_a_manifest_that_says_something_else_is_refused(tmp_path):
    path = open_folder(tmp_path, FACTS, hash_key=b"k")
    (path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="isn't what its folder's name stands for"):
        open_folder(tmp_path, FACTS, hash_key=b"k")


def test_the_manifest_does_not_give_the_key_away(tmp_path):
    path = open_folder(tmp_path, FACTS, hash_key=b"a secret key")
    assert b"a secret key".hex() not in (path / "manifest.json").read_text()


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used"):
        read_or_make_key(tmp_path / "file")


def test_a_key_of_another_length_is_refused(tmp_path):
    (tmp_path / "hash_key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, must have 32"):
        read_or_make_key(tmp_path)
