"""What the decoding loop asks of others: a drafter, a draft policy, a scorer.

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
    """A pass of a model that somebody asks for.

    Attributes:
        scorer: Whose.
        context: All tokens so far; the scorer feeds what it lacks of them. It may grow once the pass has been made.
        tokens: A draft that continues it and may be taken back.
        parents: What each of ``tokens`` stands behind, see ``Draft``; ``None`` for a chain.
        rows: Number of positions wanted, counted from the end; ``None`` for the context's last and every draft.
        layers: Of which layers the hidden states are wanted, as ``transformers`` counts them: 0 is what the first one
            reads, and the last has the final norm behind it.
    """

    scorer: Scorer
    context: Sequence[int]
    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    rows: int | None = None
    layers: Sequence[int] = ()


class ForwardOutput(NamedTuple):
    """What a pass gives, by position: the first row stands behind the context, and row i + 1 behind draft token i.

    Attributes:
        logits: [rows, vocab], in the model's dtype; of a drafter with a ``DraftVocabulary`` [rows, tokens of that].
        hidden: Hidden states of the layers asked for, [fed, layers, width], at all positions that the pass has fed;
            the last of them are those of ``logits``. ``None`` if none were asked for.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


Decoding: TypeAlias = Generator[ForwardRequest, ForwardOutput, T]
"""Something under way that asks for passes, and returns a T in the end."""


