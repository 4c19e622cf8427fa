"""A drafter with another tokenizer than the target's: it drafts the tokens that both vocabularies have.

Token-level intersection (TLI; Timor et al. 2025, arXiv 2502.05202): with I the tokens that stand for the same bytes in
both vocabularies, the drafter draws from q'(x) = q(x) / sum over I of q on I, and from nothing elsewhere. That is a
distribution over the target's tokens like any other, so the usual verification keeps the target's distribution at any
temperature.

The drafter reads the context in its own tokens. Those in I are exchanged one for one. The text between them is
tokenized as bytes by the drafter's tokenizer. As such a stretch grows, its tokens may change, so after every step the
drafter's cache is rolled back to the last token in I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbench.backends.torch.scorer import Scorer
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import ForwardRequest
from specbench.decoding.sampling import Sampling
from specbench.drafters.chain import ChainDrafter


@dataclass(frozen=True, eq=False)
class Translation:
    """From a target's token ids to a drafter's.

    Attributes:
        shared: The drafter's id by the target's, for the tokens that both have; one to one.
        spelled: The bytes of the target's other tokens by their ids; those that are not named stand for nothing.
        spell: The drafter's ids for bytes.
        first: What the drafter's texts begin with; ``None`` for nothing.
        tokens: How many tokens the target's vocabulary has.
    """

    shared: Mapping[int, int]
    spelled: Mapping[int, bytes]
    spell: Callable[[bytes], list[int]]
    first: int | None
    tokens: int

    def ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the drafter's ids for a stretch of the target's."""
        ids: list[int] = []
        run = b""
        for token in tokens:
            own = self.shared.get(token)
            if own is None:
                run += self.spelled.get(token, b"")
                continue
            if run:
                ids += self.spell(run)
                run = b""
            ids.append(own)
        return ids + self.spell(run) if run else ids


def longest_matches(text: bytes, vocabulary: Mapping[bytes, int]) -> list[int]:
    """Spell a text with the longest tokens, from left to right; bytes that no token begins with are left out."""
    longest = max(map(len, vocabulary), default=0)
    ids: list[int] = []
    place = 0
    while place < len(text):
        ends = range(min(len(text), place + longest), place, -1)
        end = next((end for end in ends if text[place:end] in vocabulary), None)
        if end is not None:
            ids.append(vocabulary[text[place:end]])
        place = end or place + 1
    return ids


class TranslatingDrafter(ChainDrafter):
    """Drafts with a model that has another tokenizer.

    Args:
        scorer: The model. It reads its own tokens, and its logits are those of the target's (``Scorer.places``).
        name: How the command line names it.
        translation: From the target's tokens to the model's.
    """

    takes_guesses = False  # what follows a token may change its spelling in the model's tokens

    def __init__(self, scorer: Scorer, name: str, translation: Translation) -> None:
        super().__init__(scorer, name)
        self.translation = translation
        self._forget()

    def _forget(self) -> None:
        self._settled: list[int] = []  # the model's ids for the context as far as they will never change
        if self.translation.first is not None:
            self._settled.append(self.translation.first)
        self._read = 0  # how many of the context's tokens that are
        self._fed: list[int] = []  # what the cache holds the beginning of
        self._agreed = 0  # so many of these were settled

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._forget()

    def _ids(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return the model's ids for the context, which only grows, and a draft after it."""
        self._settle(context)
        return self._settled + self.translation.ids([*context[self._read :], *drafted])

    def _settle(self, context: Sequence[int]) -> None:
        """Translate the context up to its last token that both vocabularies have."""
        for place in range(len(context) - 1, self._read - 1, -1):
            if context[place] in self.translation.shared:
                self._settled += self.translation.ids(context[self._read : place + 1])
                self._read = place + 1
                return

    def _asked(self, context: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> ForwardRequest:
        ids = self._ids(context, draft.tokens)
        known = min(self._common(ids), len(ids) - 1)
        if self.scorer.cached_len > known:
            try:
                self.scorer.rollback(known)
            except ValueError:  # a window that has given up what would be needed
                self.scorer.rollback(0)
        self._fed, self._agreed = ids, len(self._settled)
        return ForwardRequest(self.scorer, ids, rows=1)

    def _common(self, ids: Sequence[int]) -> int:
        """Return how many leading ids are the same as those that were fed."""
        length = min(len(ids), len(self._fed))
        start = min(self._agreed, length)
        return next((i for i in range(start, length) if ids[i] != self._fed[i]), length)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        limit = self.scorer.context_limit
        length = len(self._ids(context, drafted))
        return length > 0 and (limit is None or length <= limit)

    def _length(self, context: Sequence[int]) -> int:
        return len(self._ids(context, ()))

    def update(self, outcome: StepOutcome) -> None:
        """Keep what is settled and was read; the spelling of what follows may still change."""
        self._settle(outcome.context[:-1])
        self.scorer.rollback(self._common(self._settled))
