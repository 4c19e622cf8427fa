"""The verdict on a draft: accept, correct or add a bonus token. Pure functions on tensors.

Rejection sampling as in Leviathan et al. 2023 (Algorithm 1) and Chen et al. 2023: draft t_i is kept with probability
min(1, p_i(t_i) / q_i(t_i)); at the first rejection the corrected token comes from norm(max(0, p_i - q_i)). Greedy
decoding compares with the argmax instead and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.decoding.protocols import Draft, Sibling
from specbench.decoding.records import Closing
from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["Verdict", "acceptance_probabilities", "expected_acceptance", "judge", "residual"]

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class Verdict:
    """What became of a draft.

    Attributes:
        accepted: Number of drafts kept.
        tokens: The kept drafts and the closing token, ``accepted + 1`` ids; one more if that is among the siblings.
        closing: Where the token behind the kept drafts came from.
        p: The target's distributions, float32 [γ + 1, vocab]; ``None`` in greedy decoding, which needs none.
        closing_distribution: What the closing token was drawn from, [vocab], not normalised; ``None`` in greedy mode.
        r: The γ uniform numbers the drafts were tested with; empty in greedy decoding.
        sibling: Which of the siblings the closing token is; ``None`` if it is none of them.
    """

    accepted: int
    tokens: list[int]
    closing: Closing
    p: torch.Tensor | None = None
    closing_distribution: torch.Tensor | None = None
    r: Sequence[float] = ()
    sibling: int | None = None

    @property
    def tested(self) -> int:
        """Number of drafts that got a verdict: the kept ones and the rejected one, if any."""
        return self.accepted + (self.closing == "corrected")


def judge(
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,
    *,
    residual_adjustment: bool = True,
    siblings: Sequence[Sibling] = (),
) -> Verdict:
    """Judge a draft by the target's logits.

    Args:
        draft: γ tokens and what they were drawn from.
        logits: The target's, [γ + 1 + siblings, vocab]; row i stands before draft i, row γ after the last, and the
            others behind a sibling each.
        context: The tokens before the draft (the repetition penalty looks at them).
        sampling: The transforms; they make p out of the logits.
        random: Source of the tests and the closing draw.
        residual_adjustment: False draws the corrected token from p itself, which is wrong and exists to show that.
        siblings: Alternatives verified beside the draft; in greedy decoding only.
    """
    gamma = len(draft.tokens)
    if sampling.greedy:
        choices = sampling.choose(logits[: gamma + 1], context, draft.tokens)
        accepted = next(
            (i for i, (t, best) in enumerate(zip(draft.tokens, choices, strict=False)) if t != best), gamma
        )
        verdict = Verdict(accepted, choices[: accepted + 1], _closing(accepted, gamma))
        if (accepted, choices[accepted]) in siblings:
            row = siblings.index(Sibling(accepted, choices[accepted]))
            behind = logits[gamma + 1 + row : gamma + 2 + row]
            verdict.sibling = row
            verdict.tokens += sampling.choose(behind, [*context, *verdict.tokens])
        return verdict
    p = sampling.probabilities(logits, context, draft.tokens)
    accepted, r = random.test(acceptance_probabilities(draft, p)) if gamma else (0, [])
    distribution = p[accepted]
    if accepted < gamma and residual_adjustment:
        distribution = residual(draft, p, accepted)
    closing_token = random.draw(distribution)
    return Verdict(
        accepted, [*draft.tokens[:accepted], closing_token], _closing(accepted, gamma), p, distribution, r
    )


def _closing(accepted: int, gamma: int) -> Closing:
    if accepted < gamma:
        return "corrected"
    return "bonus" if gamma else "target"


def acceptance_probabilities(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """``min(1, p_i(t_i) / q_i(t_i))`` for every draft, float32 [γ]; p is [>= γ, vocab].

    q_i(t_i) is floored at the smallest normal float, for it can underflow to 0 although t_i was drawn.
    """
    tokens = torch.tensor([draft.tokens], dtype=torch.long, device=p.device).T
    p_of_token = p.gather(-1, tokens)  # of the first γ rows
    if draft.q is not None:
        q_of_token = draft.q.gather(-1, tokens)
        p_of_token = p_of_token.div_(q_of_token.clamp_min_(_SMALLEST)).clamp_max_(1.0)
    return p_of_token.squeeze(-1)


def residual(draft: Draft, p: torch.Tensor, i: int) -> torch.Tensor:
    """``max(0, p_i - q_i)``, float32 [vocab], not normalised: what a corrected token at position i is drawn from.

    Where nothing is left (p <= q everywhere, by rounding) it is p_i itself.
    """
    if draft.q is None:
        rest = p[i].clone()
        rest[draft.tokens[i]] = 0.0
    else:
        rest = (p[i] - draft.q[i]).clamp_min_(0.0)
    return rest if float(rest.sum()) > _SMALLEST else p[i]


def expected_acceptance(draft: Draft, verdict: Verdict, tested: int) -> tuple[float, ...]:
    """``sum_x min(p_i(x), q_i(x))`` for the first ``tested`` drafts: the chance that a draft drawn from q_i is kept.

    It is 1 minus the total variation distance of p_i and q_i (Leviathan et al. 2023, Theorem 3.5). In greedy decoding
    both are one-hot and the terms are 0 or 1; for a drafter without probabilities the term is p_i(t_i).
    """
    if tested == 0:
        return ()
    if verdict.p is None:
        return tuple(float(i < verdict.accepted) for i in range(tested))
    if draft.q is None:
        values = acceptance_probabilities(draft, verdict.p)[:tested]
    else:
        values = torch.minimum(verdict.p[:tested], draft.q[:tested]).sum(dim=-1)
    return tuple(min(1.0, value) for value in values.tolist())
