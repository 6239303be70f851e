"""Reads a policy file (TOML; docs/policy.md has every key). Whatever is wrong is told with file and line.

A promise that is not kept is worse than none: a file that asks for what is not enforced is refused. NOT_YET lists
those keys; whoever builds the enforcement removes the row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Final, get_args

from octavo.cache.lifetime import Lifetime
from octavo.cache.policy import (
    ADMIN_TENANT,
    DEFAULT_TENANT,
    AtCap,
    Policy,
    Pool,
    Prices,
    Pruning,
    Size,
    TenantPolicy,
)
from octavo.cache.policy_table import PolicyError, PolicySource, Table, told
from octavo.codecs.registry import codec_names

#: Every key, by the table that holds it; NAME stands for names that the operator chooses.
KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "policy": ("codec", "key_codec", "value_codec", "ladder", "at_cap", "session_cap"),
        "lifetime": ("ttl_s", "max_age_s"),
        "pruning": ("method", "budget"),
        "prices": ("currency", "cached", "computed", "output"),
        "pools.NAME": ("share", "step_tokens", "min_tokens"),
        "tenants.NAME": ("keys", "floor", "cap", "session_cap", "rate"),
        "admin": ("keys",),
        "public": ("prefix",),
    }
)

#: (table, key) -> what is missing. A key is refused whatever its value; `at_cap = x` refuses that value alone.
NOT_YET: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("policy", "ladder"): "pages are not resealed yet",
        ("policy", "at_cap = reseal"): "pages are not resealed yet",
        ("policy", "at_cap = summarize"): "turns are not summarized yet",
        ("policy", "at_cap = evict"): "it needs pruning, which does not exist yet",
        ("policy", "session_cap"): "memory is not counted by session yet",
        ("pruning", "method"): "pruning does not exist yet",
        ("pruning", "budget"): "pruning does not exist yet",
        ("pools.NAME", "share"): "requests are not divided into pools yet",
        ("pools.NAME", "step_tokens"): "requests are not divided into pools yet",
        ("pools.NAME", "min_tokens"): "requests are not divided into pools yet",
        ("tenants.NAME", "session_cap"): "memory is not counted by session yet",
        ("public", "prefix"): "tenants share no pages yet",
    }
)

MAX_SECONDS = 10 * 366 * 86400
MAX_TOKENS = 1 << 31
MAX_RATE = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CURRENCY = re.compile(r"[A-Z]{3}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a policy has to agree with; None where that is not known yet.

    Attributes:
        key_codec, value_codec: what the command line asks for, or what the running engine stores.
        budget_bytes: the page budget.
        other_keys: SHA-256 digests of keys that are known from elsewhere (--api-key-file).
    """

    key_codec: str | None = None
    value_codec: str | None = None
    budget_bytes: int | None = None
    other_keys: frozenset[bytes] = frozenset()


def read_policy_text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PolicyError(f"cannot read the policy file {path}: {reason}") from None


def parse_policy(
    text: str,
    name: str,
    around: Surroundings = Surroundings(),
    *,
    not_yet: Mapping[tuple[str, str], str] = NOT_YET,
) -> Policy:
    """The policy that `text` states. `name` is how errors call the file. Raises PolicyError at the first fault."""
    source = PolicySource(text, name)
    root = Table(source, (), source.document, tuple(dict.fromkeys(kind.partition(".")[0] for kind in KEYS)))
    general, lifetime = _single(root, "policy"), _single(root, "lifetime")
    pruning, admin = _single(root, "pruning"), _single(root, "admin")
    pools = {name: _pool(table) for name, table in _named(root, "pools").items()}
    tables = _named(root, "tenants")
    keys = _KeyReader(around.other_keys)
    admin_keys = keys.read(admin) or ()
    tenants = {name: _tenant(name, table, keys, around.budget_bytes) for name, table in tables.items()}
    _check_pools(root, pools)
    _check_floors(tables, tenants, around.budget_bytes)
    key_codec, value_codec = _codecs(general, around)
    policy = Policy(
        key_codec=key_codec,
        value_codec=value_codec,
        ladder=_ladder(general),
        at_cap=general.choice("at_cap", get_args(AtCap)) or "reject",
        session_cap=general.size("session_cap"),
        lifetime=_lifetime(lifetime),
        pruning=Pruning(pruning.string("method"), pruning.size("budget")),
        prices=_prices(_single(root, "prices")),
        pools=MappingProxyType(pools),
        tenants=MappingProxyType(tenants),
        admin_keys=admin_keys,
        public_prefixes=_public(root),
    )
    # Last, so that a value that is wrong anyway is told first.
    _refuse_what_is_not_kept(source, not_yet)
    return policy


