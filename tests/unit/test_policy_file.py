"""The policy file: what it may say, and that whatever is wrong is told with its line."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.lifetime import Lifetime
from octavo.cache.policy import Policy, Prices, Size, TenantPolicy
from octavo.cache.policy_file import KEYS, NOT_YET, Surroundings, parse_policy, read_policy_text
from octavo.cache.policy_table import PolicyError
from octavo.cache.toml_lines import TomlLines
from octavo.errors import ConfigError


def digest(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


FULL = f"""
[policy]
codec = "int8"
value_codec = "int4"
ladder = ["f16", "int8", "int4"]
at_cap = "reseal"
session_cap = "64MiB"

[lifetime]
ttl_s = 600
max_age_s = 86_400

[pruning]
method = "h2o"
budget = "50%"

[prices]
currency = "EUR"
cached = 0.015
computed = "0.15"
output = 1

[pools.interactive]
share = 0.75
step_tokens = 256

[pools.long]
share = "25%"
min_tokens = 8192

[tenants.acme]
keys = ["{digest("acme-1")}", "{digest("acme-2")}"]
floor = "25%"
cap = "512MiB"
session_cap = 1048576
rate = 60

[tenants."b.2_c-d"]
keys = ["{digest("b")}"]

[admin]
keys = ["{digest("root")}"]

