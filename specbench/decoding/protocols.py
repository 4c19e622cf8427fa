"""What the decoding loop works with: a target's scorer, a drafter, a draft policy.

    DraftPolicy   decides how many tokens a step drafts, and in which shape
    Drafter       proposes them
    Scorer        a model with the KV cache of one context; runs forward passes

Code that needs a forward pass yields a ``ForwardRequest`` and is sent a ``ForwardOutput``. Its caller runs the pass, so
it decides when, and together with which other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft, Draws, StepOutcome
    from specbench.decoding.records import Step
    from specbench.decoding.sampling import Randomness, Sampling

T = TypeVar("T")


class ForwardRequest(NamedTuple):
    """A forward pass that is needed.

    Attributes:
        scorer: Runs it.
        context: All tokens so far; the scorer feeds those that are not in its cache. It may grow after the pass.
        tokens: Draft tokens after the context, which may be rolled back.
        parents: The parent of each of ``tokens``, see ``Draft``; ``None`` for a chain.
        rows: How many of the last positions need logits; ``None`` for the context's last one and every draft token.
        layers: Layers whose hidden states are needed, as ``transformers`` counts them: 0 is the first layer's input,
            and the last one includes the final norm.
    """

    scorer: Scorer
    context: Sequence[int]
    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    rows: int | None = None
    layers: Sequence[int] = ()


class ForwardOutput(NamedTuple):
    """The result of a forward pass: row 0 follows the context, row i + 1 follows draft token i.

    Attributes:
        logits: [rows, vocab], in the model's dtype; of a drafter with a ``DraftVocabulary`` [rows, its tokens].
        hidden: Hidden states of the requested layers at all fed positions, [fed, layers, width]; the last ones belong
            to ``logits``. ``None`` if none were requested.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


Decoding: TypeAlias = Generator[ForwardRequest, ForwardOutput, T]
"""A computation that yields forward requests and returns a T."""


def run_to_end(decoding: Decoding[T]) -> T:
    """Run a computation with all its forward passes, and return its result."""
    try:
        request = next(decoding)
        while True:
            request = decoding.send(request.scorer.score(request))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Drawing(Protocol):
    """Draws a node's candidates in the way a verification method needs (``specbench.decoding.verdicts``)."""

    def __call__(self, distributions: TokenDistribution, count: int, random: Randomness, /) -> list[Draws]:
        """Draw up to ``count`` candidates; return them in the order drawn."""
        ...


class DraftPolicy:
    """Decides how many tokens a step drafts, and in which shape. One object serves one prompt at a time.

    In each step the drafter calls ``begin`` once. Then it calls ``expand``, before it runs a forward pass for the nodes
    that this returns, and ``num_children``, before it draws their candidates, until either returns nothing. In the end
    it calls ``prune`` for a tree. Where a cascade has a token without a forward pass, it calls ``prefers_model`` before
    ``expand``. The loop calls ``observe`` after the step.

    The number of candidates may depend on everything drawn before them, and never on their own tokens: that keeps the
    target's output distribution.

    Attributes:
        name: The policy as a spec: its word and the options that are not at their defaults.
        branches: Whether its drafts are trees; otherwise a node has one child at most.
        certain_only: Whether nodes are chosen by their own tokens, so that none of them may be drawn.
        unconditional: Whether ``begin`` alone decides, and nothing is read from the draft.
    """

    name: str
    branches = certain_only = unconditional = False

    def reset(self) -> None:
        """Forget everything: a new prompt begins."""

    def begin(self, budget: int) -> int:
        """Start a step.

        Args:
            budget: The longest branch that still fits, in tokens.

        Returns:
            The longest branch wanted, 0 for none.
        """
        raise NotImplementedError

    def expand(self, draft: Draft) -> Sequence[int]:
        """Return the nodes to draft from next, ascending, of those drafted since the last call; -1 is the context.

        Args:
            draft: The draft so far; a ``GrowingTree`` if the policy branches. The policy may read it until the step
                ends. ``match_confidence`` may have an entry for the next token already.
        """
        raise NotImplementedError

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        """Return how many candidates to draw after each of these nodes.

        Args:
            draft: See ``expand``.
            nodes: Those it returned, without those after which every token is ruled out.
            expected: The drafter's distribution after each; for a chain its untransformed ``Logits``.
        """
        raise NotImplementedError

    def prune(self, draft: Draft) -> Sequence[int] | None:  # noqa: ARG002
        """Return the nodes of a tree to verify, ascending and with all their ancestors; ``None`` for all."""
        return None

    def prefers_model(self, draft: Draft) -> bool:  # noqa: ARG002
        """Return whether a cascade's model is to draft the next token, though one is there without a forward pass."""
        return False

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""

    def notes(self) -> Mapping[str, float]:
        """Return what to record about the current step, by name."""
        return {}

    def costs(self) -> dict[str, Any] | None:
        """Return the costs of forward passes it has used, as JSON (see ``parse_costs``); ``None`` if it needs none."""
        return None


