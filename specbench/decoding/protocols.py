"""What the decoding loop works with: a target's scorer, a drafter, a draft policy.

    DraftPolicy   decides how many tokens a step drafts, and in which shape
    Drafter       proposes tokens
    Scorer        a model with the KV cache of one context; runs forward passes

Code that needs a forward pass yields a ``ForwardRequest`` and is sent the ``ForwardOutput``. Its caller runs the pass,
and so can choose when to run it, and whether together with those of other requests.

A draft token is either *drawn*, that is, sampled at random from the drafter's distribution q, or *certain*: chosen
without a random draw, such as the likeliest token or one copied from the text. A certain token has no q.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from specbench.decoding.drafts import Draft, Draws

if TYPE_CHECKING:
    import torch

    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.logits import DraftVocabulary
    from specbench.decoding.records import ExpertsRead, Step
    from specbench.decoding.sampling import Randomness, Sampling
    from specbench.specs.policies import VerificationName

T = TypeVar("T")


class ForwardRequest(NamedTuple):
    """A forward pass that is needed.

    Attributes:
        scorer: Runs the pass.
        context: All tokens so far. The scorer feeds those that are not in its cache to the model. The list may grow
            after the pass.
        tokens: Draft tokens after the context, fed too; they may be rolled back later.
        parents: The parent of each of ``tokens``, see ``Draft``; ``None`` for a chain.
        rows: How many of the last positions need logits; ``None`` for the context's last one and every draft token.
        layers: Layers whose hidden states are needed, as ``transformers`` counts them: 0 is the first layer's input,
            and the last one includes the final norm.
        counts_experts: Whether the experts are counted that the pass reads.
        prompt: How many tokens of the context are its prompt; ``None`` for all that its first pass reads. Some models
            read a token otherwise where it is output.
    """

    scorer: Scorer
    context: Sequence[int]
    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    rows: int | None = None
    layers: Sequence[int] = ()
    counts_experts: bool = False
    prompt: int | None = None


class ForwardOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: [rows, vocab], in the model's dtype; of a drafter with a ``DraftVocabulary`` [rows, its tokens]. By
            default row 0 is for the token after the context, and row i + 1 for the token after draft token i.
        hidden: Hidden states of the requested layers, [fed, layers, width], for every token that was fed: first those
            of the context that were not cached, then the draft. ``None`` if none were requested.
        experts: What the request's own tokens read; ``None`` if it was not requested, or the model does not tell.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    experts: ExpertsRead | None = None


Decoding: TypeAlias = Generator[ForwardRequest, ForwardOutput, T]
"""A computation that yields forward requests and returns a T."""


def run_to_end(decoding: Decoding[T]) -> T:
    """Run a computation with all its forward passes, and return its result."""
    try:
        request = next(decoding)
        while True:
            request = decoding.send(request.scorer.score(request))
    except StopIteration as end:
        return end.value


Drawing: TypeAlias = "Callable[[TokenDistribution, int, Randomness], list[Draws]]"
"""Chooses up to so many candidates of a node from the drafter's distribution, in the order chosen, in the way that a
verification method needs (``specbench.decoding.verdicts``)."""


@dataclass(frozen=True)
class DrafterTraits:
    """What a drafter says of itself.

    Attributes:
        name: The drafter as the command line names it, with its options.
        trees: Whether it can draft trees.
        several: Whether its drafts merge the chains of several drafters.
        certain: Whether all tokens of its trees are certain, not drawn.
        layers: The layers of the target whose hidden states it needs, see ``ForwardRequest``.
        vocabulary: The tokens that it can draft; ``None`` for all.
        reading_share: The expected time in which its model reads a prompt, over the target's.
        acceptance: The share of its first draft tokens that were accepted elsewhere, strictly between 0 and 1; ``None``
            if that is not known.
        even_odds: The log-odds with which a token is accepted that it gives a probability of 1/2.
    """

    name: str
    trees: bool = False
    several: bool = False
    certain: bool = False
    layers: Sequence[int] = ()
    vocabulary: DraftVocabulary | None = None
    reading_share: float = 0.2
    acceptance: float | None = None
    even_odds: float = 1.0


@dataclass(frozen=True)
class NewPrompt:
    """What a draft policy is told before the first step of an output.

    Attributes:
        unread: How many tokens of the prompt the drafter's model has to read before it can draft.
        token_s: Seconds in which the target has read a token of the prompt; 0 if it has read none.
        drafter: What is known of the drafter before it has drafted.
    """

    unread: int = 0
    token_s: float = 0.0
    drafter: DrafterTraits = DrafterTraits("unknown")


class DraftPolicy:
    """Decides how many tokens a step drafts, and in which shape. One object serves one prompt at a time.

    The loop calls ``begin`` after the prefill. A drafter with a model then calls it like this in each step:

        limit = policy.begin_step(budget)                      # longest branch; a chain ends there
        while limit and (nodes := policy.expand(draft)):       # nodes to draft after; at first -1, the context
            distributions = ...                                # one forward pass for all these nodes
            counts = policy.num_children(draft, nodes, distributions)
            if not any(counts): break
            ...                                                # add counts[i] candidates after nodes[i] to the draft
        kept = policy.prune(draft)                             # trees only

    A chain that takes no forward passes (lookup, n-gram) needs no ``num_children``. A cascade that has the next token
    without a forward pass calls ``prefers_model`` before ``expand``. The loop calls ``observe`` with the record of each
    step when the next step begins, or at the end of the output.

    How many candidates a node gets may depend on everything that was drawn before them, but not on the candidates'
    own tokens. Otherwise the output would not have the target's distribution.

    Attributes:
        name: The policy as a spec: its word and the options that are not at their defaults.
        branches: Whether its drafts are trees; otherwise a node has one child at most.
        certain_only: Whether it selects nodes by their own tokens. Then all candidates must be certain, none drawn.
        unconditional: Whether ``begin_step`` alone decides the length, so that nothing is read from the draft.
        verification: How its drafts are verified above temperature 0; ``None`` for the method that fits.
    """

    name: str
    verification: VerificationName | None = None
    branches = certain_only = unconditional = False

    def begin(self, prompt: NewPrompt) -> None:
        """Start a new output, and forget the last one."""

    def begin_step(self, budget: int) -> int:
        """Start a step.

        Args:
            budget: The longest branch that fits into the output and the models' contexts, in tokens.

        Returns:
            The longest branch to draft, in tokens; 0 for no draft.
        """
        raise NotImplementedError

    def expand(self, draft: Draft) -> Sequence[int]:
        """Return the nodes to draft after next, out of those added since the last call.

        Args:
            draft: The draft so far; a ``GrowingTree`` if the policy branches. The policy may read it until the step
                ends. If the next token is found already, without a forward pass, it is ``draft.guess``.

        Returns:
            Nodes in ascending order, -1 for the context; empty to end the draft.
        """
        raise NotImplementedError

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        """Return how many candidates to draw after each of these nodes.

        Args:
            draft: See ``expand``.
            nodes: The nodes that ``expand`` returned, without those after which the transforms rule out every token.
            distributions: The drafter's distribution after each node; for a chain its ``Logits`` before transforms.
        """
        raise NotImplementedError

    def prune(self, draft: Draft) -> Sequence[int] | None:
        """Return the nodes of a tree to verify, ascending and with all their ancestors; ``None`` for all."""
        return None

    def prefers_model(self, draft: Draft) -> bool:
        """Return whether a cascade's model drafts the next token, although one was found without a forward pass."""
        return False

    def observe(self, step: Step) -> None:
        """Learn from a finished step; the prefill is none."""

    def notes(self) -> Mapping[str, float]:
        """Return what to record about the current step, by name."""
        return {}

    def method(self, drafter: Drafter) -> VerificationName:
        """Return the method that verifies the drafts of a drafter."""
        if self.verification is not None:
            return self.verification
        if drafter.traits.several:
            return "specinfer"
        if not self.branches:
            return "rejection"
        return "naive" if self.certain_only or drafter.traits.certain else "traversal"