[[public]]
prefix = "You are a helpful assistant."
[[public]]
prefix = "Answer in German."
"""


def parse(text: str, around: Surroundings = Surroundings(), *, all_kept: bool = True) -> Policy:
    """`all_kept`: as if everything were enforced."""
    return parse_policy(text, "p.toml", around, not_yet=MappingProxyType({}) if all_kept else NOT_YET)


def test_every_key() -> None:
    policy = parse(FULL, Surroundings(budget_bytes=1 << 30))
    assert (policy.key_codec, policy.value_codec) == ("int8", "int4")
    assert policy.ladder == ("f16", "int8", "int4")
    assert policy.at_cap == "reseal"
    assert policy.session_cap == Size("64MiB", n_bytes=64 << 20)
    assert policy.lifetime == Lifetime(600, 86400)
    assert policy.pruning.method == "h2o"
    assert policy.prices == Prices("EUR", Decimal("0.015"), Decimal("0.15"), Decimal(1))
    assert [(n, p.share, p.step_tokens, p.min_tokens) for n, p in policy.pools.items()] == [
        ("interactive", Fraction(3, 4), 256, 0),
        ("long", Fraction(1, 4), None, 8192),
    ]
    acme = policy.tenants["acme"]
    assert acme.keys == tuple(hashlib.sha256(n).digest() for n in (b"acme-1", b"acme-2"))
    assert acme.floor == Size("25%", share=Fraction(1, 4))
    assert acme.floor.of(1000) == 250
    assert acme.cap is not None
    assert acme.cap.of(1000) == 512 << 20
    assert (acme.session_cap, acme.rate) == (Size("1048576", n_bytes=1 << 20), 60)
    assert list(policy.tenants) == ["acme", "b.2_c-d"]
    assert policy.tenant("nobody") == TenantPolicy()
    assert len(policy.admin_keys) == 1
    assert policy.public_prefixes == ("You are a helpful assistant.", "Answer in German.")


def test_an_empty_file_is_the_default_policy() -> None:
    assert parse("", all_kept=False) == Policy()
    assert not Policy().has_keys


def test_digests_are_not_printed() -> None:
    policy = parse(FULL)
    assert hashlib.sha256(b"acme-1").hexdigest()[:8] not in repr(policy)
    assert repr(hashlib.sha256(b"acme-1").digest())[2:10] not in repr(policy)


def test_the_schema_lists_every_field() -> None:
    """A key that the reader knows and no field holds, or the other way round, is a slip."""
    fields = {f.name for f in dataclasses.fields(TenantPolicy)}
    assert fields == set(KEYS["tenants.NAME"])
    assert {f.name for f in dataclasses.fields(Lifetime)} == set(KEYS["lifetime"])
    for table, key in NOT_YET:
        assert key.partition(" = ")[0] in KEYS[table]


def test_codecs() -> None:
    assert parse('[policy]\ncodec = "f16"').key_codec == "f16"
    assert parse('[policy]\nkey_codec = "f16"').value_codec == Policy().value_codec
    running = Surroundings(key_codec="f16", value_codec="int4")
    assert parse("", running).value_codec == "int4"
    assert parse('[policy]\nkey_codec = "f16"\nvalue_codec = "int4"', running).key_codec == "f16"
    with pytest.raises(PolicyError, match=r"^p.toml, line 2: 'f16', .* 'int4' as its value_codec"):
        parse('[policy]\ncodec = "f16"', running)
    with pytest.raises(PolicyError, match=r"^p.toml, line 3: 'int8', .* 'f16' as its key_codec"):
        parse('[policy]\nvalue_codec = "int4"\nkey_codec = "int8"', running)


A, B = digest("a"), digest("b")

#: text, the line that is named, what is told of it.
BAD: list[tuple[str, int, list[str]]] = [
    ("x", 1, ["not TOML"]),
    ("[policy]\n\ncodec = int8", 3, ["not TOML", "Invalid value"]),
    ("[policy]\ncodec =\n", 2, ["not TOML"]),
    ("[policy]\n[policy]", 2, ["not TOML"]),
    ('[policy]\ncodec = "int8', 2, ["not TOML"]),
    ("[lifetime]\nttl_s = " + "9" * 5000, 1, ["cannot be read"]),
    ("a = " + "[" * 5000 + "]" * 5000, 1, ["nested too deeply"]),
    ('\n[tenant.acme]\nkeys = []', 2, ["no table 'tenant'", "did you mean tenants?", "lifetime"]),
    ('codec = "int8"', 1, ["no table 'codec'", "policy"]),
    ('[policy]\ncodecs = "int8"', 2, ["no key 'codecs' in [policy]", "did you mean codec?", "value_codec"]),
    ('[zzz]', 1, ["no table 'zzz'; there are policy"]),
    ("policy = 3", 1, ["policy is a table, got 3"]),
    ("[policy]\ncodec = 8", 2, ["codec is a string, got 8"]),
    ('[policy]\ncodec = "int9"', 2, ["f32, f16, bf16, int8, int4", "'int9'", "did you mean int8?"]),
    ('[policy]\nvalue_codec = ""', 2, ["value_codec cannot be empty"]),
    ('[policy]\nat_cap = "Reject"', 2, ["reject, reseal, summarize, evict", "'Reject'", "did you mean reject?"]),
    ('[policy]\nladder = [\n  "f16",\n  "int7",\n]', 4, ["no codec 'int7'", "int8"]),
    ('[policy]\nladder = ["int4", "int8"]', 2, ["coarser", "int4, then int8"]),
    ('[policy]\nladder = "int4"', 2, ["an array", "'int4'"]),
    ('[policy]\nsession_cap = "3 apples"', 2, ["512MiB", "'3 apples'"]),
    ('[policy]\nsession_cap = "0%"', 2, ["above 0%", "'0%'"]),
    ('[policy]\nsession_cap = "101%"', 2, ["at most 100%", "'101%'"]),
    ("[policy]\nsession_cap = 0", 2, ["got 0"]),
    ("[policy]\nsession_cap = true", 2, ["got true"]),
    ("[policy]\nsession_cap = 1.5", 2, ["got 1.5"]),
    ("[policy]\nsession_cap = 0x" + "f" * 5000, 2, ["20000 bits"]),
    (f'[policy]\nsession_cap = "{"9" * 400}"', 2, ["a size"]),
    ("[lifetime]\nttl_s = 0", 2, ["from 1 to", "got 0"]),
    ("[lifetime]\nttl_s = true", 2, ["an integer", "got true"]),
    ("[lifetime]\nmax_age_s = 0x" + "f" * 5000, 2, ["20000 bits"]),
    ('[lifetime]\nttl_s = "5m"', 2, ["an integer", "'5m'"]),
    ("[lifetime]\nmax_age_s = 59\n# a comment\nttl_s = 60", 4, ["at most max_age_s, which is 59, got 60"]),
    ("lifetime = { max_age_s = 59, ttl_s = 60 }", 1, ["at most max_age_s"]),
    ("lifetime.max_age_s = 59\nlifetime.ttl_s = 60", 2, ["at most max_age_s"]),
    ('[prices]\ncached = 1', 1, ["[prices] needs currency"]),
    ('[prices]\ncurrency = "EUR"\ncached = 1\ncomputed = 2', 1, ["[prices] needs output"]),
    ('[prices]\ncurrency = "Euro"\ncached = 1\ncomputed = 2\noutput = 3', 2, ["three capital letters", "'Euro'"]),
    ('[prices]\ncurrency = "EUR"\ncached = -1\ncomputed = 2\noutput = 3', 3, ["from 0", "got -1"]),
    ('[prices]\ncurrency = "EUR"\ncached = nan\ncomputed = 2\noutput = 3', 3, ["from 0", "got NaN"]),
    ('[prices]\ncurrency = "EUR"\ncached = 1e999999999\ncomputed = 2\noutput = 3', 3, ["from 0"]),
    ('[prices]\ncurrency = "EUR"\ncached = 1e-13\ncomputed = 2\noutput = 3', 3, ["12 decimals"]),
    ('[prices]\ncurrency = "EUR"\ncached = "free"\ncomputed = 2\noutput = 3', 3, ["'free'"]),
    ("[pools.a]\nmin_tokens = 0", 1, ["[pools.a] needs share"]),
    ("[pools.a]\nshare = 0", 2, ["above 0", "got 0"]),
    ("[pools.a]\nshare = nan", 2, ["above 0", "got NaN"]),
    ("[pools.a]\nshare = 1e-999999999", 2, ["above 0"]),
    ('[pools.a]\nshare = "120%"', 2, ["at most 1", "'120%'"]),
    ("[pools.a]\nshare = 0.6\n[pools.b]\nmin_tokens = 9\nshare = 0.5", 5, ["at most 1, with this one to 1.1"]),
    ("[pools.a]\nshare = 0.5\n[pools.b]\nshare = 0.5", 3, ["same min_tokens, 0"]),
    ("[pools.a]\nshare = 0.5\nmin_tokens = 7", 3, ["fewer than 7 tokens", "min_tokens = 0"]),
    ("[pools.a]\nshare = 0.5\nstep_tokens = 0", 3, ["step_tokens is from 1", "got 0"]),
    ("pools = 1", 1, ["pools is a table"]),
    ("[pools]\nshare = 1", 2, ["share is a table, got 1"]),
    ('[tenants."a b"]\nkeys = []', 1, ["1 to 64 of", "'a b'"]),
    (f'[tenants.{"a" * 65}]\nkeys = []', 1, ["1 to 64"]),
    ('[tenants.""]\nkeys = []', 1, ["1 to 64", "''"]),
    ("[tenants.acme]\nrate = 3", 1, ["acme has no keys", "keys = []"]),
    ("[tenants.acme]\nkeys = []\nrate = 0", 3, ["rate is from 1 to 1000000, got 0"]),
    ("[tenants.acme]\nkeys = []\nflor = 3", 3, ["no key 'flor' in [tenants.acme]", "did you mean floor?"]),
    (f'[tenants."a.b"]\nkeys = ["{A}"]\nx = 1', 3, ['no key \'x\' in [tenants."a.b"]; there are keys, floor']),
    ('[tenants.acme]\nkeys = "x"', 2, ["an array", "got a string"]),
    ("[tenants.acme]\nkeys = [1]", 2, ["an array", "it holds an integer"]),
    (f'[tenants.acme]\nkeys = [\n  "{A}",\n  "{B[:-1]}",\n]', 4, ["64 hex digits", "70 characters"]),
    (f'[tenants.acme]\nkeys = ["{A}", "{A}"]', 2, ["already, on line 2"]),
    (f'[tenants.a]\nkeys = ["{A}"]\n[tenants.b]\nkeys = ["{A.replace("a", "A").replace("shA", "sha")}"]', 4,
     ["already, on line 2"]),
    (f'[tenants.a]\nkeys = ["{B}",\n"{A}"]\n[admin]\nkeys = ["{A}"]', 3, ["already, on line 5"]),
    (f'[tenants.admin]\nkeys = ["{A}"]', 2, ["[admin]"]),
    ('[tenants.a]\nkeys = []\nfloor = "2MiB"\ncap = "1MiB"', 3, ["at most the cap, which is 1MiB, got 2MiB"]),
    ('[tenants.a]\nkeys = []\nfloor = "20%"\ncap = "10%"', 3, ["at most the cap, which is 10%, got 20%"]),
    ('[tenants.a]\nkeys = []\nfloor = "20%"\ncap = 100', 3, ["at most the cap, which is 100, got 20%"]),
    ('[tenants.a]\nkeys = []\nfloor = "60%"\n[tenants.b]\nkeys = []\nfloor = "60%"', 6, ["100%", "to 120%"]),
    ('[tenants.a]\nkeys = []\nfloor = 600\n[tenants.b]\nkeys = []\nfloor = "60%"', 6, ["1000 bytes", "to 1200"]),
    ("[admin]\nkeys = 3", 2, ["an array", "got an integer"]),
    ('[public]\nprefix = "x"', 1, ["an array of tables, [[public]]"]),
    ('public = ["x"]', 1, ["[[public]]", "it holds a string"]),
    ("[[public]]\n[[public]]", 1, ["[[public]] needs prefix"]),
    ('[[public]]\nprefix = "x"\n[[public]]\nprefix = "x"', 4, ["twice"]),
    ('[[public]]\nprefix = "x"\n[[public]]\nprefxi = "x"', 4,
     ["no key 'prefxi' in [[public]]", "did you mean prefix?"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "told"), BAD, ids=range(len(BAD)))
def test_faults_are_told_with_their_line(text: str, line: int, told: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text, Surroundings(budget_bytes=1000))
    message = str(caught.value)
    assert message.startswith(f"p.toml, line {line}: "), message
    assert caught.value.line == line
    for part in told:
        assert part in message, message
    assert "\n" not in message
    assert len(message) < 400
    assert isinstance(caught.value, ConfigError)


def test_messages_quote_no_keys() -> None:
    for value in (f'["{A[7:]}"]', '["my-plain-secret-key"]', '"my-plain-secret-key"', f'["{A}", "{A}"]'):
        with pytest.raises(PolicyError) as caught:
            parse(f"[tenants.acme]\nkeys = {value}")
        assert "plain-secret" not in str(caught.value)
        assert A[7:20] not in str(caught.value)


def test_floors_wait_for_the_budget() -> None:
    text = '[tenants.a]\nkeys = []\nfloor = "1GiB"\ncap = "50%"'
    assert parse(text).tenants["a"].floor is not None
    assert parse(text, Surroundings(budget_bytes=2 << 30)).tenants["a"].floor is not None
    for budget, told in ((1 << 29, "cap"), ((2 << 30) - 1, "cap")):
        with pytest.raises(PolicyError, match=told):
            parse(text, Surroundings(budget_bytes=budget))


def test_a_key_of_the_key_file_is_nobody_elses() -> None:
    around = Surroundings(other_keys=frozenset({hashlib.sha256(b"a").digest()}))
    with pytest.raises(PolicyError, match="line 3: this key is listed already, in the API key file"):
        parse(f'[tenants.acme]\nkeys = ["{B}",\n"{A}"]', around)


def test_default_and_admin_may_go_without_keys() -> None:
    policy = parse("[tenants.default]\nrate = 5\n[tenants.admin]\nrate = 6")
    assert (policy.tenant("default").rate, policy.tenant("admin").rate) == (5, 6)
    assert not policy.has_keys


#: For each key that is not kept yet, a file that asks for it and is right otherwise.
ASKS = {
    ("policy", "ladder"): '[policy]\n\nladder = ["f16"]',
    ("policy", "at_cap = reseal"): '[policy]\n\nat_cap = "reseal"',
    ("policy", "at_cap = summarize"): '[policy]\n\nat_cap = "summarize"',
    ("policy", "at_cap = evict"): '[policy]\n\nat_cap = "evict"',
    ("policy", "session_cap"): '[policy]\n\nsession_cap = "1MiB"',
    ("lifetime", "ttl_s"): "[lifetime]\n\nttl_s = 60",
    ("lifetime", "max_age_s"): "[lifetime]\n\nmax_age_s = 60",
    ("pruning", "method"): '[pruning]\n\nmethod = "h2o"',
    ("pruning", "budget"): '[pruning]\n\nbudget = "50%"',
    ("pools.NAME", "share"): "[pools.a]\n\nshare = 1.0",
    ("pools.NAME", "step_tokens"): "[pools.a]\n\nstep_tokens = 1\nshare = 1.0",
    ("pools.NAME", "min_tokens"): "[pools.a]\n\nmin_tokens = 0\nshare = 1.0",
    ("tenants.NAME", "floor"): '[tenants.default]\n\nfloor = "10%"',
    ("tenants.NAME", "cap"): '[tenants.default]\n\ncap = "10%"',
    ("tenants.NAME", "session_cap"): '[tenants.default]\n\nsession_cap = "10%"',
    ("public", "prefix"): '[[public]]\n\nprefix = "x"',
}


@pytest.mark.parametrize("asked", ASKS, ids="/".join)
def test_what_is_not_kept_is_refused(asked: tuple[str, str]) -> None:
    parse(ASKS[asked])
    if asked not in NOT_YET:
        parse(ASKS[asked], all_kept=False)
        return
    with pytest.raises(PolicyError) as caught:
        parse(ASKS[asked], all_kept=False)
    message = str(caught.value)
    assert message.startswith(f"p.toml, line 3: {asked[1]} in ")
    assert f"cannot be kept: {NOT_YET[asked]}; leave it out" in message


def test_every_row_is_tried() -> None:
    assert set(NOT_YET) <= set(ASKS)
    parse('[policy]\nat_cap = "reject"', all_kept=False)


def test_wrong_values_come_before_what_is_not_kept() -> None:
    with pytest.raises(PolicyError, match="line 4: ttl_s is from 1"):
        parse('[policy]\nsession_cap = "1MiB"\n[lifetime]\nttl_s = 0', all_kept=False)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the policy file {tmp_path}/no: No such file"):
        read_policy_text(tmp_path / "no")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_policy_text(tmp_path)
    (tmp_path / "p").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_policy_text(tmp_path / "p")


#: A line of the document, and what begins there.
AWKWARD: list[tuple[str, list[tuple[str | int, ...]]]] = [
    ('# = [ "', []),
    ("a = 1 # b = 2", [("a",)]),
    ('"b c" . \'d\' = """', [("b c",), ("b c", "d")]),
    ("x = 1", []),
    ("[no]", []),
    ('\\""" ""\\""""', []),
    ("[t] # ]", [("t",)]),
    ("k = [ # [", [("t", "k")]),
    ('  "x", # y', [("t", "k", 0)]),
    ("  ['''", [("t", "k", 1), ("t", "k", 1, 0)]),
    ("]''', 2],", [("t", "k", 1, 1)]),
    ("  { p = 1, q.r = [", [("t", "k", 2), ("t", "k", 2, "p"), ("t", "k", 2, "q"), ("t", "k", 2, "q", "r")]),
    (" 5] },", [("t", "k", 2, "q", "r", 0)]),
    ("]", []),
    ("z = 1979-05-27 07:32:00", [("t", "z")]),
    ("[[u]]", [("u", 0)]),
    ("[[u]]", [("u", 1)]),
    ("v = ''", [("u", 1, "v")]),
    ("[u.w]", [("u", 1, "w"), ("u", 1, "w", "what is not there")]),
    ("s = ''''a'''''", [("u", 1, "w", "s")]),
    ("x = 1", [("u", 1, "w", "x")]),
]


