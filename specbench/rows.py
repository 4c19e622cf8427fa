"""Rows of a sweep: a decoder under a condition. Their names and their baselines follow from these two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specbench.recipe import Recipe
from specbench.results.run import RunConfig
from specbench.specs.arrivals import Arrivals, Closed
from specbench.specs.policies import PolicySpec

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens`` of transformers' prompt lookup, as in its documentation."""

Kind = Literal["plain", "speculative", "transformers", "assisted", "beam", "server"]

BatchArrivals: TypeAlias = tuple[int, Arrivals]
"""A batch size, and how its requests arrive."""


@dataclass(frozen=True)
class Condition:
    """What a decoder and its baseline are measured under: the axes of a sweep.

    Attributes:
        temperature: 0 is greedy.
        workload: Batch size and arrivals; ``None`` for one prompt after the other.
        context: Tokens of each prompt, with text in front; ``None`` for the prompts as they are.
    """

    temperature: float = 0.0
    workload: BatchArrivals | None = None
    context: int | None = None

    @property
    def batch(self) -> int | None:
        return None if self.workload is None else self.workload[0]

    @property
    def arrivals(self) -> Arrivals | None:
        return None if self.workload is None else self.workload[1]

    @property
    def ending(self) -> str:
        """What ids end with."""
        parts = [f"t={self.temperature:g}"] if self.temperature else []
        parts += [] if self.context is None else [f"c={self.context}"]
        parts += [] if self.workload is None else [f"b={self.batch}", *self._unusual]
        return "".join(f",{part}" for part in parts)

    @property
    def words(self) -> str:
        """What labels end with."""
        parts = [f"T={self.temperature:g}"] if self.temperature else []
        parts += [] if self.context is None else [f"context {self.context:,}"]
        parts += [] if self.workload is None else [f"batch {self.batch}", *self._unusual]
        return "".join(f", {part}" for part in parts)

    @property
    def _unusual(self) -> list[str]:
        """The arrivals, if they are not those of as many clients as the batch holds."""
        if self.workload is None or self.workload[1] == Closed(self.workload[0]):
            return []
        return [str(self.workload[1])]


@dataclass(frozen=True)
class OtherLibrary:
    """``generate`` of `transformers` with the same target.

    Attributes:
        kind: Its own decoding, assisted generation, or beam search.
        beams: Number of beams of a beam search.
    """

    kind: Literal["transformers", "assisted", "beam"]
    beams: int | None = None


@dataclass(frozen=True)
class Server:
    """A server that is measured.

    Attributes:
        name: Its name.
        baseline: The name of the server that it is compared with.
        gamma: Tokens that it drafts in a step, if that is known.
    """

    name: str
    baseline: str
    gamma: int | None = None


@dataclass(frozen=True)
class LoadedName:
    """What is known of a drafter once it is loaded.

    Attributes:
        name: Its name in results, with the dtype of its weights.
        dtype: In which its own weights draft; ``None`` if it has none.
        fingerprint: Of these weights.
    """

    name: str
    dtype: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Row:
    """A decoder under a condition.

    Attributes:
        decoder: A recipe that specbench runs, another library, or a server.
        condition: What it is measured under.
        loaded: The drafter of the decoder; ``None`` without one.
    """

    decoder: Recipe | OtherLibrary | Server
    condition: Condition
    loaded: LoadedName | None = None

    @property
    def recipe(self) -> Recipe | None:
        """What specbench runs; ``None`` if something else decodes."""
        if not isinstance(self.decoder, Recipe):
            return None
        sampling = replace(self.decoder.sampling, temperature=self.condition.temperature)
        return replace(self.decoder, sampling=sampling)

    @property
    def policy(self) -> PolicySpec | None:
        """The draft policy of a recipe; ``None`` where nothing is drafted."""
        return self.decoder.policy if isinstance(self.decoder, Recipe) else None

    @property
    def kind(self) -> Kind:
        if isinstance(self.decoder, Recipe):
            return "plain" if self.policy is None else "speculative"
        return "server" if isinstance(self.decoder, Server) else self.decoder.kind

    @property
    def drafter(self) -> str:
        """The drafter's name, or the server's."""
        if isinstance(self.decoder, Server):
            return self.decoder.name
        if self.kind == "assisted" and self.loaded is None:
            return "lookup"
        return "none" if self.loaded is None else self.loaded.name

    @property
    def gamma(self) -> int | None:
        """Tokens drafted in a step, where these are the same in all."""
        if isinstance(self.decoder, Server):
            return self.decoder.gamma
        if self.kind == "assisted":
            return LOOKUP_TOKENS if self.loaded is None else None
        return None if self.policy is None or self.policy.word != "fixed" else self.policy.options["gamma"]

    @property
    def draft_policy(self) -> str:
        """The draft policy without γ."""
        if self.policy is None:
            return "transformers" if self.kind == "assisted" else "none"
        options = {name: value for name, value in self.policy.options.items() if name != "gamma"}
        return str(replace(self.policy, options=options) if self.policy.word == "fixed" else self.policy)

    @property
    def id(self) -> str:
        """Its name in files."""
        return self._names[0] + self.condition.ending

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self._names[1] + self.condition.words

    @property
    def baseline(self) -> str:
        """The id of the row that it is compared with: the plain decoder, or the first server, of its condition."""
        first = self.decoder.baseline if isinstance(self.decoder, Server) else "plain"
        return first + self.condition.ending

    @property
    def _names(self) -> tuple[str, str]:
        """The beginnings of id and label."""
        drafter, what = self.drafter, self.decoder
        if isinstance(what, OtherLibrary):
            if what.beams is not None:
                return f"transformers:beam={what.beams}", f"transformers beam search, {what.beams} beams"
            if what.kind == "transformers":
                return "transformers", "transformers generate"
            title = "prompt lookup" if self.loaded is None else f"assisted, {drafter}"
            return f"transformers:{drafter}", f"transformers {title}"
        if isinstance(self.decoder, Server) or self.policy is None:
            return (drafter, drafter) if self.kind == "server" else ("plain", "plain")
        if self.gamma is None:
            return f"{drafter}@{self.policy}", f"{drafter} {self.policy}"
        rest = self.draft_policy.removeprefix("fixed").replace(":", ",", 1)
        return f"{drafter}@{self.gamma}{rest}", f"{drafter} γ={self.gamma}{rest}"

    def record(self) -> RunConfig:
        """Return the row as ``run.json`` stores it."""
        recipe, at, loaded = self.recipe, self.condition, self.loaded or LoadedName("none")
        other = "none" if self.kind == "server" else "dynamic"
        return RunConfig(
            id=self.id,
            label=self.label,
            kind=self.kind,
            drafter=self.drafter,
            gamma=self.gamma,
            draft_policy=self.draft_policy,
            temperature=at.temperature,
            cache=other if recipe is None else recipe.caching.cache,
            baseline=self.baseline,
            drafter_fingerprint=loaded.fingerprint,
            drafter_dtype=loaded.dtype,
            beams=self.decoder.beams if isinstance(self.decoder, OtherLibrary) else None,
            batch=at.batch,
            arrivals=None if at.arrivals is None else str(at.arrivals),
            context=at.context,
            recipe=None if recipe is None else recipe.to_json(),
        )