class Scorer(Protocol):
    """A model with the KV cache of one context."""

    @property
    def context_limit(self) -> int | None:
        """The longest context the model can read, in tokens; ``None`` for no limit."""

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees. The first call may try it on the model, and ends the context (``begin``)."""

    @property
    def batch(self) -> Batch | None:
        """Runs its forward passes together with those of other scorers; ``None`` if they run one by one."""

    @property
    def reads_in_parts(self) -> bool:
        """Whether a long context may be read in several forward passes."""

    @property
    def epoch(self) -> object:
        """An object that changes with every new context. By it the loop notices that another request has begun one."""

    @property
    def cached_len(self) -> int:
        """How many tokens at the start of the context are in the cache."""

    def begin(self) -> None:
        """Start a new context."""

    def reserve(self, request: ForwardRequest, /) -> bool:
        """Reserve memory for a forward pass. If another request has cached the same prefix, ``cached_len`` may grow.

        Returns:
            Whether there is enough memory now. If not, nothing has changed.

        Raises:
            UsageError: The memory would not be enough even if nothing else were cached.
        """

    def score(self, request: ForwardRequest, /) -> ForwardOutput:
        """Run a forward pass over the tokens of the context that are not cached, and the draft.

        Raises:
            UsageError: A tree or hidden states are requested and not supported, or memory runs out.
        """

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Keep at most the first ``length`` tokens of the present context in the cache.

        ``rollback(0)`` frees all memory, and is allowed between any two forward passes: the next one reads everything
        again.

        Args:
            length: In tokens.
            path: The accepted nodes of the last draft, root to leaf. Their entries are moved together, right after
                those of the context they were drafted for. A stop may have cut the output: then ``length`` is reached
                before the end of the path, and the rest of it is removed as well.
        """


