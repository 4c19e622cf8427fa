"""A drafter of your own: after each token it drafts the one that followed it last time in the context."""

from collections.abc import Sequence
from typing import Any

from specbench import FreeDrafter, Guess, autoregressive_generate, load_target, speculative_generate, summary


class Bigrams(FreeDrafter):
    after: dict[int, int]

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        super().begin(prompt)
        self.after = {}

    def take_in(self, context: Sequence[int], first: int) -> None:
        self.after |= zip(context[max(0, first - 1) :], context[max(1, first) :], strict=False)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Any) -> Guess | None:
        token = self.after.get([*context[-1:], *drafted][-1])
        return None if token is None else Guess(token, match_confidence=0.5)


def main() -> float:
    target = load_target("smollm2-135m")
    prompt = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,"
    result = speculative_generate(prompt, target, Bigrams("bigrams"), gamma=4, chat=False, max_new_tokens=16)
    plain = autoregressive_generate(prompt, target, chat=False, max_new_tokens=16)
    tokens_per_step = float(summary(result)["tokens_per_step"])
    print(
        f"{plain.text}\n{tokens_per_step:.2f} tokens per step; the same: {result.token_ids == plain.token_ids}"
    )
    return tokens_per_step


if __name__ == "__main__":
    main()
