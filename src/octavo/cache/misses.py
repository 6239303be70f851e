"""Where and why a prefix hit ended, in the terms of a receipt."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.cache.ghosts import Ghosts
from octavo.cache.manager import KVCache
from octavo.cache.radix import Match, Node, PrefixIdentity
from octavo.cache.receipt import Miss

I32 = NDArray[np.int32]

#: Tokens that a receipt shows before and from the first difference on.
BEFORE, BEHIND = 6, 10
#: Continuations of one prefix that are compared with the prompt, the latest first.
MAX_SIBLINGS = 4096


def find_miss(
    cache: KVCache, ghosts: Ghosts | None, identity: PrefixIdentity, tokens: I32, match: Match, limit: int
) -> Miss | None:
    """None where all that a hit may serve (`limit` tokens, in whole pages) was served."""
    size, at = cache.page_size, match.n_tokens
    if not cache.prefix_cache or limit == 0 < len(tokens) - 1:
        return Miss("disabled", 0)
    wanted = limit // size * size
    if wanted == 0:
        return Miss("too_short", 0)
    if at == wanted:
        return None
    pages = [tokens[i : i + size].tobytes() for i in range(at, wanted, size)]
    gone = ghosts.look(identity, match.node, pages) if ghosts is not None else None
    if gone is not None:
        return Miss(gone, at)
    if match.end.reason == "missing":
        return Miss("evicted", at)
    if match.end.reason == "expired":
        return Miss("expired", at)
    level = cache.tree.level(identity, match.node)
    sibling, same = _nearest(level.values(), tokens[at : at + size])
    if sibling is not None and (same or at):
        return _diverged(match, sibling, tokens, at + same, size)
    if not at:
        for other in cache.tree.identities():
            if (other.tenant, other.salt, other.adapter) != (identity.tenant, identity.salt, identity.adapter):
                continue
            if other != identity and pages[0] in cache.tree.level(other, None):
                same_build = other.fingerprint == identity.fingerprint
                return Miss("other_policy" if same_build else "other_build", 0)
    return Miss("cold", at)


def _nearest(siblings: Iterable[Node], page: I32) -> tuple[Node | None, int]:
    """The node that begins most like the page, and by how many tokens; the latest used of several."""
    best: Node | None = None
    most = -1
    for node in sorted(siblings, key=lambda n: -n.last_used)[:MAX_SIBLINGS]:
        if most > 0 and node.key[: 4 * most] != page[:most].tobytes():
            continue
        different = np.flatnonzero(np.frombuffer(node.key, dtype=np.int32) != page)
        same = int(different[0]) if len(different) else len(page)
        if same > most:
            best, most = node, same
    return best, max(most, 0)


def _diverged(match: Match, sibling: Node, tokens: I32, at: int, size: int) -> Miss:
    start = max(at - BEFORE, 0)
    known = np.frombuffer(b"".join(node.key for node in (*match.path[start // size :], sibling)), dtype=np.int32)
    expected = known[start % size :][: at - start + BEHIND]
    return Miss("diverged", at, tuple(expected.tolist()), tuple(tokens[start : at + BEHIND].tolist()))