ScorerLike: TypeAlias = Callable[[Any], Any]
"""Makes a scorer for another request from a scorer of the same loaded model."""


class Batch(Protocol):
    """A model that reads several contexts, each with a scorer of its own, in one forward pass."""

    @property
    def loaded(self) -> object:
        """The loaded model; the same for all batches that share it."""

    def score(self, requests: Sequence[ForwardRequest], /) -> Sequence[ForwardOutput]:
        """Run one forward pass for all requests, at most one per scorer.

        If it raises, every cache is as before, and the requests can be run again one by one.

        Raises:
            UsageError: See ``Scorer.score``.
        """


def top(distribution: TokenDistribution, count: int, random: Randomness) -> list[Draws]:  # noqa: ARG001
    """Take the most probable tokens, without a random draw."""
    return [Draws(distribution.best(count))]


@dataclass(slots=True)
class StepPlan:
    """What the draft of one step has to keep to.

    Attributes:
        budget: The longest branch that still fits, in tokens; 0 or more.
        policy: Decides how many tokens, and in which shape; if it branches, the drafter can draft trees.
        sampling: The target's transforms; a drafter that draws applies the same ones to its own logits.
        random: The source of random draws.
        drawing: Chooses the candidates of a tree's node.
    """

    budget: int
    policy: DraftPolicy
    sampling: Sampling
    random: Randomness
    drawing: Drawing = top


class Drafter:
    """Proposes tokens. The defaults are those of a drafter without state; only ``propose`` is missing.

    The loop calls ``begin`` for a prompt, ``update`` after the prefill, then ``propose`` and ``update`` in every step.
    With ``first_target=False`` the first call after ``begin`` is ``propose``.
    """

    def __init__(self, traits: DrafterTraits) -> None:
        self.traits = traits

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.traits.name!r})"

    @property
    def epoch(self) -> object:
        """An object that changes with every new context, as ``Scorer.epoch``; constant if it keeps no state of one."""
        return 0

    def fork(self, scorer_like: ScorerLike) -> Drafter:
        """Return a drafter for another request, with the same models and settings and no state.

        Args:
            scorer_like: Makes its scorers.
        """
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new prompt and forget the last one, except for what it is set to keep. It reads the prompt later."""

    def unread(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt that has begun its model has to read before it can draft."""
        return 0

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft what continues ``context``, all tokens so far; no model has read the last one yet."""
        raise NotImplementedError

    def update(self, outcome: StepOutcome) -> None:
        """Learn the outcome of a step or of the prefill, and roll back its own cache to all tokens but the last one.

        The loop has rolled back the target's cache before this call.
        """


class NoDraft(Drafter):
    """Proposes nothing, so that every step is one of plain decoding."""

    def __init__(self) -> None:
        super().__init__(DrafterTraits("none"))

    def fork(self, scorer_like: ScorerLike) -> NoDraft:
        return NoDraft()

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        yield from ()
        return Draft()
