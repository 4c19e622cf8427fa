"""Generate from one prompt: the Python interface to the decoding loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from specbench.base.errors import UsageError
from specbench.base.textsafe import encodable
from specbench.decoding.clocks import clock_for
from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Drafter, DraftPolicy, NoDraft
from specbench.decoding.records import Generation, Prefill, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.schedule import loaded_of
from specbench.decoding.stops import StopRules, TextStream
from specbench.drafters.model import SelfDrafter
from specbench.drafters.parts import models_of
from specbench.drafters.several import SeveralDrafters
from specbench.models.chat_templates import TemplateError, render_chat, used_variables
from specbench.options import NO_OPTIONS, DecodingKeywords, DecodingOptions, TemplateOptions
from specbench.policies import FixedLength, build_policy
from specbench.policies.batch_costs import BatchCosts, share_costs
from specbench.specs.policies import default_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.backends.torch.batch import RequestFactory
    from specbench.models.target import Target


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    text: str,
    *,
    chat: bool | None = None,
    system: str | None = None,
    template: TemplateOptions = NO_OPTIONS,
) -> list[int]:
    """Encode a prompt.

    Args:
        tokenizer: The target's tokenizer.
        text: The user's message, or the raw text.
        chat: Whether to apply the tokenizer's chat template; ``None`` applies it if there is one.
        system: A system message; needs the chat template.
        template: What the chat template is told, such as whether to think; needs it too.

    Raises:
        UsageError: There is no tokenizer, the prompt has no tokens, or the chat template is needed and there is none,
            or it does not use what it is told.

    Examples:
        >>> encode_prompt(target.tokenizer, "Hello", chat=False)
        [19556]
    """
    if tokenizer is None:
        raise UsageError(
            "The target has no tokenizer.", "Choose a model folder that holds one, or give token ids."
        )
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not has_template and (chat or system is not None):
        raise UsageError(
            "The target's tokenizer has no chat template.",
            "Leave --chat and --system out, and begin the prompt with what the model should know.",
        )
    chat = has_template if chat is None else chat
    if system is not None and not chat:
        raise UsageError(
            "A system message needs the chat template, which --raw leaves out.",
            "Leave out --system or --raw.",
        )
    if template != NO_OPTIONS and not chat:
        raise UsageError(
            "A switch of the chat template has no effect on a prompt that is continued as it is.",
            "Leave it out, or --raw.",
        )
    if not text.strip():
        raise UsageError("The prompt is empty.", "Give some text.")
    if chat:
        messages = [] if system is None else [{"role": "system", "content": system}]
        ids = encode_messages(tokenizer, [*messages, {"role": "user", "content": text}], template=template)
    else:
        ids = tokenizer(encodable(text))["input_ids"]
    if not ids:
        raise UsageError("The prompt has no tokens.", "Give some text.")
    return [int(token) for token in ids]


def as_tokens(
    prompt: str | Sequence[int], target: Target, *, chat: bool | None = None, system: str | None = None
) -> Sequence[int]:
    """Return a prompt's token ids; text is encoded by ``encode_prompt``."""
    if isinstance(target, str):
        raise UsageError(
            f"The target {target!r} is a name, not a loaded model.",
            f"Load it first: load_target({target!r}).",
        )
    if not isinstance(prompt, str):
        return prompt
    return encode_prompt(target.tokenizer, prompt, chat=chat, system=system)


def resolve_drafter(drafter: Drafter | str | None, target: Target) -> Drafter | None:
    """Return a loaded drafter; a spec such as "lookup" is loaded first."""
    if not isinstance(drafter, str):
        return drafter
    from specbench.models.drafters import load_drafter

    return load_drafter(drafter, target)


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template: TemplateOptions = NO_OPTIONS,
) -> list[int]:
    """Encode a conversation with the chat template, including the tokens that open the assistant's next answer."""
    try:
        variables = template.variables(used_variables(tokenizer)) if template != NO_OPTIONS else {}
        # The template writes the special tokens itself: tokenizing its text the usual way would add a second BOS.
        text = render_chat(tokenizer, messages, add_generation_prompt=True, tools=tools, variables=variables)
    except TemplateError as error:
        raise UsageError(
            f"The model's chat template refuses this conversation: {error}.",
            "Leave --system out." if messages[0]["role"] == "system" else "Use --raw.",
        ) from error
    return list(tokenizer(encodable(text), add_special_tokens=False)["input_ids"])


def _check_tokens(prompt: Sequence[int], target: Target) -> None:
    known: int | None = getattr(target.language_model.model.get_input_embeddings(), "num_embeddings", None)
    for token in prompt:
        if known is not None and not 0 <= token < known:
            raise UsageError(
                f"The prompt holds the token {token}, but the target's tokens are 0 to {known - 1}.",
                "Encode it with the target's own tokenizer.",
            )


