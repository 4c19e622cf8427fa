"""Rows of a sweep: a decoder under a condition. Their names and their baselines follow from these two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import structs

from specbench.base.errors import UsageError
from specbench.base.record import Count, Json, Length, Record, Size, doc, to_dict
from specbench.options import TemplateOptions
from specbench.recipe import Recipe
from specbench.specs.policies import Fixed, PolicySpec
from specbench.specs.sweeps import Arrivals, Closed

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens`` of transformers' prompt lookup, as in its documentation."""

Kind = Literal["plain", "speculative", "transformers", "assisted", "beam", "server"]


class Condition(Record, kw_only=False):
    """What a decoder and its baseline are measured under: the axes of a sweep."""

    temperature: Annotated[Size, doc("0 is greedy")] = 0.0
    batch: Annotated[
        Count | None,
        doc(
            "how many requests are decoded at a time, 0 for as many as a server takes; `null` for one prompt after the"
            " other"
        ),
    ] = None
    arrivals: Annotated[Arrivals | None, doc("with a batch: how requests come")] = None
    context: Annotated[
        Length | None, doc("tokens of each prompt, with text in front; `null` for the prompts as they are")
    ] = None

    thinking: Annotated[
        bool | None, doc("whether the chat template is told to think; `null` where it is told nothing")
    ] = None

    @property
    def is_closed(self) -> bool:
        """Whether as many clients as the batch holds wait for their answers."""
        return self.batch is not None and self.arrivals == Closed(self.batch)

    @property
    def name(self) -> str:
        """What tells it from others, ``t=0`` if nothing is unusual."""
        return self.ending[1:] or "t=0"

    @property
    def ending(self) -> str:
        """What ids end with."""
        return "".join(f",{part}" for part in self._parts("t={:g}", "c={}", "b={}", "thinking={}"))

    @property
    def words(self) -> str:
        """What labels end with."""
        return "".join(
            f", {part}" for part in self._parts("T={:g}", "context {:,}", "batch {}", "thinking {}")
        )

    def _parts(self, temperature: str, context: str, batch: str, thinking: str) -> list[str]:
        """Return what is unusual, in these forms."""
        parts = [temperature.format(self.temperature)] if self.temperature else []
        parts += [] if self.context is None else [context.format(self.context)]
        parts += [batch.format(self.batch)] if self.batch else []
        parts += [] if self.arrivals is None or self.is_closed else [str(self.arrivals)]
        return parts if self.thinking is None else [*parts, thinking.format("on" if self.thinking else "off")]


def conditions_of(**axes: Iterable[Any]) -> tuple[Condition, ...]:
    """Return every combination of the values of axes, by their fields; one without values keeps its default.

    Raises:
        UsageError: A value is given twice, or there are arrivals without batches.
    """
    given = {name: list(axes.get(name, ())) for name in Condition.__struct_fields__}
    for name, values in given.items():
        if len(set(values)) < len(values):
            raise UsageError(f"A value of --{name} is given twice.", "Give each once.")
    if given["arrivals"] and not given["batch"]:
        raise UsageError("--arrivals needs a batch.", "Add --batch N.")
    given = {name: values for name, values in given.items() if values}
    found = [Condition(**dict(zip(given, values, strict=True))) for values in product(*given.values())]
    return tuple(
        each if each.batch is None or each.arrivals else structs.replace(each, arrivals=Closed(each.batch))
        for each in found
    )


class OtherLibrary(Record, kw_only=False, tag="library"):
    """``generate`` of `transformers` with the same target."""

    kind: Annotated[
        Literal["transformers", "assisted", "beam"],
        doc("its own decoding, assisted generation, or beam search"),
    ]
    beams: Annotated[Count | None, doc("of a beam search: number of beams")] = None


class Server(Record, kw_only=False, tag="server"):
    """A server that is measured."""

    name: str
    baseline: Annotated[str, doc("name of the server that it is compared with")]
    gamma: Annotated[Length | None, doc("tokens that it drafts in a step; `null` if not known")] = None


Decoder: TypeAlias = Recipe | OtherLibrary | Server
"""What decodes: specbench with a recipe, another library, or a server."""


class LoadedName(Record, kw_only=False):
    """What is known of a drafter once it is loaded."""

    name: Annotated[str, doc("its name in results, with the dtype of its weights")]
    dtype: Annotated[str | None, doc("in which its own weights draft; `null` if it has none")] = None
    fingerprint: Annotated[str | None, doc("hash of these weights")] = None


