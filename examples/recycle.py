"""A drafter that grows trees: it remembers what the target found likely after each token (Token Recycling).

Luo et al. 2024, arXiv 2408.08696. The target's logits after a verified token, accepted or not, say what to draft the
next time that this token comes.

    specbench generate "Why is the sky blue?" --drafter examples/recycle.py:Recycle --draft-policy static-tree
"""

from collections.abc import Mapping, Sequence

from specbench import autoregressive_generate, load_target, speculative_generate, summary
from specbench.decoding.drafts import StepOutcome
from specbench.drafters.free import CandidateDrafter
from specbench.policies import build_policy

CHANCES = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.01, 0.01)
"""The probability of each rank to come next."""


class Recycle(CandidateDrafter):
    likely: dict[int, list[int]]

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.likely = {}

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Nothing: what it learns comes with the logits."""

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        known = self.likely.get([*context[-1:], *drafted][-1], ())
        return dict(zip(known, CHANCES, strict=False))

    def update(self, outcome: StepOutcome) -> None:
        context, emitted = outcome.context, outcome.emitted
        if not emitted:
            return
        best = outcome.logits.topk(len(CHANCES)).indices.tolist()
        rows = outcome.after(range(len(outcome.tokens)))
        self.likely |= {token: best[row] for token, row in zip(outcome.tokens, rows, strict=True)}
        rows = [0, *outcome.after(outcome.path[: emitted - 1])]  # of what was accepted, which comes last
        self.likely |= {token: best[row] for token, row in zip(context[-emitted - 1 : -1], rows, strict=True)}


def main() -> float:
    target, prompt = load_target("smollm2-135m"), "Count from one to forty, in words."
    tree = build_policy("static-tree:nodes=16")
    result = speculative_generate(prompt, target, Recycle("recycle"), policy=tree, max_new_tokens=64)
    plain = autoregressive_generate(prompt, target, max_new_tokens=64)
    tokens_per_step = float(summary(result)["tokens_per_step"])
    print(
        f"{plain.text}\n{tokens_per_step:.2f} tokens per step; the same: {result.token_ids == plain.token_ids}"
    )
    return tokens_per_step


if __name__ == "__main__":
    main()