class Scorer(Protocol):
    """A model with the KV cache of one context."""

    @property
    def context_limit(self) -> int | None:
        """The longest context the model can read, in tokens; ``None`` for no limit."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees. The first call may run forward passes, which ends the current context."""
        ...

    @property
    def batch(self) -> Batch | None:
        """Runs its forward passes together with those of other scorers; ``None`` if they run one by one."""
        ...

    @property
    def reads_in_parts(self) -> bool:
        """Whether a long context may be read in several forward passes."""
        ...

    @property
    def epoch(self) -> object:
        """An object that changes with every ``begin``."""
        ...

    @property
    def cached_len(self) -> int:
        """How many tokens at the start of the context are in the cache."""
        ...

    def begin(self) -> None:
        """Start a new context."""
        ...

    def resume(self, kept: int) -> None:
        """Start a new context whose first ``kept`` tokens are those of the last one, and may stay in the cache."""
        ...

    def reserve(self, request: ForwardRequest, /) -> bool:
        """Reserve memory for a forward pass; shared prefixes may raise ``cached_len``.

        Returns:
            Whether there is enough memory now. If not, nothing has changed.

        Raises:
            UsageError: There would not be enough even if nothing else were cached.
        """
        ...

    def score(self, request: ForwardRequest, /) -> ForwardOutput:
        """Run a forward pass over the tokens of the context that are not cached, and the draft.

        Raises:
            UsageError: A tree or hidden states are requested and not supported, or memory runs out.
        """
        ...

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Keep at most the first ``length`` tokens of the present context in the cache.

        ``rollback(0)`` frees all memory, and is allowed between any two forward passes: the next one reads everything
        again.

        Args:
            length: In tokens.
            path: The nodes of the last draft that the context has grown by, root to leaf.
        """
        ...


ScorerLike: TypeAlias = Callable[[Any], Any]
"""Makes a scorer for another request from one of a loaded model."""


class Batch(Protocol):
    """A model that reads several contexts, each with a scorer of its own, in one forward pass."""

    @property
    def loaded(self) -> object:
        """The loaded model; the same for all batches that share it."""
        ...

    def score(self, requests: Sequence[ForwardRequest], /) -> Sequence[ForwardOutput]:
        """Run one forward pass for all requests, at most one per scorer.

        If it raises, every cache is as before, and requests may be repeated one by one.

        Raises:
            UsageError: See ``Scorer.score``.
        """
        ...


class Drafter:
    """Proposes tokens. The defaults here are of one that drafts chains and has no state; only ``propose`` is missing.

    The loop calls ``begin`` for a prompt, ``update`` after the target has read it, then ``propose`` and ``update`` in
    every step.

    Attributes:
        name: The drafter as the command line names it, with its options.
        several: Whether its proposals merge the chains of several drafters.
        certain: Whether its trees contain no drawn tokens.
    """

    several = certain = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def epoch(self) -> object:
        """An object that changes with every ``begin`` that ends an unfinished context."""
        return 0

    @property
    def draftable(self) -> frozenset[int] | None:
        """The tokens that its model can draft; ``None`` for all."""
        return None

    @property
    def takes_trees(self) -> bool:
        """Whether it can draft trees with its model and cache."""
        return False

    @property
    def layers(self) -> Sequence[int]:
        """The target's layers whose hidden states it needs, see ``ForwardRequest``."""
        return ()

    def fork(self, scorer_like: ScorerLike) -> Drafter:
        """Return a drafter for another request, with the same models and settings and no state.

        Args:
            scorer_like: Makes its scorers.
        """
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new prompt: forget the last one, unless set to keep something. The prompt is read later."""

    def resume(self, prompt: Sequence[int], kept: int) -> None:  # noqa: ARG002
        """Start a new prompt whose first ``kept`` tokens are those of the last context, and may stay in caches."""
        self.begin(prompt)

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing,
    ) -> Decoding[Draft]:
        """Draft what continues ``context``.

        Args:
            context: All tokens so far; no model has read the last one yet.
            budget: The longest branch, in tokens; 0 or more.
            policy: Decides how many tokens, and in which shape; if it branches, the drafter ``takes_trees``.
            sampling: The target's transforms; a drafter that draws uses the same ones.
            random: The source of random draws.
            drawing: Draws a tree node's candidates.
        """
        raise NotImplementedError

    def update(self, outcome: StepOutcome) -> None:
        """Learn from a step or the prefill, and roll back caches to all tokens but the last one."""