class StoredRow(Record):
    """A row as ``run.json`` stores it."""

    decoder: Annotated[
        Json, doc("what decodes: a recipe, another library or a server, as `type` says, with its fields")
    ]
    condition: Annotated[Condition, doc("what it is measured under")]
    drafter: Annotated[LoadedName | None, doc("the drafter that was loaded; `null` without one")] = None


class Row:
    """A decoder under a condition.

    Attributes:
        decoder: What decodes.
        condition: What it is measured under.
        loaded: The drafter of the decoder; ``None`` without one.
    """

    def __init__(self, decoder: Decoder, condition: Condition, loaded: LoadedName | None = None) -> None:
        self.decoder, self.condition, self.loaded = decoder, condition, loaded

    def __eq__(self, other: object) -> bool:
        parts = self.decoder, self.condition, self.loaded
        return isinstance(other, Row) and parts == (other.decoder, other.condition, other.loaded)

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def recipe(self) -> Recipe | None:
        """What specbench runs; ``None`` if something else decodes."""
        if not isinstance(self.decoder, Recipe):
            return None
        sampling = replace(self.decoder.sampling, temperature=self.condition.temperature)
        template = TemplateOptions(self.condition.thinking).over(self.decoder.template)
        return replace(self.decoder, sampling=sampling, template=template)

    @property
    def policy(self) -> PolicySpec | None:
        """The draft policy of a recipe; ``None`` where nothing is drafted."""
        return self.decoder.policy if isinstance(self.decoder, Recipe) else None

    @cached_property
    def kind(self) -> Kind:
        if isinstance(self.decoder, Recipe):
            return "plain" if self.policy is None else "speculative"
        return "server" if isinstance(self.decoder, Server) else self.decoder.kind

    @cached_property
    def drafter(self) -> str:
        """The drafter's name, or the server's."""
        if isinstance(self.decoder, Server):
            return self.decoder.name
        if self.kind == "assisted" and self.loaded is None:
            return "lookup"
        return "none" if self.loaded is None else self.loaded.name

    @cached_property
    def gamma(self) -> int | None:
        """Tokens drafted in a step, where these are the same in all."""
        if isinstance(self.decoder, Server):
            return self.decoder.gamma
        if self.kind == "assisted":
            return LOOKUP_TOKENS if self.loaded is None else None
        return self.policy.gamma if isinstance(self.policy, Fixed) else None

    @cached_property
    def draft_policy(self) -> str:
        """The draft policy without γ."""
        if self.policy is None:
            return "transformers" if self.kind == "assisted" else "none"
        return str(replace(self.policy, gamma=None) if isinstance(self.policy, Fixed) else self.policy)

    @property
    def cache(self) -> str:
        """The kind of key/value cache."""
        if isinstance(self.decoder, Recipe):
            return self.decoder.caching.cache
        return "none" if isinstance(self.decoder, Server) else "dynamic"

    @property
    def fingerprint(self) -> str | None:
        """Of the drafter's own weights."""
        return None if self.loaded is None else self.loaded.fingerprint

    @cached_property
    def id(self) -> str:
        """Its name in files."""
        return self._names[0] + self.condition.ending

    @property
    def name(self) -> str:
        """Its name in tables, without its condition."""
        return self._names[1]

    @cached_property
    def label(self) -> str:
        """Its name in tables."""
        return self._names[1] + self.condition.words

    @cached_property
    def baseline(self) -> str:
        """The id of the row that it is compared with: the plain decoder, or the first server, of its condition."""
        first = self.decoder.baseline if isinstance(self.decoder, Server) else "plain"
        return first + self.condition.ending

    @cached_property
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
        own = f"{self.gamma}{self.policy.rest}" if isinstance(self.policy, Fixed) else self.policy
        return f"{drafter}@{own}", f"{drafter} {self.policy.label}"

    def to_json(self) -> Json:
        """Return the row as ``run.json`` stores it."""
        what = self.decoder
        decoder = {"type": "recipe", **what.to_json()} if isinstance(what, Recipe) else to_dict(what)
        return to_dict(StoredRow(decoder=decoder, condition=self.condition, drafter=self.loaded))

    @classmethod
    def from_json(cls, data: Json) -> Row:
        """Return the row that ``to_json`` stored; see ``Recipe.from_json``.

        Raises:
            ValueError: A part is missing, invalid, or not known to this version.
        """
        stored = msgspec.convert(data, StoredRow)
        if stored.decoder.get("type") != "recipe":
            other = msgspec.convert(stored.decoder, OtherLibrary | Server)
            return cls(other, stored.condition, stored.drafter)
        try:
            return cls(Recipe.from_json(stored.decoder), stored.condition, stored.drafter)
        except UsageError as error:
            raise ValueError(str(error)) from None
