"""A drafter by a regular expression: where a text counts (1, 2, ...), it drafts the numbers that come next.

specbench generate --raw "1, 2, 3, 4," --drafter examples/regex_drafter.py:Counting
"""

import re
from collections.abc import Sequence
from typing import Any

import specbench as sb
from specbench import FreeDrafter, Guess

COUNTS = re.compile(r"(\d+)(\D{1,4})(\d+)\Z")
"""Two numbers and what stands between them, at the end of a text."""

_SEEN, _AHEAD = 24, 3
"""How many tokens the expression sees, and how many numbers are drafted after the last."""


class Counting(FreeDrafter):
    def take_in(self, context: Sequence[int], first: int) -> None:
        """Nothing: each guess reads the end of the context."""

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Any) -> Guess | None:
        text = [*context[-_SEEN:], *drafted]
        for known in range(min(len(text), 4 * _AHEAD)):  # tokens at the end that a rule may have drafted
            rest = self.continuation(text[: len(text) - known])
            if len(rest) > known and rest[:known] == text[len(text) - known :]:
                return Guess(rest[known], match_confidence=0.9)
        return None

    def continuation(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the rule has after others; none where it does not match."""
        found = COUNTS.search(self.target.tokenizer.decode(tokens))
        if found is None or int(found[3]) != int(found[1]) + 1:
            return []
        numbers = "".join(f"{found[2]}{int(found[3]) + i}" for i in range(1, _AHEAD + 1))
        return list(self.target.tokenizer.encode(numbers, add_special_tokens=False))


def main() -> float:
    target, prompt = sb.load_target("smollm2-135m"), "Count: 1, 2, 3, 4,"
    drafter = sb.load_drafter(f"{__file__}:Counting", target)
    result = sb.speculative_generate(prompt, target, drafter, gamma=8, chat=False, max_new_tokens=32)
    plain = sb.autoregressive_generate(prompt, target, chat=False, max_new_tokens=32)
    steps = float(sb.summary(result)["tokens_per_step"])
    print(f"{plain.text}\n{steps:.2f} tokens per step; the same: {result.token_ids == plain.token_ids}")
    return steps


if __name__ == "__main__":
    main()
