"""A draft policy of your own: twice as many tokens after a draft that was fully accepted, two after any other."""

from specbench import Step, load_drafter, load_target, speculative_generate, summary
from specbench.decoding.protocols import NewPrompt
from specbench.policies.base import ChainPolicy


class Doubling(ChainPolicy):
    """Drafts 2 tokens, and twice as many after each fully accepted draft, up to ``gamma_max``.

    The draft length depends on earlier steps only, so the output keeps the target's distribution.
    """

    def __init__(self, gamma_max: int = 16) -> None:
        self.gamma_max, self.name = gamma_max, f"doubling:max={gamma_max}"
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:
        self.gamma = 2

    def begin_step(self, budget: int) -> int:
        return min(self.gamma, budget)

    def observe(self, step: Step) -> None:
        if step.gamma:
            accepted = step.accepted == step.gamma
            self.gamma = min(2 * self.gamma, self.gamma_max) if accepted else 2


def main() -> list[int]:
    target = load_target("smollm2-135m")
    drafter = load_drafter("self:int8", target)
    result = speculative_generate(
        "Why is the sky blue?", target, drafter, policy=Doubling(), max_new_tokens=48, ignore_eos=True
    )
    lengths = [step.gamma for step in result.steps]
    print("draft lengths:", lengths)
    print(f"{summary(result)['tokens_per_step']:.2f} tokens per step")
    return lengths


if __name__ == "__main__":
    main()
