"""Load what `specbench tune` tries: the target, and the drafters that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.base.errors import RunError, UsageError
from specbench.bench.engines.own import ModelEngine, check_engine
from specbench.bench.manifest import describe_models
from specbench.experiment import FolderOf, Opened
from specbench.kernels import is_available
from specbench.models.devices import available_memory, resolve_device
from specbench.models.drafters import DrafterLoader
from specbench.models.mtp_layouts import has_mtp_layers
from specbench.models.prepare import LoadedDrafter, prepare, prepare_drafters
from specbench.models.target import default_cache
from specbench.options import quantized
from specbench.recipe import Recipe, with_small_models
from specbench.specs.drafters import DrafterSpec, Lookup, Mtp, SelfForm, SmallModel, after_grammar
from specbench.specs.policies import Auto
from specbench.tune.candidates import drafters_to_try, is_tried

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.grid import SweepOptions
    from specbench.export.engine import ExportEngine
    from specbench.options import CacheKind, ModelOptions
    from specbench.rows import Row

_INT8, _INT4 = SelfForm(int8=True), SelfForm(int4=True)


@dataclass(frozen=True)
class Candidates:
    """A target with the drafters to try: the given ones and others, those that ``only`` supports if it is an engine."""

    base: Recipe
    given: Sequence[DrafterSpec]
    only: ExportEngine | None = None

    @contextmanager
    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> Iterator[Opened]:
        check_engine(self.base, self.given, options, progress)
        sources = describe_models(self.base, self.given)
        folder, formatted = folder_of(sources["target"]), options.decoding.format is not None
        engine, cache, notes = self._load(formatted, progress)
        base = replace(self.base, caching=replace(self.base.caching, cache=cache))
        yield Opened(engine, options, self._rows(options, engine, base), folder, sources, notes)

    def _load(self, formatted: bool, progress: Progress | None) -> tuple[ModelEngine, CacheKind, list[str]]:
        """Load the target and all drafters to try, behind ``grammar`` if outputs are ``formatted``.

        One that does not fit into memory raises its error when it is used.

        Returns:
            The engine that decodes with them, the kind of KV cache, and notes for the user.
        """
        models = self.base.models
        loaded, _ = prepare(self.base.target, (), models, progress=progress)
        model = loaded.language_model.model
        kind = default_cache(model.config, quantized=loaded.quantization is not None)
        forms = [] if self.only else _own_forms(models, sum(each.numel() for each in model.parameters()))
        notes = [note for note in (loaded.language_model.slower,) if note]
        loader = DrafterLoader(cache=kind, progress=progress, allow_pickle=models.allow_pickle)
        own = [Mtp()] if has_mtp_layers(self.base.target) else []

        def candidates(forms: Sequence[SelfForm]) -> list[DrafterSpec]:
            tried = drafters_to_try([*self.given, *own], forms, formatted=formatted)
            return [each for each in tried if self.only is None or self.only.exports(each)]

        try:
            drafters = prepare_drafters(loaded, candidates(forms), loader)
        except UsageError as error:
            if not forms:
                raise
            notes.append(f"Forms of the target are left out: {error.message}")
            drafters = prepare_drafters(loaded, candidates([]), loader)
        small = _in_int4(drafters)
        if small and is_available():  # where int4 is fast
            drafters += prepare_drafters(loaded, small, loader)
        return ModelEngine(loaded, drafters), kind, notes

    def _rows(self, options: SweepOptions, engine: ModelEngine, base: Recipe) -> list[Row]:
        """Return the grid of all loaded drafters, or what an engine supports of it."""
        only = self.only
        names = {
            each.name for each in engine.drafters if only is None or only.exports(each.spec, each.training)
        }
        return [
            each
            for each in engine.configs(options, base)
            if each.recipe is not None
            and (
                each.policy is None
                or (
                    is_tried(each.policy, each.recipe.drafter)
                    and each.drafter in names
                    and (only is None or each.policy.word in ("fixed", *only.policies))
                )
            )
        ]


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
