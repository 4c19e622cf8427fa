"""Compare random tiny models × drafters × caches × policies × stops × hooks × threads with `generate`.

    python benchmarks/fuzz.py --minutes 30              # cases 0, 1, 2, ... for 30 minutes
    python benchmarks/fuzz.py --seed 4711 --minutes 30  # others
    python benchmarks/fuzz.py --seed 23 --cases 1      # one of them again, alone
    python benchmarks/fuzz.py --models composite       # models that also see or hear, loaded from folders

A case draws a model (random weights of a Llama-family shape, or of another in models.md), wraps it as users do, and
decodes a few prompts with one drafter and one draft policy. In float32 the tokens must be those of `transformers`'
own `generate` on an untouched copy; in bfloat16, int8 and int4, where passes are bit-exact, those of plain decoding.
Sampled outputs must be in the support of the target's distribution and repeat with their seed. Compared outputs are
also decoded in one batch. Every fourth case enumerates an output distribution instead: random tables of logits,
verification, policy, drafter and transforms (``benchmarks/distributions.py``). A finding is a wrong token beyond
rounding, a distribution off by more than 1e-6, or an error that is no sentence for users. Prints findings as they
come and one line of JSON at the end. Exit code 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import (
    VOCABULARY,
    Guesses,
    bounds_prompts,
    generating,
    one_by_one,
    tiny_composite,
    tiny_config,
    whole,
)
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import distributions
import head_files
import scripted_drafters
from tiny import letter_tokenizer, tiny_tokenizer

from specbench.backends.torch.parity import find_difference
from specbench.base.errors import RunError, SpecbenchError
from specbench.base.progress import quiet_transformers
from specbench.decoding.records import Step
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.checkpoints import check_config
from specbench.models.composites import without_timm
from specbench.models.drafters import join_cascade, load_drafter, wrap_drafter
from specbench.models.load import LanguageModel, load_model, wrap_model
from specbench.models.target import Target, load_target, prepare_target, wrap_target
from specbench.options import LoadOptions, quantized
from specbench.policies import build_policy
from specbench.specs.drafters import Cascade, parse_drafter

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = (
    "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "mixtral", "gpt2", "gpt_neox", "falcon", "cohere", "starcoder2",
    "stablelm", "granite", "bloom", "opt", "glm4", "smollm3", "gpt_oss", "lfm2",
)  # fmt: skip
RECURRENT = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip
RULES = (
    "auto", "egag", "egag:max=6,beta=0.5", "confidence", "entropy-bound", "svip",
    "heuristic", "heuristic:max=9",
)  # fmt: skip
FREE = (
    "lookup", "lookup:n=any", "lookup:min=2", "ngram", "ngram:top-k=2", "ngram:order=2", "ngram:keep", "ngram:min=2",
    "suffix", "suffix:n=3,keep",
)  # fmt: skip
HEADS = {
    "eagle3": (
        head_files.speculators_settings((0, 1, 1), vocab=VOCABULARY, speculators_config={}),
        head_files.eagle_tensors(vocab=VOCABULARY),
    ),
    "eagle-1": (head_files.eagle_one_settings(VOCABULARY), head_files.eagle_one_tensors(vocab=VOCABULARY)),
    "medusa": (head_files.medusa_settings(VOCABULARY), head_files.medusa_tensors(vocab=VOCABULARY)),
}
STEERED = ("", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "mlp.down_proj",
           "self_attn.o_proj", "mlp.up_proj")  # fmt: skip
WHOLE = {config.model_type: (config, made) for config, made in MODEL_FOR_MULTIMODAL_LM_MAPPING.items()}
"""Configuration and class of models that also see or hear."""
WITH_MTP = ("qwen3_5", "qwen3_5_moe")
FLOAT = LoadOptions("float32")
MAKING = threading.Lock()
"""Weights come from the one global generator."""
TOKENIZER = tiny_tokenizer()
LETTERS = letter_tokenizer("".join(map(chr, range(33, 32 + VOCABULARY))))


@dataclass
class Case:
    """A random case, determined by its number."""

    number: int
    kind: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    pack: bool = True
    cache: str = "dynamic"
    drafter: str = "none"
    drafter_noise: float = 0.0
    drafter_int8: bool = False
    rule: str = "fixed"
    hook: str | None = None
    hook_first: bool = False
    end_token: bool = False
    stop_string: bool = False
    first_target: bool = True
    penalty: float = 1.0
    defaults: dict[str, Any] = field(default_factory=dict)
    top_k: int = 0
    conversation: bool = False
    place: str = ""
    prompts: list[tuple[list[int], int]] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return LETTERS if self.kind in WHOLE else TOKENIZER

    @property
    def limit(self) -> int:
        """Return the longest context of a Llama-family model."""
        longest: int = self.shape["max_position_embeddings"]
        return int(longest * self.shape.get("rope_parameters", {}).get("factor", 1.0))

    def __str__(self) -> str:
        empty = Case(self.number)
        said = {
            k: v
            for k, v in vars(self).items()
            if v != getattr(empty, k) and k not in ("number", "prompts", "place")
        }
        said["prompts"] = [(len(ids), new) for ids, new in self.prompts]
        return f"case {self.number}: " + ", ".join(f"{key}={value}" for key, value in said.items())


@cache
def composites() -> list[str]:
    """Return the types of composite models that are not refused."""
    found = []
    for kind, (config, _) in WHOLE.items():
        with suppress(SpecbenchError):
            check_config(config(), kind)
            found.append(kind)
    return found


def draw(number: int, models: str | None = None) -> Case:
    """Return the case of a number."""
    r = random.Random(number)
    case = Case(number)
    recurrent, composite = models == "recurrent", models == "composite"
    kinds = RECURRENT if recurrent else composites() if composite else ()
    case.kind = r.choice(kinds or (LLAMAS if r.random() < 0.75 else OTHERS))
    vocabulary = len(case.tokenizer)
    case.shape = {"vocab_size": vocabulary}
    if case.kind in LLAMAS:
        shared, group, size = r.choice((1, 2, 3)), r.choice((1, 2, 3, 4)), r.choice((8, 16, 32, 64))
        case.shape |= {
            "hidden_size": shared * group * r.choice((4, 6, 8, 20)), "intermediate_size": r.choice((16, 40, 64)),
            "head_dim": size, "num_hidden_layers": r.choice((1, 2, 3)), "num_attention_heads": shared * group,
            "num_key_value_heads": shared, "tie_word_embeddings": r.random() < 0.3,
            "max_position_embeddings": r.choice((48, 1024, 1024, 1024)),
        }  # fmt: skip
        if case.kind == "mistral":
            case.shape["sliding_window"] = r.choice((None, 8, 20, 64))
        if case.kind == "qwen2":
            del case.shape["head_dim"]
            case.shape["hidden_size"] = shared * group * size
        if r.random() < 0.1:
            case.shape["max_position_embeddings"] = 32
            case.shape["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                             "original_max_position_embeddings": 32}  # fmt: skip
    case.dtype = (
        r.choices(("float32", "bfloat16", "int8", "int4"), (8, 1, 1, 1))[0]
        if case.kind in LLAMAS
        else "float32"
    )
    case.pack = case.dtype != "float32" or r.random() < 0.75
    case.cache = r.choice(("dynamic", "dynamic", "preallocated", "preallocated", "none", "static"))
    if recurrent:
        case.cache = r.choice(("dynamic", "dynamic", "dynamic", "none"))
    if composite:
        case.cache = r.choice(("dynamic", "dynamic", "dynamic", "preallocated"))
    if case.dtype != "float32":  # what bit-exact passes take
        case.cache, case.shape["max_position_embeddings"] = "preallocated", 1024
    if case.shape.get("sliding_window") is not None and (case.dtype != "float32" or case.cache == "static"):
        case.shape["sliding_window"] = None
    roll = r.random()
    own = r.choice(("self:int8", "self:layers=1", "self:layers=1,int8"))
    if case.shape.get("num_hidden_layers") == 1:
        own = "self:int8"
    if quantized(case.dtype):
        own = own.replace(",int8", "").replace("self:int8", "self:layers=1")
    if roll < 0.2:
        case.drafter = r.choice(FREE)
    elif roll < 0.45:
        case.drafter = own
    elif roll < 0.7:
        case.drafter = "model"
    elif roll < 0.85:
        front = r.choice(("lookup", "ngram", "suffix", "lookup:min=1"))
        case.drafter = f"{front}+{r.choice(('model', own))}"
    else:
        case.drafter = "guesses"
    if composite and r.random() < 0.3:
        case.drafter = r.choice([*HEADS])
    if case.kind in WITH_MTP and r.random() < 0.5:
        case.drafter = "mtp"
    case.drafter_noise = r.choice((0.0, 0.01, 0.05, 1.0))
    case.drafter_int8 = r.random() < 0.5
    gamma = r.choice((1, 1, 2, 3, 4, 5, 7, 8, 12, 30, *((70, 100) if recurrent else ())))
    case.rule = f"fixed:gamma={gamma}"
    if r.random() < 0.4:
        free = case.drafter == "guesses" or case.drafter in FREE
        case.rule = r.choice([rule for rule in RULES if not free or rule[:4] not in ("egag", "entr", "svip")])
    if case.kind in LLAMAS and r.random() < 0.15:
        case.hook, case.hook_first = r.choice(STEERED), r.random() < 0.5
    case.end_token, case.stop_string = r.random() < 0.3, r.random() < 0.2
    case.first_target = r.random() < 0.8
    case.penalty = r.choice((1.0, 1.0, 1.0, 1.3))
    if case.dtype == "float32" and r.random() < 0.15:
        case.top_k = r.choice((1, 2, 5))
    elif r.random() < 0.15:
        ids = [r.randrange(vocabulary) for _ in range(6)]
        case.defaults = r.choice((
            {"suppress_tokens": ids}, {"no_repeat_ngram_size": r.choice((1, 2, 3))},
            {"bad_words_ids": [[ids[0]], ids[1:3]]},
            {"min_new_tokens": r.choice((3, 9))} if case.dtype == "float32" else {},
        ))  # fmt: skip
    for _ in range(r.choice((1, 1, 2, 3))):
        length = r.choice((1, 2, 5, 9, 17, 30, 40))
        if r.random() < 0.1 and case.kind in LLAMAS and case.shape["max_position_embeddings"] > 600:
            length = r.randrange(500, 515) if r.random() < 0.7 else r.randrange(55, 70)
        if recurrent and r.random() < 0.1:  # read in two passes in a batch, and in an output's blocks
            length = r.choice((70, 540))
        known = range(3, VOCABULARY - 4) if composite else range(vocabulary - 3)
        words = r.sample(known, k=min(r.choice((3, 10, 100)), len(known)))
        new = r.choice((1, 2, 7, 20, 40, *((110,) if recurrent and r.random() < 0.2 else ())))
        case.prompts.append((r.choices(words, k=length), new))
    case.conversation = r.random() < 0.4
    return case


# --- Building -------------------------------------------------------------------------------------


def build_model(case: Case, noise: float = 0.0) -> Any:
    """Return the case's model, the same every time; with noise, a similar one."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[case.kind]
    if case.kind in WHOLE:
        config = tiny_composite(kind)
    elif case.kind in LLAMAS:
        config = kind(
            **case.shape, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None
        )
    else:
        config = tiny_config(kind)
        config.vocab_size = case.shape["vocab_size"]
        if case.kind in RECURRENT:
            config.max_position_embeddings = 1024
    with MAKING, torch.random.fork_rng(devices=[]), without_timm():
        torch.manual_seed(case.number)
        made = WHOLE[case.kind][1] if case.kind in WHOLE else transformers.AutoModelForCausalLM.from_config
        model = made(config).eval().requires_grad_(False)
        if noise:
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
    model.generation_config = GenerationConfig(**case.defaults)
    if case.dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    return model


