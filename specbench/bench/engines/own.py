"""Loaded models as a sweep runs them."""

from __future__ import annotations

import gc
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.bench.engines.engine import GroupOutcome, Outcome, RequestOutcome
from specbench.bench.engines.watch import finish_reason, watch_generate
from specbench.bench.grid import LOOKUP_TOKENS, SweepConfig, SweepOptions
from specbench.bench.passes import PassTimes, SharedTimes, time_passes, time_shared_passes
from specbench.bench.serving import BenchRequest, BenchResult, SkippingClock, Workload, run_workload
from specbench.decoding.records import Step
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions, quantized
from specbench.results.lines import Pool
from specbench.results.run import DtypeMeasured, TargetModel
from specbench.specs.drafters import DrafterSpec, SmallModel

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.base.progress import Progress
    from specbench.bench.prompts import Prompt
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.request import DraftPlan
    from specbench.generate import GenerationRun
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.policies.load import Load as PassLoad
    from specbench.recipe import Recipe
    from specbench.specs.policies import PolicySpec


_COST_PASSES = 2  # of each kind, every time they are timed

_RATED_AT_ONCE = 32  # tokens of an answer whose rows of logits are in memory together


class ModelEngine:
    """The engine over real models.

    Args:
        target: The model every configuration decodes with.
        drafters: By the names that configurations give; an error in a drafter's place is raised when it is needed.
        specs: What the drafters were asked for as, by the same names.
        reference: The same model as ``transformers`` loads it, for configurations that it decodes.
        assistants: Drafter models as ``transformers`` loads them, by the names of the drafters.
        fingerprints: Of the drafter models' weights, by the names of the drafters.
        heads: See ``Engine``.
        costs: What ``auto`` goes by, as ``specbench.policies.parse_costs`` takes it; ``None`` lets it measure.
        keep_policy_state: Let the draft policy of a configuration carry what it learns from one call to the next.
        rate_answers: Tell how probable the answers of greedy plain decoding and of beam search are.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter | SpecbenchError],
        specs: Mapping[str, DrafterSpec] | None = None,
        *,
        reference: LanguageModel | None = None,
        assistants: Mapping[str, LanguageModel | SpecbenchError] | None = None,
        fingerprints: Mapping[str, str] | None = None,
        heads: Mapping[str, TrainingMetadata] | None = None,
        costs: object = None,
        keep_policy_state: bool = False,
        rate_answers: bool = False,
    ) -> None:
        from specbench.decoding.clocks import clock_for

        self.target, self.drafters, self.specs = target, dict(drafters), dict(specs or {})
        self.reference, self.assistants = reference, dict(assistants or {})
        self.fingerprints = dict(fingerprints or {})
        self.heads: Mapping[str, TrainingMetadata] = heads or {}
        self._costs, self._keep = costs, keep_policy_state
        self._kept: dict[str, DraftPlan] = {}
        self._loads: dict[str, PassLoad] = {}
        self._device = str(target.scorer.device)
        self._clock = clock_for(self._device)
        self._order = random.Random(0)
        self._rate_answers = rate_answers

    @property
    def drafter_dtypes(self) -> dict[str, str]:
        """In which dtype the drafters' own models draft, by the drafters' names."""
        return {
            name: dtype
            for name, drafter in self.drafters.items()
            if name in self.fingerprints and not isinstance(drafter, SpecbenchError)
            if (dtype := _dtype_of(drafter)) is not None
        }

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """The field ``target`` of ``run.json``."""
        model = self.target.language_model
        choice = model.dtype_choice
        return TargetModel(
            name=model.name,
            fingerprint=model.fingerprint,
            dtype=self.target.dtype,
            device=self._device,
            vocab_size=model.vocab_size,
            packed=self.target.packed,
            dtype_choice=None if choice is None else DtypeMeasured(**asdict(choice)),
            model_defaults=model.defaults.applied if decoding.model_defaults else {},
        )

    def calibrated(
        self, policy: PolicySpec, drafter: str, temperature: float
    ) -> tuple[PolicySpec, str | None]:
        """A policy with what was calibrated for a drafter, by its name, and what there is to say of that."""
        from specbench.decoding.sampling import Sampling
        from specbench.models.calibrations import calibrated_tree

        loaded = self.drafters[drafter]
        if isinstance(loaded, SpecbenchError) or not policy.applies(self.specs[drafter]):
            return policy, None
        weights = self.fingerprints.get(drafter, "")
        return calibrated_tree(policy, self.target, loaded, weights, Sampling(temperature=temperature))

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Sequence[int]:
        from specbench.generate import encode_messages

        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        end_ids = set(self.target.end_ids)
        said = [
            str(tokenizer.decode([t for t in answer if t not in end_ids], skip_special_tokens=True))
            for answer in answers
        ]
        turns = prompt.turns[: len(said) + 1]
        if not getattr(tokenizer, "chat_template", None):
            parts = [] if prompt.system is None else [prompt.system]
            parts += [text for pair in zip(turns, [*said, ""], strict=True) for text in pair if text]
            return [int(token) for token in tokenizer("\n\n".join(parts))["input_ids"]]
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(said, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        if prompt.system is None:
            return encode_messages(tokenizer, messages)
        try:
            return encode_messages(tokenizer, [{"role": "system", "content": prompt.system}, *messages])
        except UsageError:  # a template without a system role; every configuration gets the same prompt
            messages[0]["content"] = f"{prompt.system}\n\n{turns[0]}"
            return encode_messages(tokenizer, messages)

    def generate(
        self, config: SweepConfig, prompt: Sequence[int], decoding: DecodingOptions, *, seed: int
    ) -> Outcome:
        from specbench.bench.environment import reset_peak_memory
        from specbench.decoding.clocks import peak_memory

        decode = self._decode if config.kind in ("plain", "speculative") else self._decode_with_transformers
        reset_peak_memory(self._device)
        with self._freeing_memory():
            outcome = decode(config, prompt, decoding, seed)
        outcome = replace(outcome, peak_memory_bytes=peak_memory(self._device))
        if self._rate_answers and (
            config.kind == "beam" or (config.kind == "plain" and not config.temperature)
        ):
            outcome = replace(outcome, log_probability=self._log_probability(prompt, outcome.token_ids))
        return outcome

    def generate_group(
        self, config: SweepConfig, load: Workload[Sequence[int]], decoding: DecodingOptions
    ) -> GroupOutcome:
        from specbench.bench.environment import reset_peak_memory
        from specbench.decoding.clocks import peak_memory
        from specbench.generate_many import GenerationRuns
        from specbench.policies.load import Load as PassLoad

        def made(asked: BenchRequest[Sequence[int]]) -> GenerationRun:
            return self._run(config, asked.prompt, decoding, asked.seed)

        def start(asked: BenchRequest[Sequence[int]]) -> GenerationRun:
            return ready.pop(id(asked), None) or made(asked)

        assert config.batch is not None
        reset_peak_memory(self._device)
        clock = SkippingClock(self._clock)
        with self._freeing_memory():
            ready = {id(asked): made(asked) for asked in load.different}  # before anybody waits
            # As a server knows it: what passes cost does not depend on the prompts.
            known = self._loads.setdefault(config.id, PassLoad())
            runs = GenerationRuns(
                (), max_batch=config.batch, later=[*ready.values()], clock=clock, load=known
            )
            served = run_workload(load, runs, start, clock)
        use = None if runs.factory is None else runs.factory.use
        return GroupOutcome(
            requests=tuple(
                RequestOutcome(_outcome(each), each.arrived_s, each.queued_s) for each in served.requests
            ),
            seconds=served.seconds,
            tokens=served.tokens,
            pool=None
            if use is None
            else Pool(block=use.block, blocks=use.blocks, peak=use.peak, bytes=use.bytes),
            peak_memory_bytes=peak_memory(self._device),
        )

    @contextmanager
    def _freeing_memory(self) -> Iterator[None]:
        """Where memory runs out, free what there is, and say so."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            error.__traceback__ = None  # its frames hold the tensors that did not fit
            self._free_memory()
            raise RunError("There was not enough memory for this configuration.") from None

    def _log_probability(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Natural logarithm of the probability that the target's softmax, without any transforms, gives an answer."""
        import torch

        from specbench.decoding.protocols import ForwardRequest

        scorer, text, total = self.target.scorer, [*prompt, *answer], 0.0
        scorer.begin()
        for start in range(len(prompt), len(text), _RATED_AT_ONCE):
            end = min(start + _RATED_AT_ONCE, len(text))
            rows = scorer.score(ForwardRequest(scorer, text[: end - 1], rows=end - start)).logits
            tokens = torch.tensor(text[start:end], device=rows.device)
            total += float(rows.float().log_softmax(dim=-1).gather(1, tokens[:, None]).sum())
            scorer.rollback(end - 1)
        scorer.begin()
        return total

    def _free_memory(self) -> None:
        import torch

        self.target.scorer.begin()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _drafter(self, name: str) -> Drafter:
        drafter = self.drafters[name]
        if isinstance(drafter, SpecbenchError):
            raise drafter
        return drafter

    def _run(
        self, config: SweepConfig, prompt: Sequence[int], decoding: DecodingOptions, seed: int
    ) -> GenerationRun:
        from specbench.decoding.sampling import Sampling
        from specbench.generate import GenerationRun

        return GenerationRun(
            prompt,
            self.target,
            None if config.kind == "plain" else self._drafter(config.drafter),
            policy=None if config.kind == "plain" else self._policy(config),
            sampling=Sampling(temperature=config.temperature),
            seed=seed,
            decoding=decoding,
        )

    def _decode(
        self, config: SweepConfig, prompt: Sequence[int], decoding: DecodingOptions, seed: int
    ) -> Outcome:
        from specbench.decoding.metrics import time_split

        run = self._run(config, prompt, decoding, seed)
        for _ in run:
            pass
        generation = run.result()
        times = time_split(generation.prefill, generation.steps)
        return Outcome(
            prompt_tokens=generation.prompt_tokens,
            token_ids=generation.token_ids,
            finish_reason=generation.finish_reason,
            prefill_s=generation.prefill.time_s,
            ttft_s=times.ttft_s,
            decode_s=times.decode_s,
            first_tokens=min(1, len(generation.token_ids)),
            steps=_with_costs(generation.steps, generation.costs),
        )

    def _policy(self, config: SweepConfig) -> DraftPlan:
        """The draft policy of a configuration: the one it had last time if its state is to be kept."""
        from specbench.policies import build_policy, parse_costs

        if config.id in self._kept:
            return self._kept[config.id]
        options: dict[str, Any] = {"gamma": config.gamma}
        if self._costs is not None and config.policy_spec.takes("costs"):
            options["costs"] = parse_costs(self._costs, config.drafter)
        policy = build_policy(config.policy_spec, keep=self._keep, **options)
        if self._keep:
            self._kept[config.id] = policy
        return policy

    def _decode_with_transformers(
        self, config: SweepConfig, prompt: Sequence[int], decoding: DecodingOptions, seed: int
    ) -> Outcome:
        """``generate`` with the settings, end tokens and seed that specbench's own loop gets, and no others."""
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        from specbench.base.progress import quiet_transformers

        if self.reference is None:
            raise RunError("The model was not loaded for transformers' own generate.")
        limit = self.target.scorer.context_limit
        most = decoding.max_new_tokens
        room = most if limit is None else min(most, limit - len(prompt))
        if room < 1:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens, the target's context holds {limit}.",
                "Shorten the prompt.",
            )
        end_ids = decoding.end_ids(self.target.end_ids)
        extra: dict[str, Any] = {}
        if config.drafter in self.assistants:
            extra["assistant_model"] = self._assistant(config.drafter)
        elif config.kind == "assisted":
            extra["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        greedy = config.temperature == 0
        settings = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=room,
            eos_token_id=list(end_ids) or None,
            pad_token_id=next(iter(self.target.end_ids), 0),
            **({} if config.beams is None else {"num_beams": config.beams}),
            **self.target.language_model.defaults.under(decoding).applied,
            **({} if greedy else {"temperature": config.temperature, "top_k": 0, "top_p": 1.0}),
        )
        # What the call leaves unset would come from the model's own file, sampling defaults and all.
        self.reference.model.generation_config = GenerationConfig()
        device = torch.device(self.reference.device)
        ids = torch.tensor([list(prompt)], device=device)
        watch = watch_generate(self._clock)
        forked = [device] if device.type == "cuda" else []
        with quiet_transformers(), torch.random.fork_rng(devices=forked):
            torch.manual_seed(seed)
            model: Any = self.reference.model
            began = self._clock.now()
            output = model.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([watch]),
                **extra,
            )
        tokens = tuple(output[0, len(prompt) :].tolist())
        return Outcome(
            prompt_tokens=len(prompt),
            token_ids=tokens,
            finish_reason=finish_reason(tokens, end_ids, most),
            prefill_s=watch.first_at - began,
            ttft_s=watch.first_at - began,
            decode_s=watch.last_at - watch.first_at,
            first_tokens=watch.first_length - len(prompt),
        )

    def _assistant(self, name: str) -> Any:
        from transformers import GenerationConfig

        assistant = self.assistants[name]
        if isinstance(assistant, SpecbenchError):
            raise assistant
        # Its defaults (20 tokens, confidence 0.4), anew each time: transformers keeps adapted values in there.
        assistant.model.generation_config = GenerationConfig()
        return assistant.model

    def measure_costs(
        self, prompt: Sequence[int], widths: Sequence[int], abreast: Sequence[int] = ()
    ) -> PassTimes:
        return time_passes(
            self.target.scorer,
            self._timed_drafters(),
            prompt,
            widths,
            self._clock,
            _COST_PASSES,
            self._order,
            abreast=abreast,
        )

    def measure_shared_costs(
        self,
        prompt: Sequence[int],
        requests: int,
        widths: Sequence[int],
        only: Collection[str] | None = None,
    ) -> SharedTimes:
        timed = self._timed_drafters()
        return time_shared_passes(
            self.target,
            timed if only is None else {name: timed[name] for name in only},
            prompt,
            requests,
            widths,
            self._clock,
            _COST_PASSES,
            self._order,
        )

    def _timed_drafters(self) -> dict[str, Drafter]:
        """Of a cascade its model, whose passes are timed: its other tokens cost none. Of several drafters all."""
        from specbench.drafters.parts import drafting_parts

        return {
            name: drafter if len(parts) > 1 else parts[0]
            for name, drafter in self.drafters.items()
            if not isinstance(drafter, SpecbenchError)
            for parts in [drafting_parts(drafter)]
        }

    def difference(
        self, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        from specbench.backends.torch.parity import find_difference
        from specbench.decoding.sampling import Greedy

        target = self.target
        defaults = target.language_model.defaults.under(decoding)
        transforms = Greedy().with_defaults(defaults, target.vocab_size)
        transforms = transforms.at(len(prompt), None, decoding.end_ids(target.end_ids))
        return find_difference(target.scorer, prompt, tokens, plain, transforms)


def _dtype_of(drafter: Drafter) -> str | None:
    """In which dtype a drafter's own model drafts; ``None`` if it drafts with the target's weights."""
    from specbench.backends.torch.kernels.surgery import quantization_of
    from specbench.drafters.model import SelfDrafter
    from specbench.drafters.parts import models_of

    own = [model.scorer.model for model in models_of(drafter) if not isinstance(model, SelfDrafter)]
    found = [quantization_of(model) or str(next(model.parameters()).dtype) for model in own]
    return found[-1].removeprefix("torch.") if found else None


def _outcome(answered: BenchResult) -> Outcome:
    """A request's figures, by when its tokens came."""
    generation = answered.run.result()
    return Outcome(
        prompt_tokens=generation.prompt_tokens,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        prefill_s=answered.prefill_s,
        ttft_s=answered.first_s - answered.arrived_s,
        decode_s=answered.last_s - answered.first_s,
        first_tokens=answered.first_tokens,
        steps=_with_costs(generation.steps, generation.costs),
    )


def _with_costs(steps: Sequence[Step], costs: Mapping[str, Any] | None) -> tuple[Step, ...]:
    """Steps whose notes hold the times that a measuring policy took from them: with these it can be repeated."""
    from specbench.policies.costs import COST_NOTES

    samples = (costs or {}).get("steps")
    if samples is None:
        return tuple(steps)
    # A policy that keeps its state has samples of earlier prompts too.
    return tuple(
        replace(step, policy={**step.policy, **dict(zip(COST_NOTES, sample, strict=True))})
        for step, sample in zip(steps, samples[len(samples) - len(steps) :], strict=True)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    # torch's allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


# -- loading ---------------------------------------------------------------------------------------


def check_engine(
    base: Recipe,
    drafters: Sequence[DrafterSpec] = (),
    options: SweepOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Refuse what cannot be, before any weights are loaded.

    Args:
        base: What all configurations have in common.
        drafters: All of them.
        options: Of the sweep.
        progress: Told how far it has come.

    Raises:
        UsageError: A drafter that does not exist, does not fit, or would learn from its own earlier answers; an int8 or
            int4 target beside transformers, which would decode with the unquantized one.
    """
    from specbench.models.drafters import refuse_keep
    from specbench.models.prepare import check_models

    options = options or SweepOptions()
    check_models(base.target, drafters, base.models, progress=progress)
    rounded = quantized(base.models.dtype)
    if rounded is not None and options.uses_transformers:
        raise UsageError(
            f"The target is {rounded}, and transformers would decode with the unquantized model.",
            f"Leave out --dtype {rounded}, or the rows of transformers.",
        )
    for spec in drafters:
        refuse_keep(spec)


def load_engine(
    base: Recipe,
    drafters: Sequence[DrafterSpec] = (),
    options: SweepOptions | None = None,
    progress: Progress | None = None,
) -> ModelEngine:
    """Load the target and the drafters. A drafter that does not fit into memory fails later, where it is needed.

    Args:
        base, drafters, options, progress: See ``check_engine``.

    Raises:
        UsageError: What cannot be (see ``check_engine``), or a drafter that does not fit the target.
        RunError: The target could not be loaded.
    """
    from specbench.drafters.heads import HeadDrafter
    from specbench.drafters.translate import TranslatingDrafter
    from specbench.models.load import load_model
    from specbench.models.prepare import prepare

    options = options or SweepOptions()
    check_engine(base, drafters, options, progress)
    models = base.models
    target, loaded_drafters = prepare(
        base.target,
        drafters,
        models,
        cache=base.caching.kind,
        bit_exact=base.caching.bit_exact,
        progress=progress,
    )
    reference = None
    if options.uses_transformers:
        reference = load_model(
            base.target, models.target, progress=progress, allow_pickle=models.allow_pickle
        )
    assistants: dict[str, LanguageModel | SpecbenchError] = {}
    for each in loaded_drafters:
        if options.assisted and isinstance(each.spec, SmallModel) and each.models:
            if isinstance(each.outcome, TranslatingDrafter | HeadDrafter):
                what = (
                    "trained head"
                    if isinstance(each.outcome, HeadDrafter)
                    else "drafter with another tokenizer than the target's"
                )
                assistants[each.name] = RunError(f"transformers is given no {what}.")
                continue
            try:
                assistants[each.name] = load_model(
                    each.spec.model,
                    models.drafter,
                    progress=progress,
                    allow_pickle=models.allow_pickle,
                    tokenizer=False,
                )
            except RunError as error:
                assistants[each.name] = error
    return ModelEngine(
        target,
        {each.name: each.outcome for each in loaded_drafters},
        {each.name: each.spec for each in loaded_drafters},
        reference=reference,
        assistants=assistants,
        fingerprints={each.name: each.weights for each in loaded_drafters if each.models},
        heads={each.name: each.training for each in loaded_drafters if each.training is not None},
        costs=options.costs,
        keep_policy_state=options.keep_policy_state,
        rate_answers=bool(options.beams),
    )
