"""The engine of loaded models."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.record import Json, rounded
from specbench.bench.encoding import encode_conversation
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.engines.hf import generate_with_transformers
from specbench.bench.environment import reset_peak_memory
from specbench.bench.grid import SweepOptions, build_rows
from specbench.bench.passes import time_passes
from specbench.bench.serving import BenchRequest, BenchResult, Workload, run_workload
from specbench.decoding.clocks import ShiftedClock, clock_for, peak_memory
from specbench.decoding.metrics import time_split
from specbench.decoding.sampling import Sampling
from specbench.decoding.thinking import thinking_tokens
from specbench.generate_many import GenerationRuns
from specbench.loaded import LoadedRecipe, load_models
from specbench.options import DecodingOptions, quantized
from specbench.policies.batch_costs import BatchCosts
from specbench.results.lines import CostLine, Generation, Group, Pool, RequestLine
from specbench.results.run import TargetModel
from specbench.rows import LoadedName, OtherLibrary, Row
from specbench.specs.drafters import DrafterSpec, SmallModel

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.base.progress import Progress
    from specbench.bench.prompts import Prompt
    from specbench.decoding.protocols import Drafter
    from specbench.generate import GenerationRun
    from specbench.models.load import LanguageModel
    from specbench.models.prepare import LoadedDrafter
    from specbench.models.target import Target
    from specbench.recipe import Recipe

_COST_ROUNDS = 2  # forward passes of each kind, every time they are timed

_RATED_ROWS = 32  # rows of logits that are in memory at a time while an answer is rated


class ModelEngine(BenchEngine):
    """The engine of loaded models.

    Args:
        drafters: Drafters with different names. The error of one that could not be loaded is raised when it is used.
        reference, assistants: Target and drafter models as ``transformers`` loads them.
        rate_answers: Whether to compute the log-probability of outputs of greedy plain decoding and of beam search.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[LoadedDrafter],
        *,
        reference: LanguageModel | None = None,
        assistants: Mapping[str, LanguageModel | SpecbenchError] | None = None,
        rate_answers: bool = False,
    ) -> None:
        self.target, self.drafters = target, tuple(drafters)
        self.reference, self.assistants = reference, dict(assistants or {})
        self.heads = {each.name: each.training for each in drafters if each.training is not None}
        self._batch_costs: dict[str, BatchCosts] = {}
        self._device = str(target.scorer.device)
        self._clock = clock_for(self._device)
        self._order = random.Random(0)
        self._rate_answers = rate_answers

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        model = self.target.language_model
        return TargetModel(
            name=model.name,
            fingerprint=model.fingerprint,
            dtype=self.target.dtype,
            device=self._device,
            vocab_size=model.vocab_size,
            packed=self.target.packed,
            model_defaults=model.defaults.applied if decoding.model_defaults else {},
        )

    def configs(self, options: SweepOptions, base: Recipe) -> list[Row]:
        """Return the grid of the drafters."""
        named = [
            LoadedName(
                each.name,
                _dtype_of(each.drafter) if each.models and each.is_loaded else None,
                each.weights if each.models else None,
            )
            for each in self.drafters
        ]
        return build_rows(options, [*zip(named, (each.spec for each in self.drafters), strict=True)], base)

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Sequence[int]:
        return encode_conversation(self.target, prompt, answers)

    def count_tokens(self, prompt: Prompt) -> int:
        return len(self.encode(prompt, []))

    def generate(
        self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, *, seed: int
    ) -> Generation:
        reset_peak_memory(self._device)
        with self._freeing_memory():
            if config.kind in ("plain", "speculative"):
                made = self._decode(config, prompt, decoding, seed)
            else:
                made = self._decode_with_transformers(config, prompt, decoding, seed)
        more: Json = {"peak_memory_bytes": peak_memory(self._device)}
        if self._rate_answers and (
            config.kind == "beam" or (config.kind == "plain" and not config.condition.temperature)
        ):
            more["log_probability"] = rounded(self._log_probability(prompt, made.token_ids))
        return structs.replace(made, **more)

    def generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        def make(request: BenchRequest) -> GenerationRun:
            return self._run(config, request.prompt, decoding, request.seed)

        def start(request: BenchRequest) -> GenerationRun:
            return ready.pop(id(request), None) or make(request)

        assert config.condition.batch is not None
        reset_peak_memory(self._device)
        clock = ShiftedClock(self._clock)
        with self._freeing_memory():
            requests = (*workload.requests, *workload.background)
            ready = {id(each): make(each) for each in requests}  # before the clock starts
            # Kept from group to group, as in a server: costs do not depend on the prompts.
            costs = self._batch_costs.setdefault(config.id, BatchCosts())
            runs = GenerationRuns(
                (), max_batch=config.condition.batch, later=[*ready.values()], clock=clock, batch_costs=costs
            )
            results, seconds, tokens = run_workload(workload, runs, start, clock)
        pool = None
        if runs.factory is not None and (use := runs.factory.use) is not None:
            pool = Pool(block=use.block, blocks=use.blocks, peak=use.peak, bytes=use.bytes)
        measured = zip(workload.requests, results, strict=True)
        return Group(
            requests=[_request_line(asked, each) for asked, each in measured],
            clients=workload.clients,
            seconds=round(seconds, 9),
            tokens=tokens,
            pool=pool,
            peak_memory_bytes=peak_memory(self._device),
        )

    @contextmanager
    def _freeing_memory(self) -> Iterator[None]:
        """Free memory after the block; if memory runs out in it, raise a ``RunError``."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            # torch's allocator for the CPU raises a plain RuntimeError.
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(
                error
            ):
                raise
            error.__traceback__ = None  # its frames hold the tensors that did not fit
            self.target.scorer.begin()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise RunError("There was not enough memory for this configuration.") from None

    def _log_probability(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return the natural logarithm of the target's probability of an answer, without sampling transforms."""
        scorer, text, total = self.target.scorer, [*prompt, *answer], 0.0
        scorer.begin()
        for start in range(len(prompt), len(text), _RATED_ROWS):
            end = min(start + _RATED_ROWS, len(text))
            rows = scorer.logits(text[: end - 1], rows=end - start, prompt=len(prompt))
            tokens = torch.tensor(text[start:end], device=rows.device)
            total += float(rows.float().log_softmax(dim=-1).gather(1, tokens[:, None]).sum())
            scorer.rollback(end - 1)
        scorer.begin()
        return total

    def _run(self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, seed: int) -> GenerationRun:
        """Return a run of the configuration's recipe, with a draft policy that has learned nothing."""
        assert config.recipe is not None
        recipe = replace(config.recipe, decoding=decoding)
        loaded = next((each for each in self.drafters if each.spec == recipe.drafter), None)
        ready = LoadedRecipe.of(recipe, self.target, loaded)
        return ready.start(prompt, seed=seed)

    def _decode(self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, seed: int) -> Generation:
        run = self._run(config, prompt, decoding, seed)
        for _ in run:
            pass
        generation = run.result()
        ttft_s, times = time_split(generation.prefill, generation.steps)
        thought = self._thought(prompt, generation.token_ids)
        emitted = accumulate((len(step.tokens) for step in generation.steps), initial=1)
        inside = [step for step, at in zip(generation.steps, emitted, strict=False) if at < (thought or 0)]
        return Generation.of(
            generation.token_ids,
            ttft_s,
            times.total_s,
            generation.steps,
            prompt_tokens=generation.prompt_tokens,
            finish_reason=generation.finish_reason,
            prefill_s=generation.prefill.time_s,
            first_tokens=min(1, len(generation.token_ids)),
            thinking_tokens=thought,
            thinking_s=sum(step.times.total_s for step in inside) if thought else None,
        )

    def _thought(self, prompt: Sequence[int], answer: Sequence[int]) -> int | None:
        """Return how many tokens of an answer are thinking; ``None`` without a chat template."""
        tokenizer = self.target.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return None
        return thinking_tokens(tokenizer, prompt, answer)

    def _decode_with_transformers(
        self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, seed: int
    ) -> Generation:
        if self.reference is None:
            raise RunError("The model was not loaded for transformers' own generate.")
        assistant = self.assistants.get(config.drafter)
        if isinstance(assistant, SpecbenchError):
            raise assistant
        target, limit = self.target.language_model, self.target.scorer.context_limit
        return generate_with_transformers(
            self.reference, assistant, target, limit, config, prompt, decoding, seed, self._clock
        )

    def measure_costs(
        self,
        prompt: Sequence[int],
        widths: Sequence[int],
        context: int | None = None,
    ) -> list[CostLine]:
        return time_passes(
            self.target.scorer,
            self._timed_drafters(),
            prompt,
            widths,
            self._clock,
            _COST_ROUNDS,
            self._order,
            context=context,
        )

    def _timed_drafters(self) -> dict[str, Drafter]:
        """Return the drafters to time; for a cascade, only its model, since its lookup costs nothing."""
        from specbench.drafters.parts import drafting_parts

        return {
            each.name: each.drafter if len(parts) > 1 else parts[0]
            for each in self.drafters
            if each.is_loaded
            for parts in [drafting_parts(each.drafter)]
        }

    def difference(
        self, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        from specbench.backends.torch.parity import find_difference

        target = self.target
        transforms = target.language_model.transforms(Sampling(), decoding)
        transforms = transforms.at(len(prompt), decoding.end_ids(target.end_ids))
        return find_difference(target.scorer, prompt, tokens, plain, transforms)


def _dtype_of(drafter: Drafter) -> str | None:
    """Return the dtype of a drafter's own model; ``None`` if it drafts with the target's weights."""
    from specbench.drafters.model import SelfDrafter
    from specbench.drafters.parts import models_of
    from specbench.kernels import layers_of

    own = [model.scorer.model for model in models_of(drafter) if not isinstance(model, SelfDrafter)]
    found = [layers_of(model).quantized or str(next(model.parameters()).dtype) for model in own]
    return found[-1].removeprefix("torch.") if found else None


def _request_line(asked: BenchRequest, result: BenchResult) -> RequestLine:
    generation = result.run.result()
    emissions = result.emissions or [(result.arrived_s, 0)]
    (first_s, first_tokens), (last_s, _) = emissions[0], emissions[-1]
    return RequestLine.of(
        generation.token_ids,
        first_s - result.arrived_s,
        last_s - first_s,
        generation.steps,
        prompt=asked.name,
        category=asked.category,
        prompt_tokens=generation.prompt_tokens,
        finish_reason=generation.finish_reason,
        prefill_s=generation.prefill.time_s,
        first_tokens=first_tokens,
        arrived_s=result.arrived_s,
        queued_s=generation.prefill.queued_s,
    )


def load_engine(
    base: Recipe,
    drafters: Sequence[DrafterSpec] = (),
    options: SweepOptions | None = None,
    progress: Progress | None = None,
    **more: Any,
) -> ModelEngine:
    """Load target and drafters, once nothing is known to be wrong with them; for other arguments see ``prepare``.

    A drafter that does not fit into memory raises its error only when it is used.

    Raises:
        UsageError: A drafter does not exist, does not fit, or would learn from its own earlier answers; or the target
            is int8 or int4, and transformers would decode with the unquantized model.
        RunError: The target cannot be loaded.
    """
    from specbench.drafters.model import ModelDrafter
    from specbench.models.drafters import loading
    from specbench.models.load import load_model

    options = options or SweepOptions()
    models = base.models
    dtype = quantized(models.dtype)
    if dtype is not None and options.others:
        raise UsageError(
            f"The target is {dtype}, and transformers would decode with the unquantized model.",
            f"Leave out --dtype {dtype}, or --baseline.",
        )
    for spec in drafters:
        replace(base, drafter=spec, policy=None).check("timing")
    target, loaded = load_models(base, drafters, progress, **more)
    reference = None
    if options.others:
        reference = load_model(base.target, models.target, progress=progress)
    assistants: dict[str, LanguageModel | SpecbenchError] = {}
    for each in loaded:
        if OtherLibrary("assisted") in options.others and isinstance(each.spec, SmallModel) and each.models:
            if type(each.outcome) is not ModelDrafter:
                assistants[each.name] = RunError("transformers cannot draft with this drafter.")
                continue
            try:
                assistants[each.name] = load_model(
                    each.spec.model,
                    loading(each.spec),
                    progress=progress,
                    tokenizer=False,
                )
            except RunError as error:
                assistants[each.name] = error
    return ModelEngine(
        target,
        loaded,
        reference=reference,
        assistants=assistants,
        rate_answers=any(each.beams for each in options.others),
    )
