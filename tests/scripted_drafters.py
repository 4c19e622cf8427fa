"""Every kind of drafter on scripted models of three tokens, and the target they draft for.

``DRAFTERS`` has at least one entry for each class of ``specbench.specs.drafters`` and each kind of trained head, so
that tests of whole products of drafters need no list of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from scripted import ScriptedCache, ScriptedScorer, random_table
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specbench.backends.torch.block_heads import (
    BlockScorer,
    BlockShape,
    DFlash2Head,
    DFlashHead,
    DSparkHead,
)
from specbench.backends.torch.head_scorers import (
    EagleScorer,
    HeadScorer,
    MedusaScorer,
    OfTarget,
    ParallelScorer,
)
from specbench.backends.torch.heads import Eagle1Head, EagleHead, EagleShape, MedusaHeads, ParallelEagleHead
from specbench.backends.torch.mtp import build_mtp_layer
from specbench.backends.torch.scorer import FittedLogits
from specbench.decoding.logits import DraftVocabulary
from specbench.decoding.protocols import Drafter, NoDraft
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.grammar import GrammarDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import HeadDrafter, ModelDrafter, ParallelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.suffix import SuffixDrafter
from specbench.drafters.translate import TranslatingDrafter, Translation
from specbench.specs.drafters import Grammar, Lookup, NGram

VOCAB = 3
DEPTH = 2
"""Tokens that a head drafts at most."""
PROMPT = [1, 2, 0, 1, 2]


def draw_tables(seed: int) -> None:
    """Give target, drafters and heads the logits of a seed from now on; those of 0 are the usual ones."""
    global TARGET, DRAFT, OTHER, STATES
    TARGET, DRAFT, OTHER = (random_table(5 * seed + place, VOCAB) for place in range(3))
    STATES = torch.randn(VOCAB, VOCAB, 3, 8, generator=torch.Generator().manual_seed(5 * seed + 4))


draw_tables(0)


def states_of(tokens: Sequence[int]) -> torch.Tensor:
    """Hidden states that depend on the last two tokens and the length, [layers, width]."""
    return STATES[tokens[-1], tokens[-2] if len(tokens) > 1 else 0] + 0.1 * len(tokens)


def scripted_target() -> ScriptedScorer:
    return ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache(), states=states_of)


def model(table: Any = None, name: str = "model") -> ModelDrafter:
    return ModelDrafter(ScriptedScorer(table or DRAFT, VOCAB), name)  # type: ignore[arg-type]


# -- trained heads ---------------------------------------------------------------------------------


BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (DFlashHead, {"block": DEPTH + 1}),
    "dflash2": (DFlash2Head, {"block": DEPTH + 1, "rank": 2, "selected": 2, "kernel": 2, "group": 4}),
    "dspark": (
        DSparkHead,
        {"block": DEPTH, "first": 0, "markov": "vanilla", "rank": 2},
    ),
}  # fmt: skip
"""Block drafters: their class, and the structure of their blocks."""


@cache
def small_head(kind: str) -> Any:
    """Of a target with hidden states of the size 8; draws two of three tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if kind == "medusa":
            module: Any = MedusaHeads(2, 1, 8, 2)
        else:
            layer = LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=8,
                intermediate_size=12,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
            shape = EagleShape(
                1 if kind == "eagle-1" else 3,
                8,
                VOCAB if kind == "dflash2" else 2,
                layer,
                embeds=True,
                head_norms=kind in BLOCKS,
            )
            if kind == "mtp":
                block = LlamaDecoderLayer(layer, 0).state_dict()
                module = build_mtp_layer(layer, block, final_norm=True, hidden_first=False)
                module.embed_tokens = torch.nn.Embedding(VOCAB, 8)
                module.lm_head = torch.nn.Linear(8, 2, bias=False)
            elif kind in BLOCKS:
                module = BLOCKS[kind][0](shape, BlockShape(mask=1, **BLOCKS[kind][1]))
            elif kind == "peagle":
                module = ParallelEagleHead(shape, DEPTH, 1)
            else:
                module = (EagleHead if kind == "eagle3" else Eagle1Head)(shape)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    return module.eval().requires_grad_(False)


def small_scorer(kind: str) -> HeadScorer:
    fitted = FittedLogits(VOCAB, None if kind == "dflash2" else torch.tensor([2, 0]))
    head = small_head(kind)
    if kind == "medusa":
        return MedusaScorer(head, OfTarget(None, (2,), fitted))
    layers = (2,) if kind in ("eagle-1", "mtp") else (0, 1, 2)
    own = {**dict.fromkeys(BLOCKS, BlockScorer), "peagle": ParallelScorer}
    scorer: Any = own.get(kind, EagleScorer)
    made: HeadScorer = scorer(head, OfTarget(head.embed_tokens, layers, fitted))
    return made


def head(kind: str) -> HeadDrafter:
    return HeadDrafter(small_scorer(kind), kind)


# -- several tokens in a pass ----------------------------------------------------------------------


def parallel() -> ParallelDrafter:
    scorer: Any = ScriptedScorer(DRAFT, VOCAB)
    return ParallelDrafter(scorer, "pard", [1] * DEPTH)


