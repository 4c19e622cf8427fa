"""Load targets, from specs or from objects of `transformers`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench import kernels
from specbench.backends.torch.attention import fold_attention
from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.scorer import Scorer
from specbench.backends.torch.submodels import trim_head
from specbench.base.errors import UsageError
from specbench.base.progress import Progress, announce
from specbench.models.kept_layers import kept_layers
from specbench.models.load import LanguageModel, load_model, wrap_model
from specbench.options import CacheKind, LoadOptions, QuantizedName, quantized
from specbench.specs.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(repr=False)
class Target:
    """The model whose output distribution is kept, ready to decode.

    A target serves one generation at a time. Several targets, each with its own drafters, can decode in parallel
    threads.

    Attributes:
        language_model: The loaded model with its tokenizer.
        scorer: The same model with its KV cache.
        dtype: "int8" or "int4" if the target is quantized, else the weights' dtype.
        packed: Whether its linear layers are packed for the CPU.
        bit_exact: Whether logits are bitwise equal in forward passes of any size. Only tested for models that round
            activations to bytes, else false.
        widths_differ: Why logits depend on the number of tokens in a forward pass, if that was tested and found.

    Examples:
        >>> target
        Target('smollm2-135m', ... on cpu)
    """

    language_model: LanguageModel
    scorer: Scorer
    dtype: str
    packed: bool
    bit_exact: bool = False
    widths_differ: str | None = None

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {self.dtype} on {self.scorer.device})"

    @property
    def name(self) -> str:
        return self.language_model.name

    @property
    def quantization(self) -> QuantizedName | None:
        """The type that its linear layers are quantized to; ``None`` if they are not."""
        return quantized(self.dtype)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.language_model.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.language_model.end_ids

    @property
    def vocab_size(self) -> int:
        return self.language_model.vocab_size


def load_target(
    spec: str | ModelSpec,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind | None = None,
    progress: Progress | None = None,
) -> Target:
    """Load a target.

    Args:
        spec: Hub id (with ``@revision``), model folder, ``.gguf`` file or built-in name.
        options: Dtype, device, device map. On a CPU the linear layers are packed, or quantized for "int8" and
            "int4"; the quantized model is then the target that outputs are lossless for.
        cache: The kind of KV cache; ``None`` for ``default_cache``.
        progress: Receives the progress of fetching and loading.

    Raises:
        UsageError, RunError: See ``specbench.models.load.load_model``.

    Examples:
        >>> target = load_target("smollm2-135m")  # the built-in model, fetched once
        >>> target.name, target.vocab_size
        ('smollm2-135m', 49152)
    """
    language_model = load_model(spec, options, progress=progress)
    kind = cache or default_cache(language_model.model.config, quantized=language_model.quantize is not None)
    return prepare_target(language_model, kind, progress=progress)


def default_cache(config: PretrainedConfig, *, quantized: bool) -> CacheKind:
    """Return the default kind of a target's KV cache: "dynamic", or "preallocated" if the target is quantized.

    Rounding activations to bytes amplifies a difference in the last bit, so a quantized target needs bit-exact forward
    passes, and these need the preallocated cache. A model that cannot have a preallocated cache gets a dynamic one.
    """
    if quantized:
        with suppress(UsageError):
            make_cache("preallocated", config)
            return "preallocated"
    return "dynamic"


def wrap_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    cache: CacheKind = "dynamic",
    pack: bool = True,
) -> Target:
    """Make a target of loaded ``transformers`` objects.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; ``None`` if prompts are token ids.
        name: Its name in results.
        cache: The kind of KV cache.
        pack: Whether to pack its layers in place for speed. The model still works with ``transformers``, including
            hooks, and ``save_pretrained`` writes the original weights.

    Raises:
        UsageError: The model cannot be decoded speculatively, or not with this cache.

    Examples:
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> wrapped = wrap_target(model, name="tiny")
        >>> len(speculative_generate([1, 2, 3], wrapped, "lookup", max_new_tokens=8, ignore_eos=True).token_ids)
        8
    """
    return prepare_target(wrap_model(model, tokenizer, name), cache, pack=pack)


def prepare_target(
    language_model: LanguageModel, cache: CacheKind, *, pack: bool = True, progress: Progress | None = None
) -> Target:
    """Pack or quantize a loaded model in place, and run the trials of its fast forward passes."""
    model = language_model.model
    make_cache(cache, model.config)  # can refuse, before the layers change
    if pack or language_model.quantize is not None:
        transform_layers(language_model, language_model.quantize, progress=progress)
    layers = kernels.layers_of(model)
    dtype = layers.quantized or language_model.dtype
    announce(progress, f"testing forward passes of {language_model.name}")
    scorer = Scorer(model, cache, context_limit=language_model.context_limit)
    tried = cache == "bit-exact" or scorer.rounding == torch.int8
    widths_differ = scorer.why_not_bit_exact() if tried else None
    if cache == "bit-exact" and widths_differ is not None:
        raise UsageError(
            f"Bit-exact forward passes are not available here. {widths_differ}", "Choose another --cache."
        )
    exact = tried and widths_differ is None
    return Target(language_model, scorer, dtype, layers.packed, exact, widths_differ)


def transform_layers(
    language_model: LanguageModel,
    dtype: QuantizedName | None,
    *,
    rows: tuple[int, ...] = (),
    progress: Progress | None = None,
) -> str:
    """Fold a model's attention, trim its head, and quantize or pack its linear layers, in place or from stored ones.

    Args:
        dtype: What the layers are quantized to; ``None`` to pack them as they are.
        rows: Token ids of the logits that are left, in this order; empty for all.

    Returns:
        The dtype of the layers.

    Raises:
        UsageError: The head was trimmed otherwise before.
    """
    model = language_model.model
    fold_attention(model)
    if rows and rows != language_model.head_rows:
        if language_model.head_rows is not None:
            raise UsageError(
                f"The head of {language_model.name} was already trimmed to another vocabulary, for another target.",
                "Load the model once for each.",
            )
        trim_head(model, torch.tensor(rows, device=model.device))
        language_model.head_rows = rows
    with kept_layers(language_model, dtype or "packed", progress) as layers:
        if dtype is None:
            kernels.pack(model, layers)
        else:
            kernels.quantize(model, dtype, layers)
    return dtype or language_model.dtype