def _single(root: Table, name: str) -> Table:
    return root.table(name, KEYS[name])


def _named(root: Table, name: str) -> dict[str, Table]:
    """The tables [name.NAME], by NAME."""
    tables = root.table(name, None)
    for key in tables.content:
        if not _NAME.fullmatch(key):
            tables.fail(key, f"a name has 1 to 64 of A-Z a-z 0-9 _ . -, got {told(key)}")
    return {key: tables.table(key, KEYS[f"{name}.NAME"]) for key in tables.content}


def _codecs(table: Table, around: Surroundings) -> tuple[str, str]:
    both = table.choice("codec", codec_names())
    default = Policy()
    chosen = []
    for key, running, usual in (
        ("key_codec", around.key_codec, default.key_codec),
        ("value_codec", around.value_codec, default.value_codec),
    ):
        own = table.choice(key, codec_names())
        named = own or both
        if named is not None and running is not None and named != running:
            message = (
                f"{named!r}, but the server runs with {running!r} as its {key}: the codecs of the file and of the "
                "command line must agree, and change only with a restart"
            )
            table.fail(key if own else "codec", message)
        chosen.append(named or running or usual)
    return chosen[0], chosen[1]


def _ladder(table: Table) -> tuple[str, ...]:
    steps = table.strings("ladder", "codecs, such as [\"f16\", \"int8\", \"int4\"]") or ()  # fmt: skip
    names = codec_names()
    for i, step in enumerate(steps):
        if step not in names:
            table.fail("ladder", f"there is no codec {told(step)}; there are {', '.join(names)}", i)
        if i and names.index(step) <= names.index(steps[i - 1]):
            table.fail("ladder", f"each step must be coarser than the one before, got {steps[i - 1]}, then {step}", i)
    return steps


def _lifetime(table: Table) -> Lifetime:
    ttl_s, max_age_s = (table.integer(key, 1, MAX_SECONDS) for key in ("ttl_s", "max_age_s"))
    if ttl_s is not None and max_age_s is not None and ttl_s > max_age_s:
        table.fail("ttl_s", f"ttl_s is at most max_age_s, which is {max_age_s}, got {ttl_s}")
    return Lifetime(ttl_s, max_age_s)


def _prices(table: Table) -> Prices | None:
    if not table.exists:
        return None
    currency = table.required("currency", table.string("currency"))
    if not _CURRENCY.fullmatch(currency):
        table.fail("currency", f"a currency is three capital letters, such as EUR, got {told(currency)}")
    cached, computed, output = (table.required(key, table.price(key)) for key in ("cached", "computed", "output"))
    return Prices(currency, cached, computed, output)


def _pool(table: Table) -> Pool:
    share = table.required("share", table.share("share"))
    min_tokens = table.integer("min_tokens", 0, MAX_TOKENS)
    return Pool(share, table.integer("step_tokens", 1, MAX_TOKENS), min_tokens or 0)


def _check_pools(root: Table, pools: Mapping[str, Pool]) -> None:
    if not pools:
        return
    total = Fraction(0)
    thresholds: dict[int, str] = {}
    for name, pool in pools.items():
        total += pool.share
        if total > 1:
            root.fail("pools", f"the shares of the pools add up to at most 1, with this one to {_short(total)}", name,
                      "share")  # fmt: skip
        other = thresholds.setdefault(pool.min_tokens, name)
        if other != name:
            message = f"the pools {other} and {name} have the same min_tokens, {pool.min_tokens}"
            root.fail("pools", f"{message}; a request must know its pool", name, "min_tokens")
    if 0 not in thresholds:
        lowest = min(thresholds)
        message = f"no pool takes requests of fewer than {lowest} tokens; one needs min_tokens = 0"
        root.fail("pools", message, thresholds[lowest], "min_tokens")


