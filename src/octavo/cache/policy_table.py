"""One table of a policy file, read key by key; each error has the file, the line, the limit and the value."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from octavo.cache.policy import Size
from octavo.cache.toml_lines import TomlLines
from octavo.config import parse_bytes
from octavo.errors import ConfigError

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=str)

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,18})?) ?%")
_BARE = re.compile(r"[A-Za-z0-9_-]+")

#: Prices are printed digit by digit; more than this is a slip of the keyboard.
_MAX_PRICE = Decimal(10**9)
_MAX_DECIMALS = 12

_TYPES = {bool: "true or false", int: "an integer", Decimal: "a number", str: "a string", list: "an array",
          dict: "a table"}  # fmt: skip


class PolicyError(ConfigError):
    """A policy file cannot be read, or says something impossible. `line` is 0 where there is none."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class PolicySource:
    """A file's content, and where in it everything stands. Raises PolicyError for what is not TOML."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        try:
            self.document: dict[str, Any] = tomllib.loads(text, parse_float=Decimal)
            self.lines = TomlLines(text)
        except tomllib.TOMLDecodeError as error:
            reason, line = _syntax(str(error), text)
            self.fail_at(line, f"this is not TOML: {reason}")
        except RecursionError:
            self.fail_at(1, "this is nested too deeply")
        except ValueError as error:  # an integer of thousands of digits, an impossible date
            self.fail_at(1, f"a value cannot be read: {told(str(error))}")

    def fail_at(self, line: int, message: str) -> NoReturn:
        raise PolicyError(f"{self._name}, line {line}: {message}", line)


def _syntax(message: str, text: str) -> tuple[str, int]:
    """tomllib's message, and the line that it names."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.S)
    if match is None:
        return message, 1
    return match.group(1), int(match.group(2)) if match.group(2) else max(1, len(text.splitlines()))