def run_to_end(asking: Decoding[T]) -> T:
    """What comes of it if every pass is made at once."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(asked.scorer.score(asked))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Drawing(Protocol):
    """Draws the candidates of a node, as a way to verify asks for them (``specbench.decoding.verdicts``)."""

    def __call__(self, prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
        """Up to ``count`` candidates, in the order drawn, from what a drafter expects."""
        ...


class DraftPolicy(Protocol):
    """Decides how much is drafted in every step, and in which shape; one object serves one prompt at a time.

    In each step the drafter calls ``begin`` once; then in turn ``expand``, before it spends a pass on what comes after
    the nodes that this names, and ``num_children``, before it draws there, until either has no more; ``prune`` in the
    end, of a tree. Where a cascade has a token without a pass it calls ``prefers_model`` before ``expand``. The loop
    calls ``observe`` when the step is over.

    How many candidates a node gets may depend on all that was drawn before them, and never on their own tokens.
    """

    @property
    def name(self) -> str:
        """The policy, with those of its options that are not the defaults."""
        ...

    @property
    def branches(self) -> bool:
        """Whether its drafts are trees; otherwise every node has one child at most."""
        ...

    @property
    def certain_only(self) -> bool:
        """Whether nodes are chosen by their own tokens, so that none of them may have been drawn."""
        ...

    @property
    def unconditional(self) -> bool:
        """Whether a step's length is settled with ``begin``, and nothing is read off the draft."""
        ...

    def reset(self) -> None:
        """Forget everything: a new prompt begins."""
        ...

    def begin(self, room: int) -> int:
        """Start a step with a draft of at most ``room`` tokens one after the other.

        Returns:
            The most it wants (0: none).
        """
        ...

    def expand(self, draft: Draft) -> Sequence[int]:
        """The nodes to draft from next, ascending, -1 for the context; of those drafted since the last call.

        A chain has only its last one to go on from.

        Args:
            draft: What there is so far; of a tree a ``GrowingTree``. The policy may read it as long as the step lasts,
                and never writes to it. Evidence for the next token may stand behind that of the others.
        """
        ...

    def num_children(
        self, draft: Draft, nodes: Sequence[int], expected: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        """How many candidates to draw after each of these nodes.

        Args:
            draft: See ``expand``.
            nodes: Those that it named, less those after which every token is ruled out.
            expected: What the drafter expects after each. Of a chain these are its untransformed ``Logits``.
        """
        ...

    def prune(self, draft: Draft) -> Sequence[int] | None:
        """Which nodes of a tree are verified, ascending, each with the one before it; ``None`` for all."""
        ...

    def prefers_model(self, draft: Draft) -> bool:
        """Whether a cascade's model is to draft the next token although one has come without a pass.

        Args:
            draft: The draft so far, with the evidence for that token behind that of the others.
        """
        ...

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""
        ...

    def notes(self) -> Mapping[str, float]:
        """What to record about the current step, by name."""
        ...

    def costs(self) -> dict[str, Any] | None:
        """The costs of passes it went by so far, ready for JSON (see ``parse_costs``); ``None`` if it needs none."""
        ...


class Scorer(Protocol):
    """A model with the keys and values of one context: it reads what it lacks of it and gives logits."""

    @property
    def context_limit(self) -> int | None:
        """The longest context the model can read, in tokens; ``None`` for no limit."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees. Finding out may take a few passes, and end the context that was begun."""
        ...

    @property
    def batch(self) -> Batch | None:
        """Who can make its passes together with those of others; ``None``: they are made one by one."""
        ...

    @property
    def reads_in_parts(self) -> bool:
        """Whether a long context may be read in several passes, each over more of it."""
        ...

    @property
    def epoch(self) -> object:
        """Another one after every ``begin``."""
        ...

    @property
    def cached_len(self) -> int:
        """How many of the first tokens of the context it holds, so that no pass feeds them."""
        ...

    def begin(self) -> None:
        """Start on a new context."""
        ...

    def resume(self, kept: int) -> None:
        """Start on a new context whose first ``kept`` tokens are the last one's: what is held of them may stay."""
        ...

    def reserve(self, asked: ForwardRequest) -> bool:
        """Make room for a pass among what others hold; what it holds already of others' work may grow ``cached_len``.

        Returns:
            Whether there is room. If not, nothing has changed, and there may be some once others have given some back.

        Raises:
            UsageError: There would not even be room if nobody else held anything.
        """
        ...

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        """Make a pass: feed what is lacking of the context, and the draft.

        Raises:
            UsageError: A tree or hidden states are asked for, and the scorer has none; there is no room.
        """
        ...

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Roll back: keep at most the first ``length`` tokens of what the context is now.

        Keeping none gives all memory back; the next pass then reads the whole context again. So it may be done between
        any two passes, whatever is under way.

        Args:
            length: In tokens.
            path: What the last pass's context has grown by: nodes of its draft, root to leaf, as far as it had them.
        """
        ...


ScorerLike: TypeAlias = Callable[[Any], Any]
"""From the scorer of a loaded model to one for another request; the same kind of scorer."""


class Batch(Protocol):
    """A model that reads several contexts, each with a scorer of its own, in one pass."""

    @property
    def loaded(self) -> object:
        """The model that was loaded for it: the same for others that make its passes later."""
        ...

    def score(self, asked: Sequence[ForwardRequest]) -> Sequence[ForwardOutput]:
        """Make one pass of all that is asked, of no scorer more than once; every one gets its rows.

        Whatever it raises, each scorer then holds what it held before, and may be asked again by itself.

        Raises:
            UsageError: See ``Scorer.score``.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens (``BaseDrafter`` of ``specbench.drafters.base`` has plain answers to most of this).

    The loop calls ``begin`` per prompt, ``update`` after the target has read it, then per step ``propose``
    and ``update``.
    """

    @property
    def name(self) -> str:
        """How the command line names it, with its options."""
        ...

    @property
    def epoch(self) -> object:
        """Another one after every ``begin`` that has taken the state of an unfinished context away."""
        ...

    @property
    def draftable(self) -> frozenset[int] | None:
        """The tokens that its model can draft; ``None`` for all that the target has."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether it can draft trees, with the model and the cache it has."""
        ...

    @property
    def certain(self) -> bool:
        """Whether nothing in its trees is ever drawn."""
        ...

    @property
    def several(self) -> bool:
        """Whether what it proposes are the chains of several drafters."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Of which of the target's layers it takes the hidden states, see ``ForwardRequest``."""
        ...

    def fork(self, scorer_like: ScorerLike) -> Drafter:
        """One like it for another request: it has the models and settings, and nothing that was read or learned.

        Args:
            scorer_like: Makes the other one's scorers.
        """
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Start on a new prompt: forget the last one (unless told to keep something) and read this one lazily."""
        ...

    def resume(self, prompt: Sequence[int], kept: int) -> None:
        """Start on a new prompt whose first ``kept`` tokens are the last context's: models may hold on to them."""
        ...

    def propose(
        self,
        context: Sequence[int],
        room: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = ...,
    ) -> Decoding[Draft]:
        """Draft what continues ``context``.

        Args:
            context: All tokens so far; the last one has not been fed to any model yet.
            room: The most tokens one after the other; 0 or more.
            policy: Decides how many, and in which shape; one that branches needs a drafter that ``takes_trees``.
            sampling: The transforms the target uses; a drafter with probabilities draws with the same ones.
            random: The one source of random draws.
            drawing: Draws the candidates of a tree's node from the drafter's distribution there.
        """
        ...

    def update(self, outcome: StepOutcome) -> None:
        """Learn from a step, or from the pass over the prompt, and roll back what was read of drafts.

        What is known of all tokens but the last one stays; that one has been fed to no model yet.
        """
        ...
