"""docs/policy.md names every key, marks those that are not kept yet, and its examples parse."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import pytest

from octavo.cache.policy_file import KEYS, NOT_YET, Surroundings, parse_policy
from octavo.cache.policy_table import PolicyError

TEXT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
AROUND = Surroundings(budget_bytes=1 << 30)


def rows() -> dict[tuple[str, str], bool]:
    """(table, key) -> whether it is marked "not yet"."""
    table, found = "", {}
    section = TEXT.partition("## Every key")[2].partition("\n## ")[0]
    for first, last in re.findall(r"^\| (.+?) \|.*\| *(not yet)? *\|$", section, re.M):
        if header := re.match(r"\*\*`\[+([\w.]+)\]+`\*\*", first):
            table = header.group(1)
        for key in re.findall(r"`([a-z_][a-z_ =]*)`", first) if not header else ():
            found[(table, key)] = last == "not yet"
    return found


def test_every_key_is_there_and_marked() -> None:
    values = {pair for pair in NOT_YET if " = " in pair[1]}
    # A value that comes to be kept keeps its row.
    known = {(table, key) for table, keys in KEYS.items() for key in keys}
    found = rows()
    assert {pair for pair in found if " = " not in pair[1]} == known
    assert values <= set(found)
    assert {pair for pair, not_yet in found.items() if not_yet} == set(NOT_YET)


def examples() -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)


def test_examples_parse() -> None:
    today, full = examples()
    policy = parse_policy(today, "docs", AROUND)
    assert list(policy.tenants) == ["acme", "globex"]
    assert policy.has_keys
    parse_policy(full, "docs", AROUND, not_yet=MappingProxyType({}))
    with pytest.raises(PolicyError, match="cannot be kept"):
        parse_policy(full, "docs", AROUND)
    # The full one has every key, and each that is not kept.
    for keys in KEYS.values():
        for key in set(keys) - {"key_codec"}:
            assert re.search(rf"^{key} = ", full, re.M), key