def test_lines_of_awkward_layouts() -> None:
    text = "\n".join(line for line, _ in AWKWARD)
    tomllib.loads(text)
    lines = TomlLines(text)
    for number, (_, paths) in enumerate(AWKWARD, 1):
        for path in paths:
            assert lines.of(*path) == number, path
    assert lines.of("what is not there") == 1


KEY = st.from_regex(r"\A[a-z]{1,3}\Z")
VALUES = st.recursive(
    st.integers() | st.text("a\"'#[]{}=,\n\\é", max_size=6) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


def written(value: Any, draw: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if "'" not in value and draw(st.booleans()):
            return f"'''\n{value}'''"
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"""{escaped}"""' if draw(st.booleans()) else '"' + escaped.replace("\n", "\\n") + '"'
    if isinstance(value, list):
        gap = draw(st.sampled_from(["", " ", "\n", " # ] ' \n"]))
        return "[" + gap + "".join(written(v, draw) + gap + "," + gap for v in value) + "]"
    return str(value)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_lines_of_any_document(data: st.DataObject) -> None:
    """Documents are written table by table; the line of every key is known while writing."""
    text, expected = "", {}
    for table in data.draw(st.lists(KEY, unique=True, max_size=4)):
        expected[(table,)] = text.count("\n") + 1
        text += f"[ {table} ]\n"
        for key in data.draw(st.lists(KEY, unique=True, max_size=4)):
            text += data.draw(st.sampled_from(["", "\n", "# k = ['\n"]))
            expected[(table, key)] = text.count("\n") + 1
            text += f"{key} = {written(data.draw(VALUES), data.draw)}\n"
    tomllib.loads(text)
    lines = TomlLines(text)
    assert {path: lines.of(*path) for path in expected} == expected