def steer(model: Any, place: str) -> None:
    """Hook a module of the first layer that changes its output slightly."""

    def change(_: Any, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (out[0] * 1.25 + 0.1, *out[1:])
        return out * 1.25 + 0.1

    layer = model.model.layers[0]
    (layer.get_submodule(place) if place else layer).register_forward_hook(change)


def saved(model: Any, case: Case, name: str) -> str:
    """Save a model in a folder of its own, and return the folder."""
    folder = Path(case.place) / f"{case.number}-{name}"
    with quiet_transformers():
        model.save_pretrained(folder)
    case.tokenizer.save_pretrained(folder)
    if case.drafter == "mtp":
        add_mtp_layer(folder / "model.safetensors")
    return str(folder)


def load_whole(model: Any, case: Case, name: str) -> LanguageModel:
    """Return the text part of a model, loaded from a folder; loading its tokenizer might add tokens."""
    loaded = load_model(saved(model, case, name), FLOAT, tokenizer=False)
    loaded.tokenizer = case.tokenizer
    return loaded


def add_mtp_layer(path: Path) -> None:
    """Add an MTP layer to a checkpoint of Qwen3.5, with the decoder layer of the model's last."""
    tensors, last = load_file(path), "model.language_model.layers.1."
    width = tensors[f"{last}input_layernorm.weight"].numel()
    own = {key: each.clone() for key, each in tensors.items() if key.startswith(last)}
    tensors |= {key.replace(last, "mtp.layers.0."): each for key, each in own.items()}
    tensors |= {
        f"mtp.{name}.weight": torch.ones(width)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    tensors["mtp.fc.weight"] = torch.eye(width).repeat(1, 2)
    save_file(tensors, path, {"format": "pt"})


def build_target(case: Case) -> Target:
    model = build_model(case)
    hook_first = case.hook_first and not quantized(case.dtype)
    if case.hook is not None and hook_first:
        steer(model, case.hook)
    if quantized(case.dtype):
        target = load_target(saved(model, case, "target"), LoadOptions(dtype=case.dtype, device="cpu"))
        model = target.language_model.model
    elif case.kind in WHOLE:
        target = prepare_target(load_whole(model, case, "target"), case.cache, pack=case.pack)
    else:
        target = wrap_target(model, TOKENIZER, name="fuzzed", cache=case.cache, pack=case.pack)
    if case.hook is not None and not hook_first:
        steer(model, case.hook)
    return target


def build_drafter(case: Case, target: Target, prompt: list[int], answer: Sequence[int]) -> Any:
    def made(word: str) -> Any:
        if word in HEADS:
            word = str(head_files.write_head(Path(case.place) / word, *HEADS[word]))
        if word == "model":
            own = build_model(case, case.drafter_noise)
            if case.kind in WHOLE:
                twin = load_whole(own, case, "drafter")
            else:
                twin = wrap_model(own, target.tokenizer, "drafter")
            cache = "preallocated" if case.cache in ("static", "none") else case.cache
            return wrap_drafter(twin, target, cache=cache, int8=case.drafter_int8)
        return load_drafter(word, target, FLOAT if case.kind in WHOLE else None)

    if case.drafter == "guesses":
        return Guesses(prompt, answer, case.number)
    if "+" in case.drafter:
        spec = parse_drafter(case.drafter)
        assert isinstance(spec, Cascade)
        return join_cascade(spec, made(str(spec.back)))
    return made(case.drafter)


# --- What is right --------------------------------------------------------------------------------


def generated(reference: Any, case: Case, prompt: list[int], new: int, end: int | None = None) -> list[int]:
    """Return the greedy tokens of `generate`, which stop only at the end token."""
    batch = torch.tensor([prompt])
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=end,
        repetition_penalty=case.penalty,
        **case.defaults,
    )
    with torch.inference_mode():
        output = reference.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def cut(tokenizer: Any, tokens: list[int], end: int | None, stop: str | None) -> list[int]:
    """Return the output up to an end token or stop string, by decoding every prefix."""
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] == end or (stop is not None and stop in tokenizer.decode(
            tokens[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )):  # fmt: skip
            return tokens[:length]
    return tokens


def choose_stop(r: random.Random, tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """Return a piece of the coming text, or one that does not occur."""
    text = "".join(each for each in tokenizer.decode(tokens, skip_special_tokens=True) if each != "\ufffd")
    start = r.randrange(len(text)) if text else 0
    return text[start : start + r.choice((1, 2, 4))] or None


# --- Running --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a case brought: tokens decoded, drafts accepted, differences at a tie, outputs of batches, distributions
    enumerated, refusals by their message."""

    tokens: int = 0
    accepted: int = 0
    ties: int = 0
    batched: int = 0
    enumerated: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class WrongOutputError(Exception):
    """A wrong output."""


def decode(target: Target, drafter: Any, case: Case, prompt: list[int], new: int, **more: Any) -> Any:
    sampling = Sampling(
        temperature=1.0 if case.top_k else 0.0, top_k=case.top_k, repetition_penalty=case.penalty
    )
    run = GenerationRun(
        prompt, target, drafter, policy=build_policy(case.rule), sampling=sampling, max_new_tokens=new,
        first_target=case.first_target, seed=case.number, **more,
    )  # fmt: skip
    for _ in run:
        pass
    return run


def run_case(case: Case, reference: Any, target: Target) -> Seen:
    """Decode the case and compare."""
    seen, r = Seen(), random.Random(case.number)
    exact = case.dtype == "float32"
    if not exact and (why := target.scorer.why_not_bit_exact()) is not None:
        seen.refused[why] += 1
        return seen
    drafter, last = None, None
    for prompt, new in case.prompts:
        if (
            case.conversation and last is not None
        ):  # another turn, before which some of the last may have changed
            before = [*last.prompt, *last.result().token_ids]
            prompt = [*before[: r.choice((len(before), r.randrange(len(before) + 1)))], *prompt]
        limit = case.limit if case.kind in LLAMAS else target.scorer.context_limit
        if limit is not None and len(prompt) > limit:
            continue
        if exact and not case.top_k:
            expected = generated(reference, case, prompt, new)
        else:
            plain = replace(case, top_k=0)
            expected = list(decode(target, None, plain, prompt, new, ignore_eos=True).result().token_ids)
        end = r.choice(expected) if case.end_token and expected else None
        if end is not None and "min_new_tokens" in case.defaults and exact:
            expected = generated(reference, case, prompt, new, end)  # which forbids it for a while
        if limit is not None:
            expected = expected[: limit - len(prompt)]
        stop = choose_stop(r, case.tokenizer, expected) if case.stop_string else None
        expected = cut(case.tokenizer, expected, end, stop)
        target.language_model.end_ids = () if end is None else (end,)
        if drafter is None or case.drafter == "guesses":
            drafter = build_drafter(case, target, prompt, expected)
        if r.random() < 0.2:  # a run that nobody finishes
            abandoned = GenerationRun(
                prompt, target, drafter, policy=build_policy(case.rule), max_new_tokens=new
            )
            for _, _ in zip(range(r.randrange(3)), abandoned, strict=False):
                pass
        stops = () if stop is None else (stop,)
        last = decode(target, drafter, case, prompt, new, stop=stops)
        result = last.result()
        found = list(result.token_ids)
        seen.tokens += len(found)
        seen.accepted += sum(step.accepted for step in result.steps if isinstance(step, Step))
        if case.top_k:
            check_sampled(case, reference, prompt, found)
            if (
                case.kind in WHOLE
                and not case.rule.startswith(("auto", "egag"))
                and "keep" not in case.drafter
                and case.drafter != "guesses"
            ):
                again = decode(target, drafter, case, prompt, new, stop=stops).result().token_ids
                if list(again) != found:
                    raise WrongOutputError(f"{found} is not {list(again)} of the same seed")
            continue
        if found == expected:
            continue
        penalized = Sampling(repetition_penalty=case.penalty)
        difference = find_difference(target.scorer, prompt, found, expected, penalized)
        if exact and difference is not None and difference.numerical_tie:
            seen.ties += 1
            continue
        raise WrongOutputError(
            f"{found} is not {expected} ({difference}; end {end}, stop {stop!r}, {result.finish_reason})"
        )
    if exact and not case.top_k and case.drafter != "guesses" and not case.hook and drafter is not None:
        run_batch(case, reference, target, drafter, seen)
    return seen


def run_batch(case: Case, reference: Any, target: Target, drafter: Any, seen: Seen) -> None:
    """Decode every prompt twice, several at a time, and compare with `generate`."""
    r = random.Random(-1 - case.number)
    limit = case.limit if case.kind in LLAMAS else target.scorer.context_limit
    prompts = [each for each in 2 * case.prompts if limit is None or len(each[0]) <= limit]
    runs = [
        GenerationRun(
            prompt, target, drafter, policy=build_policy(case.rule), max_new_tokens=new, ignore_eos=True,
            sampling=Sampling(repetition_penalty=case.penalty), first_target=case.first_target,
        )
        for prompt, new in prompts
    ]  # fmt: skip
    batch, page = r.choice((2, 3, 8)), r.choice((None, 16, None))
    longest = max((len(prompt) + new for prompt, new in prompts), default=0) + 150  # with a draft
    few = page == 16 and r.random() < 0.5  # and requests are preempted
    many = GenerationRuns(runs, max_batch=batch, page=page, pool_tokens=longest if few else None)
    for (prompt, new), result in zip(prompts, many.results(), strict=True):
        if isinstance(result, Exception):
            raise result
        expected = generated(reference, case, prompt, new)[: None if limit is None else limit - len(prompt)]
        found = list(result.token_ids)
        seen.batched += 1
        if found == expected:
            continue
        difference = find_difference(
            target.scorer, prompt, found, expected, Sampling(repetition_penalty=case.penalty)
        )
        if difference is None or not difference.numerical_tie:
            raise WrongOutputError(f"in a batch: {found} is not {expected} ({difference})")
        seen.ties += 1


def run_distribution(number: int) -> Seen:
    """Enumerate a random output distribution of three tokens."""
    r = random.Random(number)
    scripted_drafters.draw_tables(number)
    word = r.choice([each.partition(":")[0] for each in distributions.POLICIES])
    policy = {
        "fixed": f"fixed:gamma={r.choice((1, 2, 3))}",
        "heuristic": f"heuristic:gamma={r.choice((1, 2))},max=2",
        "confidence": f"confidence:threshold={r.choice((0.2, 0.5, 0.8))},max=2",
        "static-tree": f"static-tree:nodes={r.choice((2, 3))},depth=2,ranks={r.choice(('50-40', '70-20', '40-30-20'))}",
        "dynamic-tree": f"dynamic-tree:top-k={r.choice((1, 2, 3))},nodes={r.choice((2, 3, 4))},depth=2",
    }.get(word, f"{word}:max=2")
    sampling = Sampling(
        temperature=r.choice((0.4, 1.0, 1.7)),
        top_k=r.choice((0, 0, 2)),
        top_p=r.choice((1.0, 1.0, 0.7)),
        min_p=r.choice((0.0, 0.0, 0.2)),
        repetition_penalty=r.choice((1.0, 1.0, 1.5)),
    )
    verification = r.choice(list(distributions.VERIFICATIONS))
    cell = distributions.Cell(verification, policy, r.choice(list(distributions.DRAFTERS)), sampling)
    try:
        gap = distributions.measure(cell)
    finally:
        scripted_drafters.draw_tables(0)
    if gap > distributions.TOLERANCE:
        raise WrongOutputError(f"{cell} is off by {gap:.2e}")
    return Seen(enumerated=1)


def check_sampled(case: Case, reference: Any, prompt: list[int], found: list[int]) -> None:
    """No token may lie outside the support of the target's distribution."""
    text = [*prompt, *found]
    bounded = case.kind in RECURRENT or bounds_prompts(reference.config.get_text_config(decoder=True))
    logits = one_by_one(reference, text, len(prompt)) if bounded else whole(reference, text)
    rows = logits[len(prompt) - 1 : -1] if found else []
    sampling = Sampling(temperature=0.0, repetition_penalty=case.penalty)
    for i, (row, token) in enumerate(zip(rows, found, strict=True)):
        scores = sampling.scores(row[None], [*prompt, *found[:i]])[0]
        least = scores.topk(case.top_k).values[-1]
        if scores[token] < least - 1e-3 * float(scores.std()):
            raise WrongOutputError(
                f"token {i} of {found} has no probability: {scores[token]:.4f} < {least:.4f}"
            )


def attempt(case: Case, work: Callable[[], Seen], findings: list[str]) -> Seen:
    """Run a case; a user error is a refusal, any other a finding."""
    try:
        return work()
    except SpecbenchError as error:
        seen = Seen()
        seen.refused[f"{error.message} {error.hint or ''}".strip()] += 1
        return seen
    except WrongOutputError as error:
        findings.append(f"{case}\n    {error}")
    except Exception:
        findings.append(f"{case}\n{traceback.format_exc()}")
    print("FINDING", findings[-1], flush=True)
    return Seen()


def prepare(case: Case) -> tuple[Any, Target]:
    try:
        reference = build_model(case)
        if case.kind in WHOLE:
            reference = generating(reference, [3, 4, 5])
    except Exception as error:
        if case.kind not in WHOLE:
            raise
        raise RunError(f"No small {case.kind} runs.") from error
    if case.hook is not None:
        steer(reference, case.hook)
    return reference, build_target(case)


def run_number(number: int, findings: list[str], models: str | None = None) -> list[Seen]:
    """Run a case, every eighth time three cases in three threads, or a distribution."""
    if number % 8 in (3, 6) and not models:
        return [attempt(Case(number), lambda: run_distribution(number), findings)]
    cases = [draw(number, models)]
    if number % 8 == 7:
        cases += [draw(1_000_000 + 2 * number, models), draw(1_000_001 + 2 * number, models)]
    with tempfile.TemporaryDirectory() as place:
        for case in cases:
            case.place = place
        return run_cases(cases, findings)


def run_cases(cases: Sequence[Case], findings: list[str]) -> list[Seen]:
    loaded: list[tuple[Case, Any]] = []
    seen = []
    for case in cases:  # models are made in turn, for their weights come from the one global generator
        pairs: list[Any] = []
        seen.append(
            attempt(case, lambda case=case, pairs=pairs: pairs.append(prepare(case)) or Seen(), findings)
        )
        loaded += [(case, pair) for pair in pairs]

    def one(case: Case, pair: tuple[Any, Target]) -> Seen:
        return attempt(case, lambda: run_case(case, *pair), findings)

    if len(loaded) == 1:
        return [*seen, one(*loaded[0])]
    with ThreadPoolExecutor(max(1, len(loaded))) as threads:
        return seen + list(threads.map(lambda each: one(*each), loaded))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="the most it takes")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, help="how many; one case is printed in full")
    parser.add_argument("--models", choices=("recurrent", "composite"), help="models of one sort only")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    until = time.monotonic() + 60 * given.minutes
    findings: list[str] = []
    total, refused, cases = Counter[str](), Counter[str](), 0
    for number in islice(count(given.seed), given.cases):
        if time.monotonic() > until:
            break
        if given.cases == 1:
            print(draw(number, given.models))
        for seen in run_number(number, findings, given.models):
            counts = vars(seen)
            refused.update(counts.pop("refused"))
            total.update(counts)
        cases += 1
    for message, times in refused.most_common():
        print(f"{times:6} refused: {message}")
    result = {
        "benchmark": "fuzz",
        "cases": cases,
        **total,
        "refused": refused.total(),
        "findings": len(findings),
    }
    print(json.dumps(result))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
