"""The verdict on a draft: accept, correct or add a bonus token.

Rejection sampling as in Leviathan et al. 2023 (Algorithm 1) and Chen et al. 2023: draft t_i is kept with probability
min(1, p_i(t_i) / q_i(t_i)); at the first rejection the corrected token comes from norm(max(0, p_i - q_i)). Greedy
decoding compares with the argmax instead and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from specbench.decoding.drafts import Draft
from specbench.decoding.logits import NoTokenError
from specbench.decoding.protocols import Drawing, top
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verdicts import METHODS, Walk
from specbench.specs.policies import VerificationName

_SMALLEST = torch.finfo(torch.float32).tiny

_FEW = 32_000
"""Up to so many logits, choosing in all rows at once is faster than calling a second time."""


@dataclass(slots=True)
class Verdict:
    """The verdict on a draft.

    Attributes:
        path: The accepted nodes, root to leaf.
        tokens: Their tokens and the one after them: ``len(path) + 1`` ids.
        p: The target's distributions, float32 [drafts + 1, vocab]; ``None`` in greedy decoding, which needs none.
        closing_distribution: The last token's distribution, [vocab], not normalized; ``None`` in greedy mode.
        r: The uniform numbers the drafts were tested with; empty in greedy decoding.
        rows: The target's distributions after a tree's visited nodes, -1 for the context: [vocab].
    """

    path: Sequence[int]
    tokens: list[int]
    p: torch.Tensor | None = None
    closing_distribution: torch.Tensor | None = None
    r: Sequence[float] = ()
    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """The number of accepted tokens."""
        return len(self.path)


Judge: TypeAlias = Callable[[Draft, torch.Tensor, Sequence[int], Sampling, Randomness], Verdict]


@dataclass(frozen=True, slots=True)
class Verification:
    """Decides which draft tokens are accepted, and draws the token after them.

    Attributes:
        judge: Judges a draft of n tokens by the target's logits, [n + 1, vocab]: row 0 follows the context, row i + 1
            token i. It also takes the tokens before the draft, the transforms from logits to p, and the source of the
            tests and the closing draw.
        drawing: How a tree node's candidates have to be drawn.
        takes_trees: Whether drafts may be trees.
    """

    judge: Judge
    drawing: Drawing
    takes_trees: bool


def verification_of(sampling: Sampling, name: VerificationName = "rejection") -> Verification:
    """Return the verification for these transforms.

    Args:
        sampling: The transforms.
        name: See ``specbench.specs.policies``; in greedy decoding all are the same.
    """
    if sampling.greedy:
        return Verification(partial(_judge, judge_greedily), top, takes_trees=True)
    method = METHODS[name]
    judge = judge_chain if name == "rejection" else partial(judge_tree, method.walk)
    return Verification(partial(_judge, judge), method.drawing, takes_trees=not method.chains_only)


def _judge(
    judge: Judge,
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,
) -> Verdict:
    """Judge a draft; where no token can be chosen, say why."""
    try:
        return judge(draft, logits, context, sampling, random)
    except NoTokenError as error:
        raise sampling.why_no_token(logits) from error


def judge_greedily(
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,  # noqa: ARG001
) -> Verdict:
    """Follow the target's choices from the root as long as they were drafted."""
    few = logits.numel() <= _FEW and not sampling.context_dependent
    chain = len(draft.tokens) if few else draft.chain  # in one call: most paths stay on it
    try:
        choices = sampling.choose(logits[: chain + 1], context, draft.tokens[:chain])
    except NoTokenError:  # perhaps in a row that is not reached
        chain, choices = 0, sampling.choose(logits[:1], context)
    path: list[int] = []
    tokens = choices[:1]
    node = draft.child(-1, tokens[0])
    while node is not None:
        path.append(node)
        if node < chain:
            tokens.append(choices[node + 1])
        else:
            tokens += sampling.choose(logits[node + 1 : node + 2], [*context, *tokens])
        node = draft.child(node, tokens[-1])
    return Verdict(path, tokens)


