"""The samples that are finished, one line of JSON each, on disk before the next ones count: a killed run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from hybrid_engine.errors import ConfigError

Record = dict[str, Any]


class Journal:
    """Keeps records by key, in a file where one is given. One process writes it at a time."""

    def __init__(self, path: Path | None, settings: Record) -> None:
        """settings: what the records depend on. Raises ConfigError when the file has others, or is no journal."""
        self.records: dict[str, Record] = {}
        self._file: IO[bytes] | None = None
        self.num_found = 0
        """Samples that an earlier run had finished."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        _lock(self._file, path)
        lines = self._whole_lines()
        if not lines:
            self._write([{"settings": settings}])
            return
        self._check(path, lines[0], settings)
        for line in lines[1:]:
            self.records[line["key"]] = line
        self.num_found = len(self.records)

    def add(self, records: list[Record]) -> None:
        """Keep finished samples; when this returns they outlive the process."""
        self.records |= {record["key"]: record for record in records}
        self._write(records)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _whole_lines(self) -> list[Record]:
        """Read the file; a last line that a kill has cut short is removed."""
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{self._file.name} is no journal of an evaluation: {error}; give another path"
            ) from error

    def _check(self, path: Path, first: Record, settings: Record) -> None:
        before = first.get("settings")
        if not isinstance(before, dict):
            raise ConfigError(f"{path} is no journal of an evaluation: give another path")
        # As a file would have them: no tuples.
        now = json.loads(json.dumps(settings))
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            name = different[0]
            raise ConfigError(
                f"{path} was written with {name} = {before.get(name)!r}, now it is {now.get(name)!r}: give another "
                f"journal, or the settings of before"
            )

    def _write(self, records: list[Record]) -> None:
        if self._file is None:
            return
        self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())


def _lock(file: IO[bytes], path: Path) -> None:
    """Raise ConfigError when another process writes this journal; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"{path} is in use by another evaluation: wait for its end, or give another path") from error