# -- other vocabularies ----------------------------------------------------------------------------


class TrimmedScorer(ScriptedScorer):
    """A drafter that computes two logits of three."""

    vocabulary = DraftVocabulary(torch.tensor([2, 1]), VOCAB)

    def score(self, asked: Any) -> Any:
        rows = super().score(asked)
        return rows._replace(logits=rows.logits[:, [2, 1]])


class MappedScorer(ScriptedScorer):
    """A drafter of four tokens of its own, two of which are the target's."""

    vocabulary = DraftVocabulary(torch.tensor([0, 2]), VOCAB)

    def score(self, asked: Any) -> Any:
        rows = super().score(asked)
        assert [token for token, _ in self.cache.entries] == list(asked.context), (
            "an old spelling is still there"
        )
        return rows._replace(logits=rows.logits[:, [3, 0]])


def spell(text: bytes) -> list[int]:
    """Two in a row have a token of their own, so that a spelling changes as it grows."""
    return [1] * (len(text) % 2) + [2] * (len(text) // 2)


def translating() -> TranslatingDrafter:
    translation = Translation({0: 3, 2: 0}, {1: b"x"}, spell, None, VOCAB)
    return TranslatingDrafter(MappedScorer(random_table(2, 4), 4), "mapped", translation)  # type: ignore[arg-type]


# -- all of them -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A drafter to build.

    Attributes:
        spec: A ``--drafter`` of its kind, by which rules decide whether they go with it.
        build: Makes it for a target.
        head: Which kind of head it is; ``None`` for none.
    """

    spec: str
    build: Callable[[ScriptedScorer], Drafter]
    head: str | None = None


DRAFTERS: dict[str, Entry] = {
    "none": Entry("none", lambda _: NoDraft()),
    "lookup": Entry("lookup", lambda _: LookupDrafter()),
    "ngram": Entry("ngram", lambda _: NGramDrafter()),
    "ngram:top-k=2": Entry("ngram:top-k=2", lambda _: NGramDrafter(NGram(top_k=2))),
    "ngram:sample": Entry("ngram:sample", lambda _: NGramDrafter(NGram(sample=True))),
    "suffix": Entry("suffix", lambda _: SuffixDrafter()),
    "self": Entry(
        "self:int8",
        lambda target: SelfDrafter(
            ScriptedScorer(DRAFT, VOCAB, cache=target.cache, own_entries_only=False),
            "self",  # type: ignore[arg-type]
        ),
    ),
    "model": Entry("org/model", lambda _: model()),
    "model with a short context": Entry(
        "org/model",
        lambda _: ModelDrafter(ScriptedScorer(DRAFT, VOCAB, context_limit=len(PROMPT) + 2), "short"),  # type: ignore[arg-type]
    ),
    "trimmed vocabulary": Entry(
        "org/model",
        lambda _: ModelDrafter(TrimmedScorer(DRAFT, VOCAB), "trimmed"),  # type: ignore[arg-type]
    ),
    "translated vocabulary": Entry("org/model", lambda _: translating()),
    "lookup+model": Entry("lookup+org/model", lambda _: CascadeDrafter(LookupDrafter(), model())),
    "ngram:sample+model": Entry(
        "ngram:sample+org/model", lambda _: CascadeDrafter(NGramDrafter(NGram(sample=True)), model())
    ),
    "grammar": Entry("grammar", lambda _: GrammarDrafter(Grammar())),
    "grammar+ngram:sample": Entry(
        "grammar+ngram:sample", lambda _: GrammarDrafter(Grammar(NGram(sample=True)))
    ),
    "grammar+model": Entry("grammar+org/model", lambda _: CascadeDrafter(GrammarDrafter(Grammar()), model())),
    "grammar+lookup+model": Entry(
        "grammar+lookup+org/model", lambda _: CascadeDrafter(GrammarDrafter(Grammar(Lookup())), model())
    ),
    "model|model": Entry("org/model|org/other", lambda _: SeveralDrafters([model(), model(OTHER, "other")])),
    "model|lookup": Entry("org/model|lookup", lambda _: SeveralDrafters([model(), LookupDrafter()])),
    **{
        kind: Entry("org/head", lambda _, kind=kind: head(kind), kind)  # type: ignore[misc]
        for kind in ("eagle3", "eagle-1", "peagle", *BLOCKS, "medusa")
    },
    "mtp": Entry("mtp", lambda _: head("mtp"), "mtp"),
    "pard": Entry("org/model", lambda _: parallel(), "pard"),
    "ngram:sample+pard": Entry(
        "ngram:sample+org/model",
        lambda _: CascadeDrafter(NGramDrafter(NGram(sample=True)), parallel()),
        "pard",
    ),
    "lookup+eagle3": Entry(
        "lookup+org/head", lambda _: CascadeDrafter(LookupDrafter(), head("eagle3")), "eagle3"
    ),
    "eagle3|medusa": Entry(
        "org/head|org/other-head", lambda _: SeveralDrafters([head("eagle3"), head("medusa")]), "medusa"
    ),
}