class Table:
    """A table with known keys. A getter gives None where the key is missing, and fails where its value is wrong.

    `known` lists the keys; None where the operator chooses them.
    """

    def __init__(
        self, source: PolicySource, path: tuple[str | int, ...], content: Mapping[str, Any], known: Sequence[str] | None
    ) -> None:
        self._source = source
        self._path = path
        self.content = content
        if known is not None:
            for key in content:
                if key not in known:
                    self._unknown(key, known)

    @property
    def exists(self) -> bool:
        return bool(self.content)

    @property
    def title(self) -> str:
        """As its header is written: [tenants.acme], [[public]]."""
        names = ".".join(k if _BARE.fullmatch(k) else f'"{k}"' for k in self._path if isinstance(k, str))
        return f"[[{names}]]" if isinstance(self._path[-1], int) else f"[{names}]"

    def line(self, *path: str | int) -> int:
        return self._source.lines.of(*self._path, *path)

    def fail(self, key: str | None, message: str, *below: str | int) -> NoReturn:
        """At `key`, or at what is below it; None: at the table's header."""
        self._source.fail_at(self.line(*(() if key is None else (key,)), *below), message)

    def _unknown(self, key: str, known: Sequence[str]) -> NoReturn:
        what, where = ("key", f" in {self.title}") if self._path else ("table", "")
        hint = f"{hint} There" if (hint := _nearest(key, known)) else "; there"
        self.fail(key, f"there is no {what} {told(key)}{where}{hint} are {', '.join(known)}")

    def table(self, key: str, known: Sequence[str] | None) -> Table:
        """The table under `key`, empty where it is missing."""
        content = self._typed(key, dict, "a table")
        return Table(self._source, (*self._path, key), content or {}, known)

    def tables(self, key: str, known: Sequence[str]) -> list[Table]:
        """The array of tables under `key`."""
        content = self._typed(key, list, f"an array of tables, [[{key}]]") or []
        for i, element in enumerate(content):
            if not isinstance(element, dict):
                self.fail(key, f"{key} is an array of tables, [[{key}]]; it holds {_type(element)}", i)
        return [Table(self._source, (*self._path, key, i), element, known) for i, element in enumerate(content)]

    def required(self, key: str, value: Value | None) -> Value:
        if value is None:
            self.fail(None, f"{self.title} needs {key}")
        return value

    def string(self, key: str) -> str | None:
        value: str | None = self._typed(key, str, "a string")
        if value is not None and not value.strip():
            self.fail(key, f"{key} cannot be empty")
        return value

    def choice(self, key: str, choices: Sequence[Choice]) -> Choice | None:
        value = self.string(key)
        if value is None:
            return None
        for choice in choices:
            if value == choice:
                return choice
        self.fail(key, f"{key} is one of {', '.join(choices)}, got {told(value)}{_nearest(value, choices)}")

    def strings(self, key: str, shape: str, *, secret: bool = False) -> tuple[str, ...] | None:
        """An array of strings. `secret`: messages must not quote them."""
        values = self._typed(key, list, f"an array of {shape}", secret=secret)
        if values is None:
            return None
        for i, value in enumerate(values):
            if not isinstance(value, str):
                self.fail(key, f"{key} is an array of {shape}; it holds {_type(value)}", i)
        return tuple(values)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value: int | None = self._typed(key, int, f"an integer from {low} to {high}")
        if value is not None and not low <= value <= high:
            self.fail(key, f"{key} is from {low} to {high}, got {told(value)}")
        return value

    def price(self, key: str) -> Decimal | None:
        """A number, or a string that holds one; at least 0."""
        value = self.content.get(key)
        shape = f"{key} is a price per million tokens, from 0 to {_MAX_PRICE}, with at most {_MAX_DECIMALS} decimals"
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"\d{1,10}(\.\d+)?", value):
            value = Decimal(value)
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            self.fail(key, f"{shape}, such as 0.15, got {told(value)}")
        if isinstance(value, int):
            value = Decimal(value) if 0 <= value <= _MAX_PRICE else Decimal("NaN")
        exponent = value.as_tuple().exponent
        if not isinstance(exponent, int) or not 0 <= value <= _MAX_PRICE or exponent < -_MAX_DECIMALS:
            self.fail(key, f"{shape}, got {told(self.content[key])}")
        return value

    def share(self, key: str) -> Fraction | None:
        """A number or a percentage: 0.25 or "25%"."""
        value = self.content.get(key)
        if value is None:
            return None
        share = _percentage(value) if isinstance(value, str) else None
        if isinstance(value, int | Decimal) and not isinstance(value, bool) and _is_share(Decimal(value)):
            share = Fraction(value)
        if share is None:
            self.fail(key, f'{key} is above 0 and at most 1, such as 0.25 or "25%", got {told(value)}')
        return share

    def size(self, key: str) -> Size | None:
        """Bytes or a share of the budget: "512MiB" or "25%"."""
        value = self.content.get(key)
        if value is None:
            return None
        shape = f'{key} is a size, such as "512MiB", or a share of the budget, above 0% and at most 100%'
        if isinstance(value, str):
            if (share := _percentage(value)) is not None:
                return Size(value, share=share)
            if "%" in value:
                self.fail(key, f"{shape}, got {told(value)}")
        if isinstance(value, bool) or not isinstance(value, int | str):
            self.fail(key, f"{shape}, got {told(value)}")
        try:
            return Size(str(value), n_bytes=parse_bytes(value))
        except (ConfigError, ValueError, OverflowError):  # the latter two for thousands of digits
            self.fail(key, f"{shape}, got {told(value)}")

    def _typed(self, key: str, kind: type, shape: str, *, secret: bool = False) -> Any:
        """The value under `key` if it has the type `kind`."""
        value = self.content.get(key)
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        self.fail(key, f"{key} is {shape}, got {_type(value) if secret else told(value)}")


def _percentage(text: str) -> Fraction | None:
    match = _PERCENT.fullmatch(text.strip())
    share = Fraction(match.group(1)) / 100 if match else Fraction(0)
    return share if 0 < share <= 1 else None


def _is_share(number: Decimal) -> bool:
    exponent = number.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -_MAX_DECIMALS and 0 < number <= 1


def _nearest(value: str, choices: Sequence[str]) -> str:
    found = difflib.get_close_matches(value, choices, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _type(value: object) -> str:
    return _TYPES.get(type(value), "a date or time")


def told(value: object, limit: int = 80) -> str:
    """A value as a message may quote it."""
    if isinstance(value, dict | list):
        return _type(value)
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not print them all
        return f"an integer of {value.bit_length()} bits"
    text = str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
