"""On which line of a TOML document each key and value stands. The standard library's reader does not tell."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right

#: Where a value is: keys and, in arrays, positions from 0.
Path = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_STRINGS = (
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}(?!")', re.S),
    re.compile(r"'''.*?'{3,5}(?!')", re.S),
    re.compile(r'"(?:\\.|[^"\\])*"'),
    re.compile(r"'[^']*'"),
)


class TomlLines:
    """Finds the lines of a document that `tomllib` accepts."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._lines: dict[Path, int] = {}
        #: How many elements each array of tables has so far.
        self._arrays: dict[Path, int] = {}
        self._read_document()

    def of(self, *path: str | int) -> int:
        """The line, from 1, of what is at `path`, or of the nearest thing around it that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._lines:
                return self._lines[path[:end]]
        return 1

    def _read_document(self) -> None:
        table: Path = ()
        while self._skip(_BLANK) < len(self._text):
            if self._text[self._position] == "[":
                table = self._read_header()
            else:
                self._read_pair(table)

    def _read_header(self) -> Path:
        line = self._line()
        is_array = self._text.startswith("[[", self._position)
        self._position += 2 if is_array else 1
        keys = self._read_key()
        self._position = self._text.index("]", self._position) + (2 if is_array else 1)
        table = self._inside(keys[:-1]) + keys[-1:]
        if is_array:
            index = self._arrays.get(table, 0)
            self._arrays[table] = index + 1
            self._note(table, line)
            table = (*table, index)
        else:
            table = self._inside(keys)
        self._note(table, line)
        return table

    def _inside(self, keys: tuple[str, ...]) -> Path:
        """The table that a header names: below an array of tables, its last element."""
        path: Path = ()
        for key in keys:
            path = (*path, key)
            if path in self._arrays:
                path = (*path, self._arrays[path] - 1)
        return path

    def _read_pair(self, table: Path) -> None:
        line = self._line()
        path = table + self._read_key()
        self._note(path, line)
        self._position = self._text.index("=", self._position) + 1
        self._skip(_SPACE)
        self._read_value(path)

    def _read_key(self) -> tuple[str, ...]:
        keys: list[str] = []
        while True:
            self._skip(_SPACE)
            start = self._position
            if self._text[start] in "\"'":
                self._skip_string()
                keys.append(tomllib.loads(f"key = {self._text[start : self._position]}")["key"])
            else:
                self._skip(_BARE_KEY)
                keys.append(self._text[start : self._position])
            self._skip(_SPACE)
            if self._text[self._position] != ".":
                return tuple(keys)
            self._position += 1

    def _read_value(self, path: Path) -> None:
        first = self._text[self._position]
        if first in "\"'":
            self._skip_string()
        elif first in "[{":
            self._position += 1
            index = 0
            while self._text[self._skip(_BLANK)] not in "]}":
                if first == "{":
                    self._read_pair(path)
                else:
                    self._note((*path, index), self._line())
                    self._read_value((*path, index))
                    index += 1
                if self._text[self._skip(_BLANK)] == ",":
                    self._position += 1
            self._position += 1
        else:
            self._skip(_SCALAR)

    def _skip_string(self) -> None:
        for pattern in _STRINGS:
            if match := pattern.match(self._text, self._position):
                self._position = match.end()
                return
        raise AssertionError("a string without an end passed the reader")

    def _skip(self, pattern: re.Pattern[str]) -> int:
        """The position behind what `pattern` matches here."""
        match = pattern.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return self._position

    def _line(self) -> int:
        return bisect_right(self._breaks, self._position - 1) + 1

    def _note(self, path: Path, line: int) -> None:
        """Tables that dotted keys imply get the line of the first one."""
        for end in range(1, len(path)):
            self._lines.setdefault(path[:end], line)
        self._lines[path] = line