def _check_drafter(drafter: Drafter, target: Target) -> None:
    for model in models_of(drafter):
        if isinstance(model, SelfDrafter) and model.scorer.cache is not target.scorer.cache:
            raise UsageError(
                f"The drafter {drafter.traits.name} was made for another target.",
                "Make one for this target with load_drafter.",
            )
        if model.scorer.vocab_size not in (None, target.vocab_size):
            raise UsageError(
                f"The drafter {drafter.traits.name} was made for a target of {model.scorer.vocab_size} logits, this"
                f" one has {target.vocab_size}.",
                "Make one for this target with load_drafter.",
            )


class GenerationRun:
    """A generation in progress: iterate over its records; ``result()`` can be called at any time.

    When another generation begins on the same target or drafter, this one cannot continue and raises a
    ``UsageError``.

    Args: those of ``speculative_generate``, with the prompt as token ids.

    Examples:
        >>> prompt = encode_prompt(target.tokenizer, "Hi")
        >>> run = GenerationRun(prompt, target, drafter, max_new_tokens=8, ignore_eos=True)
        >>> tokens = 0
        >>> for record in run:  # a Prefill, then the steps
        ...     tokens += 1 if isinstance(record, Prefill) else len(record.tokens)
        >>> tokens == len(run.result().token_ids)
        True
    """

    def __init__(
        self,
        prompt: Sequence[int],
        target: Target,
        drafter: Drafter | str | None = None,
        *,
        policy: DraftPolicy | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        decoding: DecodingOptions | None = None,
        trace: bool = False,
        **options: Unpack[DecodingKeywords],
    ) -> None:
        decoding = (decoding or DecodingOptions()).with_changes(**options)
        self.target, self.drafter = target, resolve_drafter(drafter, target) or NoDraft()
        sampling = sampling or Sampling()
        if policy is None:
            # A policy that learns would only take time, and several drafters draft chains of one length.
            blank = isinstance(self.drafter, NoDraft | SeveralDrafters)
            policy = FixedLength(5) if blank else build_policy(default_policy(greedy=sampling.greedy))
        self.policy = policy
        self.seed, self.decoding = seed, decoding
        self.prompt, self.prompt_tokens = prompt, len(prompt)
        tokenizer = target.tokenizer
        _check_tokens(prompt, target)
        _check_drafter(self.drafter, target)
        if decoding.stop and tokenizer is None:
            raise UsageError("Stop strings need a tokenizer, and the target has none.", "Leave them out.")
        sampling = target.language_model.transforms(sampling, decoding)
        self._prefill: Prefill | None = None
        self._steps: list[Step] = []
        self._settings: dict[str, Any] = {
            "sampling": sampling,
            "random": Randomness(seed),
            "max_new_tokens": decoding.max_new_tokens,
            "stops": StopRules(decoding.end_ids(target.end_ids), decoding.stop, tokenizer),
            "first_target": decoding.first_target,
            "trace": trace,
        }
        self.most_tokens = len(prompt) + decoding.max_new_tokens
        self._records: Iterator[Prefill | Step] | None = None

    @property
    def request(self) -> Request:
        """What decides the output, on the models themselves."""
        return Request(self.prompt, self.target.scorer, self.drafter, self.policy, **self._settings)

    def as_request(self, factory: RequestFactory, batch_costs: BatchCosts | None = None) -> Request:
        """Return this generation as a request of a batch, with its own scorers, drafter and draft policy.

        The caller passes the request's records to ``take``.

        Args:
            factory: Makes the scorers and the drafter.
            batch_costs: Costs of the batch's shared forward passes, for draft policies that use them.

        Raises:
            UsageError: See ``Request``.
        """
        self.policy = policy = copy.deepcopy(self.policy)
        target, drafter = factory.open(self.drafter)
        if batch_costs is not None:
            models = [loaded_of(part.scorer) for part in models_of(drafter)]
            share_costs(policy, batch_costs, models)
        return Request(self.prompt, target, drafter, policy, **self._settings)

    def __iter__(self) -> Iterator[Prefill | Step]:
        if self._records is None:
            self._records = decode_steps(self.request, clock_for(str(self.target.scorer.device)))
        for record in self._records:
            self.take(record)
            yield record

    def take(self, record: Prefill | Step) -> None:
        if isinstance(record, Prefill):
            self._prefill = record
        else:
            self._steps.append(record)

    def text_stream(self) -> TextStream[Any] | None:
        """Return a stream that turns generated tokens into text, with any labels; ``None`` without a tokenizer."""
        tokenizer = self.target.tokenizer
        return None if tokenizer is None else TextStream(tokenizer, self.decoding.stop)

    def result(self) -> Generation:
        """Return the output so far; ``finish_reason`` is ``None`` until the end."""
        prefill = self._prefill or Prefill(self.prompt_tokens, None, 0.0)
        tokens = self._tokens()
        last: Prefill | Step = self._steps[-1] if self._steps else prefill
        return Generation(
            prompt_tokens=self.prompt_tokens,
            token_ids=tuple(tokens),
            text=self._text(shown_tokens(tokens, last.finish_reason)),
            finish_reason=last.finish_reason,
            prefill=prefill,
            steps=tuple(self._steps),
            target=self.target.name,
            drafter=self.drafter.traits.name,
            dtype=self.target.dtype,
            seed=self.seed,
            policy="none" if isinstance(self.drafter, NoDraft) else self.policy.name,
        )

    def _tokens(self) -> list[int]:
        first = () if self._prefill is None else self._prefill.tokens
        return [*first, *(token for step in self._steps for token in step.tokens)]

    def _text(self, tokens: Sequence[int]) -> str | None:
        if self.target.tokenizer is None:
            return None
        stream = TextStream[None](self.target.tokenizer, self.decoding.stop)
        for token in tokens:
            stream.push(token, None)
        stream.finish(None)
        return stream.text


