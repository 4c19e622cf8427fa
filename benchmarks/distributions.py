"""Enumerate the loop's output distribution for every verification × draft policy × drafter × sampling transform.

    python benchmarks/distributions.py                    # the whole table
    python benchmarks/distributions.py specinfer model    # the rows whose names contain these words

Every cell decodes three tokens after a first one with scripted models of three tokens, over all drafts and verdicts,
and compares the exact distribution with the target's own, computed by the chain rule. A cell is exact, or refused
before anything is decoded. The axes are the registries of the package, so new entries are covered. Prints the largest
gap by verification and policy, and one line of JSON. Exit code 1 if a gap is above 1e-6.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import scripted_drafters
from scripted import GivenCosts, build_with, enumerate_outcomes
from scripted_drafters import DRAFTERS, PROMPT, VOCAB, scripted_target
from tiny import letter_tokenizer

from specbench.base.errors import UsageError
from specbench.decoding.formats import CompiledFormat, FormatCompiler, Matcher
from specbench.decoding.loop import decode_steps
from specbench.decoding.model_defaults import ModelDefaults
from specbench.decoding.records import Prefill
from specbench.decoding.request import Request
from specbench.decoding.sampling import Sampling
from specbench.options import Format
from specbench.recipe import Recipe
from specbench.specs import policies
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import VERIFICATIONS

NEW = 4
"""Tokens of an output, the first one by the pass over the prompt: the first step then drafts up to two."""

TOLERANCE = 1e-6

_OPTIONS = {
    "fixed": "gamma=2",
    "svip": "max=2,threshold=0.35",
    "heuristic": "gamma=1,max=2",
    "static-tree": "nodes=3,depth=2,ranks=50-40",
    "dynamic-tree": "top-k=2,nodes=3,depth=2",
}
POLICIES = tuple(f"{each.word}:{_OPTIONS.get(each.word, 'max=2')}" for each in policies.POLICIES)
"""Every draft policy, with options that make its drafts short, and longer here than there."""


class ContinuedFormat(CompiledFormat):
    """A format of all that follows ``PROMPT``, also where an output is enumerated step by step."""

    @classmethod
    def of(cls, tokenizer: Any, text: str, end: int) -> CompiledFormat:
        """Compile a regular expression."""
        compiled = FormatCompiler(tokenizer, VOCAB, (end,)).compile(Format("regex", text))
        return cls(compiled.name, compiled.grammar, (end,), compiled.tokens, compiled.tokenizer)

    def matcher(self, prompt: int) -> Matcher:  # noqa: ARG002
        return super().matcher(len(PROMPT))


FORMAT = ContinuedFormat.of(letter_tokenizer("ab"), "(aab|b)+", 2)
"""Two a and a b, or a b: after an a the format forces the rest; the end token can follow a b."""

SAMPLINGS = {
    "multinomial": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.3, top_k=2),
    "nucleus": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "repetition penalty": Sampling(temperature=0.9, repetition_penalty=1.7),
    "everything": Sampling(temperature=1.2, top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
    "banned tokens": Sampling(temperature=1.0).with_defaults(ModelDefaults({"suppress_tokens": [2]}), VOCAB),
    "format": Sampling(temperature=1.0).with_format(FORMAT),
    "format and all else": Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.3).with_format(FORMAT),
    "no repeated pairs": Sampling(temperature=1.0).with_defaults(
        ModelDefaults({"no_repeat_ngram_size": 2}), VOCAB
    ),
}
"""Every transform of ``Sampling`` changes something in one of them."""


@dataclass(frozen=True)
class Cell:
    """One way to decode: verification and policy as the command line has them, a key of ``DRAFTERS``, and one of
    ``SAMPLINGS`` or transforms of its own."""

    verification: str
    policy: str
    drafter: str
    sampling: str | Sampling

    def __str__(self) -> str:
        return f"{self.verification} / {self.policy} / {self.drafter} / {self.sampling}"

    @property
    def transforms(self) -> Sampling:
        """Return the sampling transforms."""
        return SAMPLINGS[self.sampling] if isinstance(self.sampling, str) else self.sampling


def cells() -> Iterator[Cell]:
    """Return all cells."""
    yield from itertools.starmap(Cell, itertools.product(VERIFICATIONS, POLICIES, DRAFTERS, SAMPLINGS))


def measure(cell: Cell, new: int = NEW) -> float:
    """Return the largest gap between the loop's probability of an output and the target's.

    Raises:
        UsageError: The cell is refused.
    """
    entry, sampling = DRAFTERS[cell.drafter], cell.transforms
    drafter = parse_drafter(entry.spec)
    rule = replace(policies.parse_policy(cell.policy), verification=cell.verification)
    Recipe(ModelSpec("builtin", "target"), drafter, rule).check()
    one_step = rule.tree or len(drafter.parts) > 1

    def distribution(before: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """Return the distribution of outputs that begin with these tokens; wide drafts are enumerated step by step."""
        left = new - len(before)

        def run(random: Any) -> tuple[int, ...]:
            target: Any = scripted_target()
            tokens: list[int] = []
            policy = build_with(GivenCosts(0.1, {1: 1.0, 9: 1.1}), rule)
            request = Request([*PROMPT, *before], target, entry.build(target), policy, sampling, random, left)
            for record in decode_steps(request):
                if isinstance(record, Prefill):
                    tokens += [] if record.token is None else [record.token]
                else:
                    tokens += record.tokens
                    if one_step:
                        break
            return tuple(tokens)

        found: dict[tuple[int, ...], float] = {}
        for tokens, weight in enumerate_outcomes(run, left).items():
            rest = distribution((*before, *tokens)) if len(tokens) < left else {(): 1.0}
            for after, chance in rest.items():
                found[*tokens, *after] = found.get((*tokens, *after), 0.0) + weight * chance
        return found

    found, expected = distribution(()), target_distribution(sampling, new)
    return max(
        abs(1.0 - sum(found.values())),
        max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected}),
    )


def target_distribution(sampling: Sampling, new: int) -> dict[tuple[int, ...], float]:
    """Return the target's distribution by the chain rule, without any code of the loop."""
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    transforms = sampling.at(len(PROMPT), ())
    for _ in range(new):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, weight in growing.items():
            context = [*PROMPT, *tokens]
            p = transforms.probabilities(scripted_drafters.TARGET(context).unsqueeze(0), context)[0].double()
            for token in range(VOCAB):
                grown[*tokens, token] = weight * float(p[token] / p.sum())
        growing = grown
    return {tokens: weight for tokens, weight in growing.items() if weight > 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    worst: dict[tuple[str, str], float] = {}
    refused: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for cell in cells():
        if not all(word in str(cell) for word in words):
            continue
        key = cell.verification, cell.policy
        try:
            gap = measure(cell)
        except UsageError as error:
            refused[error.message] += 1
            continue
        worst[key] = max(worst.get(key, 0.0), gap)
        counts[key] += 1
        if gap > TOLERANCE:
            wrong += 1
            print(f"NOT EXACT  {cell}: {gap:.2e}", flush=True)
    for (verification, policy), gap in worst.items():
        print(f"{verification:13} {policy:42} {counts[verification, policy]:5} cells, worst gap {gap:.1e}")
    for message, times in refused.most_common(20):
        print(f"{times:6} refused: {message}")
    print(
        json.dumps(
            {
                "benchmark": "distributions",
                "exact": counts.total() - wrong,
                "not_exact": wrong,
                "refused": refused.total(),
                "worst_gap": max(worst.values(), default=0.0),
                "minutes": round((time.monotonic() - began) / 60, 1),
            }
        )
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
