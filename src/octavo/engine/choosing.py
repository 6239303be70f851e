"""From a step's hidden states to tokens and log-probabilities: all arithmetic between the runner and an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from octavo.engine.messages import TokenLogprob
from octavo.engine.request import Request, Sequence
from octavo.engine.runner import PROMPT_LOGIT_ROWS, Runner, StepHidden
from octavo.engine.sampler import Draw, sample, token_logprob
from octavo.engine.scheduler import ScheduledSequence
from octavo.ops.base import Ops


@dataclass(frozen=True, slots=True)
class Due:
    """Sequences that want a token after the last row of an item of the step: one, or a request's choices at the end of
    their prompt."""

    item: int
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True)
class Chosen:
    """`logprob` is None unless the request asked for it."""

    sequence: Sequence
    token: int
    logprob: TokenLogprob | None


class Chooser:
    """`alone(request)` is a context in which a fault ends that request only."""

    def __init__(self, runner: Runner, ops: Ops, alone: Callable[[Request], AbstractContextManager[None]]) -> None:
        self._runner = runner
        self._ops = ops
        self._alone = alone

    def tokens(self, due: list[Due], result: StepHidden) -> list[Chosen]:
        """A token for each sequence that is due; none for one whose choosing failed."""
        if not due:
            return []
        logits = self._runner.last_logits(result, [one.item for one in due])
        wanted = [k for k, one in enumerate(due) if one.sequences[0].request.message.params.logprobs is not None]
        logprobs = dict(zip(wanted, self._ops.log_softmax(logits[wanted]), strict=True)) if wanted else {}
        draws: list[tuple[Sequence, Draw]] = []
        for k, one in enumerate(due):
            for sequence in one.sequences:
                with self._alone(sequence.request):
                    draws.append((sequence, sequence.sampler.draw(logits, k, len(sequence.tokens))))
        chosen: list[Chosen] = []
        for (sequence, draw), token in zip(draws, sample(self._ops, logits, [d for _, d in draws]), strict=True):
            with self._alone(sequence.request):
                sequence.sampler.accept(token)
                n_top = sequence.request.message.params.logprobs or 0
                entry = token_logprob(logprobs[draw.row], token, n_top) if draw.row in logprobs else None
                chosen.append(Chosen(sequence, token, entry))
        return chosen

    def prompts(
        self, step: list[ScheduledSequence], result: StepHidden
    ) -> Iterator[tuple[ScheduledSequence, list[TokenLogprob]]]:
        """Log-probabilities of the prompt tokens that the step's rows predict, for requests that want them. Before the
        step is committed."""
        for i, item in enumerate(step):
            if item.sequence.index == 0 and item.sequence.request.wants_prompt_logprobs:
                entries = None
                with self._alone(item.sequence.request):
                    entries = self._prompt(item, result, int(result.row_start[i]))
                if entries is not None:
                    yield item, entries

    def _prompt(self, item: ScheduledSequence, result: StepHidden, first_row: int) -> list[TokenLogprob]:
        """Logits of position i predict token i + 1 of the prompt."""
        request, start = item.sequence.request, item.sequence.num_computed_tokens
        prompt, n_top = request.message.prompt_token_ids, request.message.params.prompt_logprobs or 0
        # After a preemption the first rows are computed once more; their entries are there already.
        first = max(start, len(request.prompt_logprobs) - 1)
        end = min(start + item.n_tokens, request.n_prompt - 1)
        entries: list[TokenLogprob] = []
        for position in range(first, end, PROMPT_LOGIT_ROWS):
            n = min(PROMPT_LOGIT_ROWS, end - position)
            logits = self._runner.logits(result, first_row + position - start, n)
            for i, logprobs in enumerate(self._ops.log_softmax(logits)):
                entries.append(token_logprob(logprobs, int(prompt[position + i + 1]), n_top))
        return entries
