"""Whether a drafter fits a target, by their config.json and the headers of their weights. No weights are loaded."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.export.engine import HEAD_TITLES
from specbench.export.registry import ENGINES, load_engine
from specbench.export.setting import Setting
from specbench.export.start import option_words
from specbench.models.files import LEAST_SHARED, Header, read_settings, vocabulary
from specbench.models.find import ModelFiles, find_model
from specbench.models.head_files import HEAD_KINDS, HeadFiles, head_in, kind_of_tensors
from specbench.models.mtp_layouts import LAYOUTS, mtp_tensors_in
from specbench.recipe import Recipe, drafter_argument
from specbench.specs.drafters import Mtp, SmallModel
from specbench.specs.models import ModelSpec
from specbench.specs.policies import LONGEST_DRAFT, Fixed

DTYPES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.625}
"""Bytes per weight of linear layers in specbench, scales included."""

_OF_TARGET = ("--dtype", "--temp", "--model", "--model-path", "--revision")
"""Engines' options that have nothing to do with the drafter."""

_CAUSAL = ("forcausallm", "lmheadmodel", "forconditionalgeneration")
_STORED = re.compile(r"meta|nvfp4|mxfp4|awq|gptq|gguf|fp8|bf16|int[48]|[48]bit|w\d+a\d+|")
"""Words of a name in which copies of one model differ."""


@dataclass(frozen=True)
class ModelFacts:
    """What the small files of a model say, and the headers of its weights; none where these cannot be read."""

    files: ModelFiles
    settings: Mapping[str, Any]
    headers: Mapping[str, Header]

    @property
    def name(self) -> str:
        return self.files.spec.name

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        text = self.settings.get("text_config")
        return text if isinstance(text, dict) else self.settings

    @property
    def classes(self) -> list[str]:
        named = self.settings.get("architectures")
        return [str(each) for each in named] if isinstance(named, list) else []

    def size(self, key: str) -> int:
        """Return a size of its configuration; raise ``RunError`` if it is not there."""
        value = self.text.get(key)
        if key == "vocab_size" and value is None:  # the default of its class
            shapes = [
                each.shape for name, each in self.headers.items() if name.endswith("embed_tokens.weight")
            ]
            value = shapes[0][0] if shapes and shapes[0] else None
        if type(value) is not int or value < 1:
            raise RunError(
                f"The config.json of {self.name} does not say its {key}.", "Name a language model."
            )
        return value

    def memory(self, dtype: str | None = None) -> float | None:
        """Return about how many bytes its weights take as stored, or in a dtype; ``None`` if that is not known."""
        if not self.headers or (dtype and "quantization_config" in {*self.settings, *self.text}):
            return None
        total = 0.0
        for name, header in self.headers.items():
            bits = re.search(r"\d+", header.dtype)
            size = int(bits[0]) / 8 if bits else 1
            if dtype is not None:  # embeddings and norms are not quantized
                linear = len(header.shape) > 1 and "embed" not in name
                size = DTYPES[dtype] if linear else max(2.0, DTYPES[dtype])
            total += math.prod(header.shape) * size
        return total


def read_facts(spec: ModelSpec) -> ModelFacts:
    """Read what a model's small files say, and headers; of a model on the hub nothing else is fetched.

    Raises:
        UsageError, RunError: It is a GGUF file; for others see ``find_model``.
    """
    if spec.kind == "gguf":  # which is converted before anything can be read
        raise UsageError(
            f"{spec.name} is a GGUF file, which is not compared.", "Name the model's folder or hub id."
        )
    files = find_model(spec)
    headers: Mapping[str, Header] = {}
    with suppress(Exception):  # what networks raise, and repositories without safetensors
        headers = files.headers()
    return ModelFacts(files, read_settings(files.folder, spec.name), headers)


