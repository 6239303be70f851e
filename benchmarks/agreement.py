"""Whether greedy text agrees with an oracle's, up to what the oracle itself leaves open.

Two correct implementations round differently, so where the oracle's two best tokens are nearly tied either may come
first, and after it the texts go their own ways. Anything else is a disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Nats between the oracle's two best tokens below which the choice is open.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class OracleStep:
    """One greedy token of the oracle, and the runner-up; log-probabilities in nats."""

    token: int
    logprob: float
    runner_up: int
    runner_up_logprob: float

    @property
    def gap(self) -> float:
        return self.logprob - self.runner_up_logprob


@dataclass(frozen=True, slots=True)
class Agreement:
    """Attributes:
    n_equal: tokens before the first difference.
    n_compared: tokens compared: the shorter of the two.
    gap: the oracle's gap at the first difference; None where there is none.
    took_runner_up: whether the other side took the oracle's second choice there.
    """

    n_equal: int
    n_compared: int
    gap: float | None = None
    took_runner_up: bool = False
    tolerance: float = TOLERANCE

    @property
    def equal(self) -> bool:
        return self.n_equal == self.n_compared

    @property
    def agrees(self) -> bool:
        """Equal, or different first where the oracle's two best are within the tolerance, by taking the second."""
        return self.equal or (self.gap is not None and self.gap <= self.tolerance and self.took_runner_up)


def compare(oracle: Sequence[OracleStep], tokens: Sequence[int], tolerance: float = TOLERANCE) -> Agreement:
    """Compare tokens with an oracle's greedy choices from the same prompt.

    The choices may be those of a run of its own, or those that it makes along `tokens`: up to the first difference, all
    that counts, they are the same.
    """
    n = min(len(oracle), len(tokens))
    for i in range(n):
        step = oracle[i]
        if tokens[i] != step.token:
            return Agreement(i, n, step.gap, tokens[i] == step.runner_up, tolerance)
    return Agreement(n, n, tolerance=tolerance)