def shown_tokens(tokens: Sequence[int], finish_reason: str | None) -> Sequence[int]:
    """Return the tokens that the text consists of: all except an end token."""
    return tokens[:-1] if finish_reason == "eos" else tokens


def policy_of(gamma: int | None) -> DraftPolicy | None:
    """Return the policy of a draft length; ``None`` without one."""
    if gamma is not None and gamma < 1:
        raise UsageError(f"gamma is {gamma}.", "Give at least 1, or the drafter 'none' for plain decoding.")
    return None if gamma is None else FixedLength(gamma)


def speculative_generate(
    prompt: str | Sequence[int],
    target: Target,
    drafter: Drafter | str | None,
    *,
    gamma: int | None = None,
    policy: DraftPolicy | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    decoding: DecodingOptions | None = None,
    trace: bool = False,
    chat: bool | None = None,
    system: str | None = None,
    **options: Unpack[DecodingKeywords],
) -> Generation:
    """Generate with speculative decoding (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023).

    Args:
        prompt: Text, or token ids to continue as they are.
        target: The model whose output distribution is kept (``load_target``).
        drafter: Proposes tokens (``load_drafter``); a spec such as "lookup" is loaded for this generation, and
            ``None`` is plain decoding.
        gamma: Tokens drafted in a step, at least 1. Ignored when ``policy`` is given.
        policy: A draft policy (``specbench.policies.build_policy``). Without ``policy`` and ``gamma``, the defaults
            of the command line apply: ``auto`` in greedy decoding, which measures what pays, and ``fixed`` (5) in
            sampling, where a policy that depends on measured times would change the output of a seed.
        sampling: The transforms of both models; greedy by default.
        seed: Seed of the generator from which everything random is drawn.
        decoding: Length, stops and other options; by default those of the command line.
        trace: Record q, p, r and the verdict of every draft token.
        chat, system: See ``encode_prompt``.
        options: Fields of ``DecodingOptions`` that replace those of ``decoding``, such as ``max_new_tokens=64``.

    Returns:
        The output with all records, from which ``specbench.decoding.metrics`` computes figures.

    Raises:
        UsageError: An argument is out of its range, the prompt does not fit the target's context, or the drafter was
            made for another target.

    Examples:
        >>> result = speculative_generate("Count from 1 to 9.", target, "lookup", max_new_tokens=16, ignore_eos=True)
        >>> len(result.token_ids), result.finish_reason
        (16, 'length')
        >>> options = {"gamma": 4, "sampling": Sampling(temperature=1.0, top_p=0.9), "max_new_tokens": 8}
        >>> sampled = speculative_generate("Tell a story.", target, drafter, **options)
        >>> all(step.gamma <= 4 for step in sampled.steps)
        True
    """
    run = GenerationRun(
        as_tokens(prompt, target, chat=chat, system=system),
        target,
        drafter,
        policy=policy or policy_of(gamma),
        sampling=sampling,
        seed=seed,
        decoding=decoding,
        trace=trace,
        **options,
    )
    for _ in run:
        pass
    return run.result()


def autoregressive_generate(prompt: str | Sequence[int], target: Target, **options: Any) -> Generation:
    """Generate one token per forward pass of the target; for the arguments see ``speculative_generate``.

    Examples:
        >>> plain = autoregressive_generate("Count from 1 to 9.", target, max_new_tokens=8)
        >>> {len(step.tokens) for step in plain.steps}
        {1}
    """
    return speculative_generate(prompt, target, None, **options)