def _tenant(name: str, table: Table, keys: _KeyReader, budget_bytes: int | None) -> TenantPolicy:
    digests = keys.read(table)
    if name == ADMIN_TENANT and digests:
        table.fail("keys", f"the tenant {name} is that of the keys in [admin]; list them there")
    if digests is None and name not in (ADMIN_TENANT, DEFAULT_TENANT):
        table.fail(None, f"the tenant {name} has no keys; list them, or write keys = [] to let nobody in")
    floor, cap = table.size("floor"), table.size("cap")
    if floor is not None and cap is not None and _exceeds(floor, cap, budget_bytes):
        table.fail("floor", f"a floor is at most the cap, which is {cap.text}, got {floor.text}")
    return TenantPolicy(digests or (), floor, cap, table.size("session_cap"), table.integer("rate", 1, MAX_RATE))


def _exceeds(a: Size, b: Size, budget_bytes: int | None) -> bool:
    """Whether a > b. Bytes and a share can be compared once the budget is known."""
    if a.share is not None and b.share is not None:
        return a.share > b.share
    if a.n_bytes is not None and b.n_bytes is not None:
        return a.n_bytes > b.n_bytes
    return budget_bytes is not None and a.of(budget_bytes) > b.of(budget_bytes)


def _check_floors(tables: Mapping[str, Table], tenants: Mapping[str, TenantPolicy], budget_bytes: int | None) -> None:
    shares, n_bytes = Fraction(0), 0
    for name, tenant in tenants.items():
        if tenant.floor is None:
            continue
        shares += tenant.floor.share or 0
        n_bytes += tenant.floor.n_bytes or 0
        if shares > 1:
            tables[name].fail("floor", f"the floors add up to at most 100%, with this one to {_short(shares * 100)}%")
        if budget_bytes is not None and shares * budget_bytes + n_bytes > budget_bytes:
            total = int(shares * budget_bytes) + n_bytes
            message = f"the floors add up to at most the budget of {budget_bytes} bytes, with this one to {total}"
            tables[name].fail("floor", message)


def _public(root: Table) -> tuple[str, ...]:
    prefixes: list[str] = []
    for table in root.tables("public", KEYS["public"]):
        prefix = table.required("prefix", table.string("prefix"))
        if prefix in prefixes:
            table.fail("prefix", "this prefix is listed twice")
        prefixes.append(prefix)
    return tuple(prefixes)


class _KeyReader:
    """Reads `keys`. A key belongs to one caller; messages never quote one."""

    def __init__(self, other_keys: Collection[bytes]) -> None:
        self._owners = dict.fromkeys(other_keys, "in the API key file")

    def read(self, table: Table) -> tuple[bytes, ...] | None:
        shape = 'strings "sha256:" and 64 hex digits'
        texts = table.strings("keys", shape, secret=True)
        if texts is None:
            return None
        digests = []
        for i, text in enumerate(texts):
            match = _DIGEST.fullmatch(text)
            if match is None:
                message = f'a key is written as "sha256:" and 64 hex digits, got {len(text)} characters of another form'
                table.fail("keys", message, i)
            digest = bytes.fromhex(match.group(1))
            if digest in self._owners:
                table.fail("keys", f"this key is listed already, {self._owners[digest]}", i)
            self._owners[digest] = f"on line {table.line('keys', i)}"
            digests.append(digest)
        return tuple(digests)


def _refuse_what_is_not_kept(source: PolicySource, not_yet: Mapping[tuple[str, str], str]) -> None:
    """Tell of the first such key, in the file's order."""
    found: list[tuple[int, str]] = []

    def check(kind: str, title: str, path: tuple[str | int, ...], content: Mapping[str, object]) -> None:
        for key, value in content.items():
            for named in (key, f"{key} = {value}" if isinstance(value, str) else key):
                if (reason := not_yet.get((kind, named))) is not None:
                    message = f"{named} in {title} cannot be kept: {reason}; leave it out"
                    found.append((source.lines.of(*path, key), message))

    for kind in KEYS:
        name, _, is_named = kind.partition(".")
        content = source.document.get(name, {})
        if isinstance(content, list):
            for i, element in enumerate(content):
                check(kind, f"[[{name}]]", (name, i), element)
        elif is_named:
            for key, table in content.items():
                check(kind, f"[{name}.{key}]", (name, key), table)
        else:
            check(kind, f"[{name}]", (name,), content)
    if found:
        line, message = min(found)
        source.fail_at(line, message)


def _short(number: Fraction) -> str:
    return f"{float(number):.10g}"