@dataclass
class Fit:
    """How a drafter fits a target.

    Attributes:
        facts: The drafter's own; ``None`` for MTP layers of the target's checkpoint.
        title: What it is.
        rows: What is known of it, with labels.
        faults: Why it does not fit.
        doubts: What may go wrong, as sentences.
        engines: Each engine with the options by which it takes the drafter, and what that needs.
        refused: The other engines with their reasons.
    """

    name: str
    facts: ModelFacts | None = None
    title: str = ""
    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    engines: list[tuple[str, str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def fit_of(target: ModelFacts, drafter: SmallModel) -> Fit:
    """Compare a drafter with a target.

    Raises:
        UsageError: There is no such drafter. RunError: It cannot be fetched, or a size is not known.
    """
    fit, head, others = Fit(drafter_argument(drafter)), None, (False, False)
    if isinstance(drafter, Mtp):
        _examine_mtp(fit, target)
    else:
        fit.facts = read_facts(drafter.model)
        try:
            head = head_in(fit.facts.files)
            if head is not None:
                _examine_head(fit, fit.facts, target, head)
        except SpecbenchError as error:  # of a kind that is not supported, or for another target
            fit.title = fit.title or "trained head"
            fit.faults.append(error.message)
        if not fit.title or (head is not None and HEAD_KINDS[head.kind].whole):
            others = _examine_model(fit, fit.facts, target)
        if not fit.facts.headers:
            fit.doubts.append("The headers of its weights cannot be read: only config.json was compared.")
        if (fit.facts.memory() or 0) >= (target.memory() or math.inf):
            fit.doubts.append("Its weights are no smaller than the target's: drafts cost what they save.")
    if not fit.faults:
        _add_engines(fit, target, drafter, head, *others)
    return fit


def _examine_mtp(fit: Fit, target: ModelFacts) -> None:
    fit.title = "MTP layer of the target's checkpoint"
    found = mtp_tensors_in(target.headers, target.size("num_hidden_layers"))
    if found is not None:
        fit.rows.append(("weights", f"{found.weights / 1e6:,.0f} million"))
    elif target.headers:
        families = ", ".join(layout.families for layout in LAYOUTS)
        fit.faults.append(f"The checkpoint of {target.name} has no MTP layer in a known layout ({families}).")
    else:
        fit.faults.append(f"The headers of {target.name}, which would show MTP layers, cannot be read.")


def _examine_head(fit: Fit, facts: ModelFacts, target: ModelFacts, head: HeadFiles) -> None:
    """Compare a trained head with a target; raise ``SpecbenchError`` if its configuration is for another one."""
    form = head.training.form
    fit.title = f"{HEAD_KINDS[head.kind].title} head" + (f", in the format of `{form}`" if form else "")
    if HEAD_KINDS[head.kind].whole:
        return
    hidden, vocab, layers = (target.size(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    fit.doubts += _doubts_of_names(head, target)
    head.check_sizes(hidden, vocab, layers, target.classes, target.name)
    ids = head.layers(layers)
    drafted = head.number("draft_vocab_size", head.number("truncated_vocab_size", vocab))
    inside = ", ".join(str(layer) for layer in ids if layer < layers)
    states = [f"hidden states before the target's layers {inside} of {layers}"] if inside else []
    states += ["the target's last hidden state"] if layers in ids else []
    fit.rows.append(("reads", " and ".join(states)))
    if drafted != vocab:
        fit.rows.append(("drafts", f"{drafted:,} of the target's {vocab:,} tokens"))
    if "target_fingerprint" in head.settings:
        weights = f"weights {head.settings['target_fingerprint']}, which are compared when it is loaded"
        fit.rows.append(("made for", weights))
    fit.faults += _faults_of_tensors(head, facts, head.width(hidden), len(ids), drafted, vocab)
    fit.doubts += [] if fit.faults else _doubts_of_kind(head, facts)


def _doubts_of_kind(head: HeadFiles, facts: ModelFacts) -> Iterator[str]:
    """Yield what goes wrong with a kind of head under wrong flags, or in an engine that expects another one."""
    if head.kind == "eagle-1":
        yield "It reads one hidden state: with the flags of EAGLE-3 (eagle3, EAGLE3) it would get three."
    if head.kind != "eagle3":
        return
    yield "With SGLang's flag for EAGLE-1 (EAGLE) it loads, and no draft is accepted (sglang#21272)."
    if facts.headers and not any(name.endswith("lm_head.weight") for name in facts.headers):
        yield "It has no lm_head: in an engine that does not take the target's, nothing is accepted (sglang#27908)."
    if "eagle3" not in (named := ", ".join(facts.classes) or "missing").lower():
        yield (
            f"Its architectures are {named}: an engine that chooses a class by them, as SGLang does, may load"
            " another model. Write LlamaForCausalLMEagle3."
        )


def _faults_of_tensors(
    head: HeadFiles, facts: ModelFacts, width: int, states: int, drafted: int, vocab: int
) -> Iterator[str]:
    """Yield how a head's tensors differ from what its configuration and its target ask for."""
    headers = {name.removeprefix("model."): each.shape for name, each in facts.headers.items()}
    shapes = {name: shape for name, shape in headers.items() if shape}
    shown = kind_of_tensors(shapes)
    if shown is not None and shown != head.kind and head.kind != "assistant":
        yield (
            f"Its tensors are those of {HEAD_TITLES[shown]}, but by its config.json it is {HEAD_TITLES[head.kind]}"
            f" (architectures: {', '.join(facts.classes) or 'missing'}): correct its config.json."
        )
        return
    inputs = {"fc.weight": (2 if head.kind == "eagle-1" else states) * width}
    inputs["blocks.0.layers.0.weight"] = width
    for name, size in inputs.items():
        if (columns := shapes.get(name, (size,))[-1]) != size:
            yield f"Its {name} has {columns:,} inputs, and should have {size:,} by its config.json and this target."
    rows = dict.fromkeys(("t2d", "embed_tokens.weight", "0.1.weight"), vocab)
    rows |= dict.fromkeys(("d2t", "lm_head.weight"), drafted)
    for name, size in rows.items():
        if (tokens := shapes.get(name, (size,))[0]) != size:
            yield f"Its {name} is for {tokens:,} tokens, and should be for {size:,}."
    if shapes and drafted != vocab and not shapes.keys() & {"d2t", "token_map"}:
        yield f"It drafts {drafted:,} of {vocab:,} tokens, and has no d2t that says which ones."


def _doubts_of_names(head: HeadFiles, target: ModelFacts) -> Iterator[str]:
    """Yield a doubt if a head or its model card names another target, which is no proof."""
    card = ""
    with suppress(OSError, ValueError):
        card = (head.folder / "README.md").read_text(encoding="utf-8").partition("\n---")[0]
    in_card = re.search(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", card, re.MULTILINE)
    keys = map(head.settings.get, ("base_model_name_or_path", "base_model", "target"))
    named = [head.verifier.get("name_or_path"), *keys, in_card and in_card[1]]
    made_for = next((each for each in named if isinstance(each, str) and each), None)
    if made_for is not None and _words(made_for) != _words(target.name):
        yield f"It names {made_for} as its target: it may have been made for other weights."


def _words(name: str) -> set[str]:
    last = name.partition("@")[0].rpartition("/")[2].lower()
    return {word for word in re.split(r"[^a-z0-9.]+", last) if not _STORED.fullmatch(word)}


def _examine_model(fit: Fit, facts: ModelFacts, target: ModelFacts) -> tuple[bool, bool]:
    """Compare a model with a target; return whether it has other tokens, and whether another number of logits."""
    named = ", ".join(facts.classes)
    fit.title = fit.title or f"small model ({named or 'its architectures are not named'})"
    if named and not any(each.lower().endswith(_CAUSAL) for each in facts.classes):
        fit.faults.append(f"It is no causal language model, but a {named}.")
        return False, False
    own, wanted = facts.size("vocab_size"), target.size("vocab_size")
    logits = f"{own:,} logits, where the target has {wanted:,}" if own != wanted else ""
    theirs, ours = vocabulary(facts.files.folder), vocabulary(target.files.folder)
    if ours is None or theirs is None:
        without = " and ".join(each.name for each in (target, facts) if vocabulary(each.files.folder) is None)
        fit.doubts.append(f"No tokenizer.json in {without}: nothing shows that both have the same tokens.")
        fit.faults += [f"It has {logits}, and there is no tokenizer to compare."] if logits else []
        return False, False
    tokens, share = "the target's", 1.0
    if ours != theirs:
        spelled = {text.replace("▁", "Ġ") for text in theirs}
        share = sum(text.replace("▁", "Ġ") in spelled for text in ours) / max(1, len(ours))
        tokens = f"others; it has about {share:.0%} of the target's {len(ours):,}"
    fit.rows.append(("tokens", f"{tokens}; {logits}" if logits else tokens))
    if share < LEAST_SHARED:
        fit.faults.append("It has hardly any of the target's tokens.")
    return ours != theirs, bool(logits)


def _add_engines(
    fit: Fit,
    target: ModelFacts,
    drafter: SmallModel,
    head: HeadFiles | None,
    other_tokens: bool,
    other_logits: bool,
) -> None:
    """Add which engines take a drafter, specbench first, and which do not."""
    fit.engines.append(("specbench", shlex.join(["--drafter", drafter_argument(drafter)]), ""))
    gamma = None if head is None else head.proposed
    policy = Fixed(gamma if type(gamma) is int and 0 < gamma <= LONGEST_DRAFT else 3)
    recipe, training = Recipe(target.files.spec, drafter, policy), None if head is None else head.training
    for engine in map(load_engine, ENGINES):
        title = f"{engine.title} {engine.version}"
        try:
            export = engine.export(Setting(recipe, policy.gamma_max, head=training))
        except UsageError as error:
            reason = error.message.removeprefix(f"{title} ").removeprefix(f"{engine.title} ")
            fit.refused.append((title, f"no: {reason}"))
            continue
        if other_tokens and not engine.other_tokens:
            fit.refused.append((title, "no: no option of it for drafters with other tokens is known"))
            continue
        options = {name: value for name, value in export.options.items() if name not in _OF_TARGET}
        of_command_line = all(name[0] == "-" for name in options)
        words = shlex.join(option_words(options)) if of_command_line else json.dumps(options)
        needs = [each.partition(". ")[0].rstrip(".") for each in export.needs]
        needs += [engine.other_tokens] if other_tokens or other_logits else []
        fit.engines.append((title, words, "; ".join(filter(None, needs))))
