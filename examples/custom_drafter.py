"""A drafter of your own: it drafts from texts that outputs are likely to repeat, such as a license or a template."""

from collections.abc import Sequence
from typing import Any

from specbench import load_target, speculative_generate, summary
from specbench.drafters.free import FreeDrafter, Guess


class Phrases(FreeDrafter):
    """Drafts what follows the last two tokens in given texts."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__("phrases")
        self.texts = texts
        self.after = {tuple(text[i : i + 2]): text[i + 2] for text in texts for i in range(len(text) - 2)}

    def fork(self, scorer_like: Any) -> "Phrases":
        return Phrases(self.texts)

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Learn nothing from the context."""

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Any) -> Guess | None:
        token = self.after.get(tuple([*context[-2:], *drafted][-2:]))
        return None if token is None else Guess(token, match_confidence=0.8)


def main() -> float:
    target = load_target("smollm2-135m")
    text = "Roses are red, violets are blue, sugar is sweet, and so are you."
    drafter, prompt = Phrases([target.tokenizer.encode(text)]), f"{text}\n{text}\nRoses are"
    result = speculative_generate(prompt, target, drafter, gamma=8, chat=False, max_new_tokens=16)
    tokens_per_step = float(summary(result)["tokens_per_step"])
    print(f"{result.text}\n{tokens_per_step:.2f} tokens per step")
    return tokens_per_step


if __name__ == "__main__":
    main()