def judge_chain(
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,
) -> Verdict:
    """Judge a chain by rejection sampling in a few operators."""
    gamma = len(draft.tokens)
    p = sampling.probabilities(logits, context, draft.tokens)
    accepted, r = random.test(acceptance_probabilities(draft, p)) if gamma else (0, [])
    distribution = p[accepted]
    if accepted < gamma:
        distribution = residual(draft, p, accepted)
    tokens = [*draft.tokens[:accepted], random.draw(distribution)]
    return Verdict(range(accepted), tokens, p, distribution, r)


def judge_tree(
    walk: Walk,
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,
) -> Verdict:
    """Judge a tree by a method of ``specbench.decoding.verdicts``."""
    rows: dict[int, torch.Tensor] = {}

    def p(node: int) -> torch.Tensor:
        if node not in rows:
            node_context = [*context, *draft.branch(node)] if sampling.context_dependent else context
            rows[node] = sampling.probabilities(logits[node + 1 : node + 2], node_context)[0]
        return rows[node]

    walked = walk(draft, p, random)
    tokens = [*(draft.tokens[node] for node in walked.path), walked.token]
    return Verdict(walked.path, tokens, closing_distribution=walked.distribution, rows=rows)


def acceptance_probabilities(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """Return ``min(1, p_i(t_i) / q_i(t_i))`` for every token of the chain, float32 [γ]; p is [>= γ, vocab].

    q_i(t_i) is floored at the smallest normal float, for it can underflow to 0 although t_i was drawn.
    """
    tokens = torch.tensor([draft.tokens], dtype=torch.long, device=p.device).T
    p_of_token = p.gather(-1, tokens)  # of the first γ rows
    if draft.q is not None:
        q_of_token = draft.q.gather(-1, tokens)
        p_of_token = p_of_token.div_(q_of_token.clamp_min_(_SMALLEST)).clamp_max_(1.0)
    return p_of_token.squeeze(-1)


def residual(draft: Draft, p: torch.Tensor, i: int) -> torch.Tensor:
    """Return ``max(0, p_i - q_i)``, float32 [vocab], not normalized: the corrected token's distribution.

    Where nothing is left (p <= q everywhere, by rounding) it is p_i itself.
    """
    if draft.q is None:
        rest = p[i].clone()
        rest[draft.tokens[i]] = 0.0
    else:
        rest = (p[i] - draft.q[i]).clamp_min_(0.0)
    return rest if float(rest.sum()) > _SMALLEST else p[i]


def expected_acceptance(draft: Draft, verdict: Verdict, tested: int) -> tuple[float, ...]:
    """Return ``sum_x min(p_i(x), q_i(x))`` for the first ``tested`` tokens: their chance to be accepted.

    It is 1 minus the total variation distance of p_i and q_i (Leviathan et al. 2023, Theorem 3.5); 0 or 1 in greedy
    decoding, and p_i(t_i) for a certain token. At a tree node it is of the first draw, or of all certain candidates.
    """
    if tested == 0:
        return ()
    if verdict.rows:
        return tuple(_expected(draft, node, verdict.rows[node]) for node in (-1, *verdict.path)[:tested])
    if verdict.p is None:
        return tuple(float(i < len(verdict.path)) for i in range(tested))
    if draft.q is None:
        values = acceptance_probabilities(draft, verdict.p)[:tested]
    else:
        values = torch.minimum(verdict.p[:tested], draft.q[:tested]).sum(dim=-1)
    return tuple(min(1.0, value) for value in values.tolist())


def _expected(draft: Draft, node: int, p: torch.Tensor) -> float:
    """Return the term of a tree node; p is the target's distribution there, [vocab]."""
    candidates = draft.draws(node)
    q = next((draws.q for draws in candidates if draws.q is not None), None)
    if q is not None:
        return min(1.0, float(torch.minimum(p, q).sum()))
    return min(1.0, float(p[[*{token for draws in candidates for token in draws.tokens}]].sum()))
