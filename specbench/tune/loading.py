"""Load what `specbench tune` tries: the target, and the drafters that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.base.errors import RunError, UsageError
from specbench.bench.engines.own import ModelEngine
from specbench.bench.grid import SweepOptions
from specbench.bench.manifest import describe_models
from specbench.experiment import Experiment, Opened
from specbench.kernels import is_available
from specbench.loaded import drafter_notes
from specbench.models.devices import available_memory, resolve_device
from specbench.models.drafters import DrafterLoader
from specbench.models.mtp_layouts import has_mtp_layers
from specbench.models.prepare import LoadedDrafter, check_models, prepare, prepare_drafters
from specbench.models.target import default_cache
from specbench.options import SamplingOptions, quantized
from specbench.recipe import with_small_models
from specbench.rows import Row, conditions_of
from specbench.specs.drafters import DrafterSpec, Lookup, Mtp, SelfForm, SmallModel, after_grammar
from specbench.specs.policies import Auto
from specbench.tune.candidates import BLOCK_CHAIN, GAMMAS, drafters_to_try, rules_to_try

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.experiment import FolderOf
    from specbench.options import ModelOptions
    from specbench.recipe import Recipe

_REPEATS = 3
"""Times that a prompt is decoded at most."""

_INT8, _INT4 = SelfForm(int8=True), SelfForm(int4=True)


@dataclass(frozen=True)
class Candidates:
    """A target with the drafters to try: the given ones and others."""

    base: Recipe
    given: Sequence[DrafterSpec]

    def search(self, prompts: Sequence[str], temperature: float) -> Experiment:
        """Return the experiment of a search on prompts."""
        base = self.base
        options = SweepOptions(
            conditions_of(temperature=[SamplingOptions(temperature).temperature]),
            gammas=GAMMAS,
            policies=rules_to_try(greedy=temperature == 0, chained=base.chained is not None),
            decoding=base.decoding,
            repeats=_REPEATS,
            warmup=0,
            turns=1,
            template=base.template,
        )
        return Experiment(systems=self, options=options, prompts=prompts, tuned=True)

    @contextmanager
    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> Iterator[Opened]:
        models = self.base.models
        check_models(self.base.target, self.given, models, progress=progress)
        sources = describe_models(self.base, self.given)
        folder = folder_of(sources["target"])
        target, _ = prepare(self.base.target, (), models, progress=progress)
        notes = [target.language_model.slower] if target.language_model.slower else []
        model = target.language_model.model
        kind = default_cache(model.config, quantized=target.quantization is not None)
        loader = DrafterLoader(cache=kind, progress=progress)
        own = [Mtp()] if has_mtp_layers(self.base.target) else []

        def load(forms: Sequence[SelfForm]) -> list[LoadedDrafter]:
            """Load the drafters to try; one that does not fit into memory raises its error when it is used."""
            formatted = options.decoding.format is not None
            tried = drafters_to_try([*self.given, *own], forms, formatted=formatted)
            return prepare_drafters(target, tried, loader)

        forms = _own_forms(models, sum(each.numel() for each in model.parameters()))
        try:
            drafters = load(forms)
        except UsageError as error:
            if not forms:
                raise
            notes.append(f"Forms of the target are left out: {error.message}")
            drafters = load([])
        small = _in_int4(drafters)
        if small and is_available():  # where int4 is fast
            drafters += prepare_drafters(target, small, loader)
        notes += drafter_notes(each.outcome for each in drafters)
        engine = ModelEngine(target, drafters)
        base = replace(self.base, caching=replace(self.base.caching, cache=kind))
        rows = [row for row in engine.configs(options, base) if _is_tried(row)]
        yield Opened(engine, options, rows, folder, sources, notes)


def _is_tried(row: Row) -> bool:
    """Return whether a row of the grid is raced: not block verification without a drafter's probabilities."""
    return row.recipe is not None and (row.policy != BLOCK_CHAIN or row.recipe.drafter.has_logits)


def _as_int4(part: DrafterSpec) -> DrafterSpec:
    return replace(part, dtype="int4") if isinstance(part, SmallModel) else part


def _in_int4(drafters: Iterable[LoadedDrafter]) -> list[DrafterSpec]:
    """Return drafters with a model of their own on a CPU, alone or in a cascade, in int4, unless they name a dtype; not
    heads, which int4 does not speed up.
    """
    found = []
    for each in drafters:
        model = each.spec.model_part
        if (
            not isinstance(model, SmallModel)
            or each.training is not None
            or isinstance(each.outcome, RunError)
        ):
            continue
        if model.dtype == "auto" and resolve_device(model.device).type == "cpu":
            found.append(with_small_models(each.spec, _as_int4))
    return found


def _own_forms(models: ModelOptions, parameters: int) -> list[SelfForm]:
    """Return the target's forms, as far as there is memory for their weights; int4 only where it is fast."""
    if resolve_device(models.device).type != "cpu" or quantized(models.dtype) is not None:
        return []
    forms = [_INT8, _INT4] if is_available() else [_INT8]
    return forms if len(forms) * parameters <= available_memory() else []


def asked_for(
    rows: Sequence[Row], engine: ModelEngine, given: Sequence[DrafterSpec], default: DrafterSpec
) -> dict[str, list[str]]:
    """Return what has to be raced: the default drafter with ``auto``, which other commands take without options; a
    fixed length of ``lookup``, which other engines have too; and each given drafter, in any dtype.
    """
    usual = {each.name for each in engine.drafters if each.spec == default}
    found = {f"{default} auto": [row.id for row in rows if row.drafter in usual and row.policy == Auto()]}
    copies = {each.name for each in engine.drafters if each.spec == Lookup()}
    found["lookup"] = [row.id for row in rows if row.drafter in copies and row.gamma is not None]
    for spec in given:
        forms = {spec, with_small_models(spec, _as_int4)}
        forms |= {after_grammar(each) or each for each in forms}
        names = {each.name for each in engine.drafters if each.spec in forms}
        found[str(spec)] = [row.id for row in rows if row.drafter in names]
    return found
