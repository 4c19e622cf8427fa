"""Plant known bugs, one at a time, and check that the test suite notices.

    python benchmarks/mutation.py              # all of them, a few minutes
    python benchmarks/mutation.py --fast       # the classical mistakes of speculative decoding; CI runs these
    python benchmarks/mutation.py stop residual    # those whose names contain a word

Each bug replaces one expression, or a few consecutive statements, of one function in a copy of the package, against
which the smallest fitting tests run. The place is compared as a syntax tree: formatting, comments and other functions
do not matter, and a function that moved is found by its name. Before that the same tests must pass on the unchanged
copy, and a change without effect must go unnoticed. Prints a table with the test that noticed; exit code 1 if a bug
survives or its place is not found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("specbench", "tests", "benchmarks", "prompts", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A bug to plant.

    Attributes:
        name: What is wrong with it.
        where: ``file:name``: a file of the package and the qualified name of the function, class or constant in it. If
            the file no longer defines that name, the only other file that does is taken.
        old: What to replace: Python source of one expression, or of statements in a row. Found there exactly once.
        new: What to put in its place; nothing removes the statements.
        tests: Arguments for pytest that select what should notice.
        fast: Whether CI plants it.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False


DECODE = ("tests/test_decode.py",)
MTP = ("tests/test_mtp.py",)
CHECKPOINT = ("tests/test_mtp_checkpoint.py",)
ACCEPT = ("tests/test_accept.py",)
EXACT = ("tests/test_exact.py::test_the_output_distribution_is_the_targets[model-multinomial]",)
STEP = ("tests/test_properties.py::test_a_step_emits_p_whatever_the_drafter",)
RANDOM = ("tests/test_properties.py", "-k", "random_number or no_say")
RECURRENT = ("tests/test_recurrent.py", "-k", "rollback or alone")
CATCH_UP = (
    "tests/test_properties.py::test_after_any_roll_back_the_logits_are_those_of_the_whole_context[full-dynamic]",
)
SAMPLING = ("tests/test_sampling.py",)
CACHES = ("tests/test_caches.py", "-k", "mistral or llama or gemma3")
STORE = ("tests/test_store.py",)
SIBLINGS = ("tests/test_siblings.py",)
GUESSES = ("tests/test_guesses.py", "-k", "those_without_guesses")
THEORY = ("tests/test_theory.py", "-k", "tree")
SCHEDULE = ("tests/test_schedule.py",)
CALIBRATED = ("tests/test_tree_calibration.py", "-k", "holds_for or rule_takes or faster")
BLOCKS = ("tests/test_pools.py", "-k", "whatever_others_do")
RAGGED = ("tests/test_batch.py::test_every_request_gets_the_rows_it_gets_alone[llama-slotted]",)
TREES = (
    "tests/test_distributions.py",
    "tests/test_trees.py",
    "-k",
    "(exact_or_refused and (traversal or recursive)) or keeps_what_it_has_read",
)
HEADS = ("tests/test_heads.py", "-k", "formula or every_draft")
DISTRIBUTIONS = ("tests/test_distributions.py", "-k", "exact_or_refused and specinfer")
BANNED = ("tests/test_distributions.py", "-k", "banned")
CONTROL = Mutant(
    "(nothing changed)",
    "decoding/verify.py:GreedyVerification.judge",
    "tokens = choices[:1]",
    "tokens = choices[:1]",
    ACCEPT,
    fast=True,
)

MUTANTS = (
    # -- the loop and its caches -----------------------------------------------------------------
    Mutant(
        "rollback keeps one token too many",
        "decoding/loop.py:decode",
        "target.rollback(len(context) - 1, verdict.path)",
        "target.rollback(len(context), verdict.path)",
        DECODE,
        fast=True,
    ),
    Mutant(
        "rollback removes one token too many",
        "decoding/loop.py:decode",
        "target.rollback(len(context) - 1, verdict.path)",
        "target.rollback(len(context) - 2, verdict.path)",
        DECODE,
    ),
    Mutant(
        "the drafter is not rolled back",
        "drafters/model.py:ModelDrafter.update",
        "self.scorer.rollback(self._own_length(len(outcome.context)) - 1, path)",
        "pass",
        DECODE,
    ),
    Mutant(
        "wrong guesses stay in the drafter's cache",
        "drafters/model.py:ModelDrafter._drop_guesses",
        "self.scorer.rollback(self._own_length(len(context)) + right)",
        "pass",
        GUESSES,
    ),
    Mutant(
        "the row after a guess serves another token",
        "drafters/guesses.py:Guesses.has_read",
        "known and self._read[:end] == drafted",
        "known",
        GUESSES,
    ),
    Mutant(
        "the drafter keeps what it drafted in a sibling's place",
        "drafters/model.py:ModelDrafter.update",
        "self.scorer.rollback(self._own_length(len(outcome.context)) - 1, path)",
        "self.scorer.rollback(self._own_length(len(outcome.context)) - 1)",
        SIBLINGS,
    ),
    Mutant(
        "a prompt's last row is computed along with the tree after it",
        "backends/torch/scorer.py:Scorer._feed_tree",
        "self.cache.length == 0 and self.cache.separate_prefill",
        "False",
        ("tests/test_bitexact.py", "-k", "tree_changes"),
    ),
    Mutant(
        "a name of a run is a format string of a figure",
        "show/plots/canvas.py:Series.name_at",
        '_joined(self.parts, f"γ = {row.config.gamma}")',
        '_joined(self.parts, "γ = {0}").format(row.config.gamma)',
        ("tests/test_security.py", "-k", "format_string"),
    ),
    Mutant(
        "specinfer tests what a draw has chosen before that draw",
        "decoding/verdicts.py:specinfer",
        "(draws or certain).pop(place)",
        "(certain or draws).pop(place if not certain else 0)",
        DISTRIBUTIONS,
    ),
    Mutant(
        "a drafter draws from what is banned",
        "decoding/sampling.py:Sampling.rules_out_all",
        "self.defaults is None and self.format is None",
        "True",
        BANNED,
    ),
    Mutant(
        "what was fetched for a suite is not checked",
        "bench/suites.py:_fetched",
        "hashlib.sha256(data).hexdigest() != suite.sha256",
        "False",
        ("tests/test_suites.py", "-k", "not_kept"),
        fast=True,
    ),
    Mutant(
        "a suite's limit takes categories, not tasks, in turn",
        "bench/suites.py:load_suites",
        "lambda prompt: tasks.get(prompt.category, prompt.category)",
        "lambda prompt: prompt.category",
        ("tests/test_suites.py", "-k", "as_many"),
    ),
    Mutant(
        "a format's state is not rolled back",
        "decoding/formats.py:Matcher._go",
        "self._matcher.rollback(len(path) - common)",
        "pass",
        ("tests/test_formats.py::test_a_rolled_back_matcher_gives_the_same_masks",),
    ),
    Mutant(
        "masks of a rejected draft are kept",
        "decoding/formats.py:Matcher._go",
        "{kept: mask for kept, mask in self._masks.items() if kept <= common}",
        "self._masks",
        ("tests/test_formats.py::test_a_rolled_back_matcher_gives_the_same_masks",),
    ),
    Mutant(
        "a text that looks like a special token is one",
        "decoding/formats.py:Matcher._as_text",
        "self._matcher.validate_tokens([token])",
        "True",
        ("tests/test_formats.py", "-k", "looks_like"),
    ),
    Mutant(
        "a brace in a string of a tool call's arguments counts",
        "serve/tools.py:CallParser._closes",
        "self._quoted = True",
        "pass",
        ("tests/test_tools.py", "-k", "are_split"),
    ),
    Mutant(
        "a required tool call is not bound to its schema",
        "serve/protocol.py:ChatRequest.call_grammar",
        'choice == "required"',
        "False",
        ("tests/test_tools.py", "-k", "required_calls"),
    ),
    Mutant(
        "the best token is taken whether the format allows it or not",
        "decoding/sampling.py:Sampling._choose_allowed",
        "not mask.allows(choices[row])",
        "False",
        ("tests/test_formats.py", "-k", "greedy_outputs"),
    ),
    Mutant(
        "outputs share the states of a format without end",
        "decoding/formats.py:CompiledFormat.matcher",
        "self.computed > _SHARED_MASKS",
        "False",
        ("tests/test_formats.py", "-k", "use_up"),
    ),
    Mutant(
        "forced tokens are stored with all accepted ones",
        "results/lines.py:StepLists.of",
        "step.forced_accepted",
        "step.accepted",
        ("tests/test_formats.py", "-k", "explained_apart"),
    ),
    Mutant(
        "draft policies see forced tokens",
        "decoding/records.py:Step.unforced",
        "not self.forced",
        "True",
        (
            "tests/test_formats.py::test_forced_tokens_come_in_one_pass_and_do_not_count_as_drafted_by_the_policy",
        ),
    ),
    Mutant(
        "a node of a tree is expected whether the one before it is kept or not",
        "decoding/theory.py:expected_tokens_of_tree",
        "before * rates[rank]",
        "rates[rank]",
        THEORY,
    ),
    Mutant(
        "a tree calibrated for other weights of a drafter is taken up",
        "models/calibrations.py:TreeKey.name",
        '[self.dtype, self.device, self.drafter, self.weights, f"{self.temperature:g}"]',
        '[self.dtype, self.device, self.drafter, f"{self.temperature:g}"]',
        CALIBRATED,
    ),
    Mutant(
        "ranks of the command line give way to calibrated ones",
        "models/calibrations.py:calibrated_tree",
        'policy.word != "static-tree" or "ranks" in policy.options',
        'policy.word != "static-tree"',
        CALIBRATED,
    ),
    Mutant(
        "a tree is chosen as if a drafter read all nodes of a depth for the price of one",
        "tune/ranks.py:best_tree",
        "(0, *read)",
        "[min(each, 1) for each in (0, *read)]",
        CALIBRATED,
    ),
    Mutant(
        "leaves of a tree count as nodes that a drafter reads",
        "decoding/theory.py:read_by_depth",
        "(depths[node] for node in set(parents) if node >= 0)",
        "(depths[node] for node in range(len(parents)))",
        THEORY,
    ),
    Mutant(
        "the entry of a sibling that was right stays where it is",
        "decoding/loop.py:decode",
        "target.rollback(len(context) - 1, verdict.path)",
        "target.rollback(len(context) - 1)",
        SIBLINGS,
    ),
    Mutant(
        "a sibling sees the draft next to it",
        "decoding/tree.py:_ancestors",
        "parent + 1",
        "row - 1",
        SIBLINGS,
    ),
    Mutant(
        "a sibling has the position after the draft next to it",
        "decoding/tree.py:tree_positions",
        "ancestors.sum(axis=1, dtype=np.int64)",
        "np.arange(1, len(ancestors) + 1)",
        SIBLINGS,
    ),
    Mutant(
        "the logits after another sibling are read",
        "decoding/verify.py:GreedyVerification.judge",
        "logits[node + 1 : node + 2]",
        "logits[node : node + 1]",
        SIBLINGS,
    ),
    Mutant(
        "a candidate keeps its share of q when it was drawn",
        "decoding/verdicts.py:_without",
        "rest[token] = 0.0",
        "",
        TREES,
    ),
    Mutant(
        "what is left of p is not made whole again",
        "decoding/verdicts.py:traverse.visit",
        "total / (total + 1.0 - chance)",
        "total",
        TREES,
    ),
    Mutant(
        "a drafter's best token is hidden from the next reader",
        "decoding/distributions.py:largest",
        "values[every, place] = value",
        "value = place",
        ("tests/test_trees.py", "-k", "largest"),
    ),
    Mutant(
        "a column that ties with the last one counted is left out",
        "decoding/distributions.py:_largest",
        "highest >= np.partition(highest, width - count)[width - count]",
        "highest > np.partition(highest, width - count)[width - count]",
        ("tests/test_trees.py", "-k", "largest"),
    ),
    Mutant(
        "a node of a tree is read at the place of the one before it",
        "drafters/model.py:ModelDrafter._frontier_logits",
        "{node: i for i, node in enumerate(self._read_nodes)}",
        "{node: i - 1 for i, node in enumerate(self._read_nodes)}",
        ("tests/test_trees.py", "-k", "greedy_outputs and dynamic"),
    ),
    Mutant(
        "a drafter keeps nodes that are not on the path",
        "drafters/model.py:ModelDrafter.update",
        "{node: i for i, node in enumerate(self._read_nodes)}",
        "{node: 0 for i, node in enumerate(self._read_nodes)}",
        TREES,
    ),
    Mutant(
        "the drafter does not catch up with what it was not fed",
        "backends/torch/scorer.py:Scorer._feed",
        "*context[start:]",
        "*context[max(start, len(context) - 1) :]",
        CATCH_UP,
        fast=True,
    ),
    Mutant(
        "residual without clamp",
        "decoding/verify.py:residual",
        "(p[i] - draft.q[i]).clamp_min_(0.0)",
        "p[i] - draft.q[i]",
        STEP,
        fast=True,
    ),
    Mutant(
        "p and q swapped in the residual",
        "decoding/verify.py:residual",
        "p[i] - draft.q[i]",
        "draft.q[i] - p[i]",
        ACCEPT,
        fast=True,
    ),
    Mutant(
        "p and q swapped in the acceptance",
        "decoding/verify.py:acceptance_probabilities",
        "p_of_token.div_(q_of_token.clamp_min_(_SMALLEST))",
        "q_of_token.div_(p_of_token.clamp_min_(_SMALLEST))",
        ACCEPT,
        fast=True,
    ),
    Mutant(
        "a stop inside the accepted run is ignored",
        "decoding/loop.py:decode",
        "emitted, reason = stops.cut(verdict.tokens)",
        "emitted, reason = len(verdict.tokens), stops.cut(verdict.tokens[-1:])[1]",
        DECODE,
        fast=True,
    ),
    Mutant(
        "a token of low confidence is thrown away",
        "drafters/model.py:ModelDrafter.propose",
        "drawn is None",
        "drawn is None or (drawn.q is not None and float(drawn.q[drawn.token]) < 0.2)",
        EXACT,
        fast=True,
    ),
    Mutant(
        "the numbers that tested the drafts are used again for the draw",
        "decoding/sampling.py:Randomness.test",
        "self.generator",
        "self.generator.clone_state()",
        RANDOM,
        fast=True,
    ),
    # -- acceptance ------------------------------------------------------------------------------
    Mutant(
        "the generator is seeded again for every draw",
        "decoding/sampling.py:Randomness.draw",
        "u = float(torch.rand(1, generator=self.generator, dtype=torch.float64))",
        "self.generator.manual_seed(0)\nu = float(torch.rand(1, generator=self.generator, dtype=torch.float64))",
        RANDOM,
    ),
    Mutant(
        "the rejected token is returned instead of the corrected one",
        "decoding/verify.py:GreedyVerification.judge",
        "Verdict(path, tokens)",
        "Verdict(path, [*tokens[:-1], (draft.tokens + tokens[-1:])[len(path)]])",
        DECODE,
        fast=True,
    ),
    Mutant(
        "drafts after a rejected one are kept",
        "decoding/sampling.py:Randomness.test",
        "next((i for i, chance in enumerate(chances) if not r[i] < chance), len(r))",
        "sum(r[i] < chance for i, chance in enumerate(chances))",
        SAMPLING,
    ),
    Mutant(
        "the bonus token comes from the row before",
        "decoding/verify.py:RejectionVerification.judge",
        "p[accepted]",
        "p[max(0, accepted - 1)]",
        EXACT,
        fast=True,
    ),
    Mutant(
        "a certain drafter's rejected token may come again",
        "decoding/verify.py:residual",
        "rest[draft.tokens[i]] = 0.0",
        "",
        ACCEPT,
    ),
    Mutant(
        "tokens drawn from another distribution than the q that is kept",
        "drafters/model.py:ModelDrafter.draw",
        "random.draw(q)",
        "random.draw(q * q)",
        EXACT,
    ),
    Mutant(
        "α of tokens that were not tested",
        "decoding/explain.py:step_of",
        'emitted if cut else accepted + (closing == "corrected")',
        "gamma",
        DECODE,
    ),
    Mutant(
        "a relaxed rule takes impossible tokens",
        "decoding/verdicts.py:best_taken",
        "best is None or not float(p[best]) > 0.0",
        "best is None",
        ("tests/test_relaxed.py", "-k", "takes"),
    ),
    Mutant(
        "a relaxed rule drops the draft where it takes none of its tokens",
        "decoding/verdicts.py:relaxed",
        "naive(p, candidates, random)",
        "naive(p, [], random)",
        ("tests/test_relaxed.py", "-k", "distribution"),
    ),
    Mutant(
        "outputs of a relaxed rule count as lossless",
        "decoding/request.py:DraftPlan.lossless",
        "self.relaxed is None",
        "True",
        ("tests/test_relaxed.py", "-k", "batch or generate"),
    ),
    # -- what a model's files ask for ------------------------------------------------------------
    Mutant(
        "a configuration chooses the attention",
        "models/checkpoints.py:_facts_alone",
        "key not in INNER_WORKINGS + OUTPUTS and not any(word in key for word in IMPLEMENTATIONS)",
        "key not in INNER_WORKINGS + OUTPUTS",
        ("tests/test_security.py", "-k", "choose_the_code"),
    ),
    Mutant(
        "a configuration gives the attention another name",
        "models/checkpoints.py:INNER_WORKINGS",
        '("attribute_map", "sub_configs", "configuration_files", "auto_map")',
        '("sub_configs", "configuration_files", "auto_map")',
        ("tests/test_security.py", "-k", "choose_the_code"),
    ),
    Mutant(
        "the context limit forgets a scaling",
        "models/load.py:_context_limit",
        "max([limit, *scaled])",
        "limit",
        ("tests/test_models.py", "-k", "scaling"),
    ),
    Mutant(
        "a model's own settings see the context before the drafts alone",
        "decoding/model_defaults.py:ContextRules.__call__",
        "before_drafts + place",
        "before_drafts",
        ("tests/test_model_defaults.py", "-k", "distributions"),
    ),
    Mutant(
        "the check's reference lacks the model's own settings",
        "check/reference.py:reference_output",
        '{**(context_rules or {}), "repetition_penalty": repetition_penalty}',
        '{"repetition_penalty": repetition_penalty}',
        ("tests/test_model_defaults.py", "-k", "reference"),
    ),
    Mutant(
        "siblings under transforms that look back",
        "decoding/loop.py:decode",
        "plan.siblings.max_count > 0 and verification.takes_trees and not sampling.context_dependent",
        "plan.siblings.max_count > 0 and verification.takes_trees",
        ("tests/test_model_defaults.py", "-k", "siblings"),
    ),
    # -- transforms ------------------------------------------------------------------------------
    Mutant(
        "the repetition penalty sees drafts that come later",
        "decoding/sampling.py:Sampling._penalize_seen",
        "[token for place, token in fresh if place < drafts]",
        "[token for place, token in fresh]",
        SAMPLING,
    ),
    Mutant(
        "the repetition penalty remembers another context",
        "decoding/sampling.py:_Seen.and_more",
        "not known or len(self.mask) != width or self.ids.device != scores.device",
        "len(self.mask) != width or self.ids.device != scores.device",
        ("tests/test_properties.py", "-k", "own_context"),
    ),
    Mutant(
        "top-k drops the last token it should keep",
        "decoding/sampling.py:_keep_top_k",
        "scores < smallest_kept",
        "scores <= smallest_kept",
        SAMPLING,
    ),
    Mutant(
        "a nucleus lacks its edge",
        "decoding/sampling.py:_keep_nucleus",
        "scores < edge",
        "scores <= edge",
        SAMPLING,
    ),
    Mutant(
        "min-p is taken of the mass instead of the largest",
        "decoding/sampling.py:_keep_min_p",
        "min_p * top",
        "min_p",
        SAMPLING,
    ),
    # -- ends and limits -------------------------------------------------------------------------
    Mutant(
        "one token more than requested",
        "decoding/loop.py:decode",
        "limit - position - 1",
        "limit - position",
        DECODE,
    ),
    Mutant(
        "accepted drafts after a stop are counted",
        "decoding/explain.py:step_of",
        "min(accepted, emitted)",
        "accepted",
        DECODE,
    ),
    Mutant(
        "the drafter goes beyond its own context",
        "drafters/model.py:ModelDrafter._room",
        "limit - self._length(context) + 1",
        "limit - self._length(context) + 2",
        DECODE,
    ),
    Mutant(
        "logits of a trimmed head stand in wrong places",
        "models/drafters.py:wrap_drafter",
        "torch.tensor(draftable)",
        "torch.tensor(draftable).flip(0)",
        ("tests/test_vocabulary.py",),
    ),
    Mutant(
        "a drafter with another tokenizer keeps what is spelled otherwise by now",
        "drafters/translate.py:TranslatingDrafter._common",
        "next((i for i in range(start, length) if ids[i] != self._fed[i]), length)",
        "length",
        ("tests/test_translate.py",),
    ),
    Mutant(
        "the chat template's end of turn is no end",
        "models/tokenizers.py:end_ids_of",
        "[tokenizer.eos_token_id, end_of_turn(tokenizer)]",
        "[tokenizer.eos_token_id]",
        ("tests/test_models.py", "-k", "end_ids"),
    ),
    Mutant(
        "a special token is no stop string",
        "decoding/stops.py:StopRules.cut",
        "token in self._stop_ids",
        "False",
        ("tests/test_text.py", "-k", "special_token"),
    ),
    Mutant(
        "bytes are shown before their run has ended",
        "decoding/stops.py:TextStream.push",
        "byte is not None",
        "False",
        ("tests/test_text.py", "-k", "decoded_text"),
    ),
    Mutant(
        "the beginning of a stop string is shown",
        "decoding/stops.py:TextStream._release",
        "len(self._decoded) - self._possible_stop()",
        "len(self._decoded)",
        ("tests/test_text.py", "-k", "held_back"),
    ),
    Mutant(
        "a chat prompt gets a second BOS",
        "generate.py:encode_messages",
        "tokenizer(_encodable(text), add_special_tokens=False)",
        "tokenizer(_encodable(text), add_special_tokens=True)",
        ("tests/test_properties.py", "-k", "chat_prompt"),
    ),
    # -- caches ----------------------------------------------------------------------------------
    Mutant(
        "a self-drafter leaves its keys in the target's cache",
        "drafters/model.py:SelfDrafter.drafting",
        "self.scorer.rollback(verified)",
        "pass",
        DECODE,
    ),
    Mutant(
        "sliding layers do not record their past",
        "backends/torch/caches.py:DynamicKVCache.after_forward",
        "self._cache.activate_past_recording()",
        "",
        CACHES,
    ),
    Mutant(
        "sliding layers are not cropped when nothing is removed",
        "backends/torch/caches.py:DynamicKVCache._rollback_sliding",
        "_crop_attention(layer, surplus)",
        "if surplus:\n    _crop_attention(layer, surplus)",
        CACHES,
    ),
    Mutant(
        "recurrent states are not rolled back",
        "backends/torch/caches.py:DynamicKVCache.rollback",
        "self._recurrent.rollback(length)",
        "pass",
        RECURRENT,
    ),
    Mutant(
        "a recurrent state that is still kept is overwritten",
        "backends/torch/recurrent.py:_mamba2_step",
        "state.clone()",
        "state",
        RECURRENT,
    ),
    Mutant(
        "a state that is still kept is written over",
        "backends/torch/recurrent_cache.py:History.rollback",
        "state is not kept and state.is_contiguous()",
        "state.is_contiguous()",
        RECURRENT,
    ),
    Mutant(
        "the native delta rule reads its inputs in another order",
        "backends/torch/kernels/delta_rule.py:delta_rule",
        "each.float().contiguous()",
        "each.float()",
        RECURRENT,
    ),
    Mutant(
        "states that Mamba 2 gets from the chunked function are not turned for the native call",
        "backends/torch/recurrent.py:_run_request",
        "last.mT if turns else last",
        "last",
        RECURRENT,
    ),
    Mutant(
        "a prefix is shared whose end has no checkpoint",
        "backends/torch/blocks.py:BlockAllocator.share_checkpoint",
        "self.truncate(table, length)",
        "pass",
        ("tests/test_recurrent.py", "-k", "paged"),
    ),
    Mutant(
        "a rollback leaves the inputs of the convolution",
        "backends/torch/recurrent_cache.py:History.rollback",
        "end = self.columns.shape[-1] - surplus",
        "end = self.columns.shape[-1]",
        RECURRENT,
    ),
    Mutant(
        "a joint pass continues the first request's recurrence for all",
        "backends/torch/recurrent.py:_run",
        "_run_request(several, recurrence, single, part, history)",
        "_run_request(several, recurrence, single, part, histories[0])",
        RECURRENT,
    ),
    Mutant(
        "the preallocated window lacks a position",
        "backends/torch/cache_layers.py:PreallocatedSlidingLayer.update",
        "self.sliding_window - 1",
        "self.sliding_window - 2",
        CACHES,
    ),
    Mutant(
        "the preallocated cache keeps one position more",
        "backends/torch/cache_layers.py:PreallocatedLayer.rollback",
        "max(length, 0)",
        "max(length, 0) + 1",
        CACHES,
    ),
    Mutant(
        "native passes write where keys and values were",
        "backends/torch/cache_layers.py:LayerGroup.extend",
        "layer.used + dropped != length or layer.keys is not keys",
        "layer.used + dropped != length",
        ("tests/test_native.py", "-k", "in_between"),
    ),
    Mutant(
        "native passes attend to what is behind a window",
        "backends/torch/kernels/decoder_parts.py:_window_of",
        'types[index] == "sliding_attention"',
        "False",
        ("tests/test_native_families.py", "-k", "greedy"),
    ),
    Mutant(
        "windows are not tried",
        "backends/torch/trials.py:_with_short_windows",
        "not windows - {None}",
        "True",
        ("tests/test_native_families.py", "-k", "read_wrongly"),
    ),
    Mutant(
        "the prompt and drafts of a first pass go in together",
        "backends/torch/caches.py:DynamicKVCache.reset",
        "any(drops_positions(layer) for layer in self._cache.layers)",
        "False",
        CACHES,
    ),
    Mutant(
        "a draft may be longer than what a window's cache takes back",
        "decoding/records.py:LONGEST_DRAFT",
        "256",
        "320",
        ("tests/test_caches.py", "-k", "longest_draft"),
    ),
    Mutant(
        "what was no number stays in the cache",
        "backends/torch/cache_layers.py:zero_nonfinite",
        "if not used.sum().isfinite(): used.zero_()",
        "used.sum()",
        ("tests/test_caches.py", "-k", "spoils"),
    ),
    Mutant(
        "short passes get no mask",
        "backends/torch/kernels/attention.py:_folded_rows",
        "scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)",
        "scaled_dot_product_attention(folded, key, value, attn_mask=torch.zeros_like(mask), scale=scale)",
        ("tests/test_attention.py",),
    ),
    Mutant(
        "the last token of a block of keys takes another path than its neighbors",
        "backends/torch/kernels/attention.py:attend",
        "masks is None and key.shape[2] % KEY_BLOCK == 0",
        "False",
        ("tests/test_bitexact.py", "-k", "edge"),
    ),
    Mutant(
        "an int8 target gets passes that depend on their width",
        "models/target.py:default_cache",
        'return "preallocated"',
        'return "dynamic"',
        ("tests/test_bitexact.py", "-k", "int8"),
    ),
    Mutant(
        "ties of an int8 target are counted in units of the logits' own dtype",
        "backends/torch/parity.py:find_difference",
        "target.rounding",
        "logits.dtype",
        ("tests/test_check.py", "-k", "tie_needs"),
    ),
    Mutant(
        "a single row in half precision is taken at its word",
        "backends/torch/kernels/linear.py:_single_rows_differ",
        "if dtype != torch.float32: return True",
        "",
        ("tests/test_bitexact.py", "-k", "half_precision"),
    ),
    Mutant(
        "threads take each other's masks",
        "backends/torch/kernels/attention.py:_masks_of_pass",
        "last = _last_masks.value = (mask, groups, dtype, fold_mask(mask, groups, dtype))",
        "globals().update(_shared=(mask, groups, dtype, fold_mask(mask, groups, dtype)))\n"
        'last = globals()["_shared"]',
        ("tests/test_attention.py", "-k", "thread"),
    ),
    Mutant(
        "short passes pass hooks by",
        "backends/torch/kernels/surgery.py:Hooks.are_present",
        "self._hooks",
        "()",
        ("tests/test_fused_forward.py", "-k", "hooks_are_called"),
    ),
    Mutant(
        "joined layers read what they read before a hook changed it",
        "backends/torch/kernels/surgery.py:_MergedProduct.part",
        "self.hooks.are_present()",
        "False",
        ("tests/test_fused_forward.py", "-k", "negate"),
    ),
    Mutant(
        "short passes keep a norm's old weights",
        "backends/torch/forward.py:_PartsLookup.__call__",
        "parts is None or parts.context() is not context",
        "parts is None",
        ("tests/test_fused_forward.py", "-k", "stale"),
    ),
    Mutant(
        "a paused run continues on another one's context",
        "decoding/loop.py:decode",
        "(target.epoch, drafter.epoch) != begun",
        "False",
        ("tests/test_decode.py", "-k", "paused"),
    ),
    Mutant(
        "packed weights are not saved",
        "backends/torch/kernels/linear.py:PackedLinear._save_to_state_dict",
        'destination[prefix + "weight"] = self.weight',
        "pass",
        ("tests/test_packing.py", "-k", "saved"),
    ),
    Mutant(
        "padding of the vocabulary can be drawn",
        "backends/torch/scorer.py:FittedLogits.__call__",
        'float("-inf")',
        "0.0",
        ("tests/test_caches.py", "-k", "padded"),
    ),
    # -- drafters and rules ----------------------------------------------------------------------
    Mutant(
        "of equally frequent tokens the first seen is taken",
        "drafters/ngram.py:_Continuations.add",
        "count >= self.counts[self._best]",
        "count > self.counts[self._best]",
        ("tests/test_ngram.py",),
    ),
    Mutant(
        "n-gram counts leak into the next prompt",
        "drafters/ngram.py:NGramDrafter.begin",
        "self._continuations.clear()",
        "",
        ("tests/test_ngram.py",),
    ),
    Mutant(
        "the lookup's places leak into the next prompt",
        "drafters/lookup.py:LookupDrafter.begin",
        "self._earlier.clear()",
        "",
        ("tests/test_lookup.py",),
    ),
    Mutant(
        "a draft policy's state leaks into the next prompt",
        "decoding/loop.py:decode",
        "policy.reset()",
        "pass",
        DECODE,
    ),
    Mutant(
        "the heuristic counts what a stop has hidden",
        "policies/outcomes.py:HeuristicLength.observe",
        "step.gamma == 0 or step.closing is None",
        "step.gamma == 0",
        ("tests/test_policies.py", "-k", "heuristic"),
    ),
    # -- results ---------------------------------------------------------------------------------
    Mutant(
        "half a line stays when a write fails",
        "results/store.py:_append",
        "os.ftruncate(file, before)",
        "pass",
        STORE,
    ),
    Mutant(
        "half a line is taken for a whole one",
        "results/store.py:_end_last_line",
        "parse(data[start:]) is not None",
        "data[start:]",
        STORE,
    ),
    Mutant(
        "an old trace is emptied before there is a new one",
        "cli/watchers.py:_open_as_it_is",
        "flags & ~os.O_TRUNC",
        "flags",
        ("tests/test_cli.py", "-k", "refused_command_leaves"),
    ),
    Mutant(
        "the end of a longer trace remains after a new one",
        "cli/watchers.py:TraceOutput._keep",
        "file.truncate()",
        "pass",
        ("tests/test_cli.py", "-k", "longer_one"),
    ),
    Mutant(
        "a run.json of any types is taken",
        "results/store.py:read_run",
        "msgspec.json.decode(text, type=Run)",
        "Run(**msgspec.json.decode(text))",
        ("tests/test_ill_typed.py", "-k", "fields"),
    ),
    Mutant(
        "a run continues with longer outputs",
        "bench/manifest.py:changes",
        "stored != value",
        "False",
        ("tests/test_cli_sweep.py", "-k", "incomparable"),
    ),
    Mutant(
        "a run is overwritten",
        "results/store.py:RunStore.check_empty",
        "cls.exists(path)",
        "False",
        STORE,
    ),
    Mutant(
        "a configuration may say anything of layers and windows",
        "models/checkpoints.py:read_any_config",
        "msgspec.convert(read, _Facts)",
        "None",
        ("tests/test_ill_typed.py", "-k", "fields_of_a_model"),
    ),
    Mutant(
        "a self drafter is taken for another target",
        "generate.py:_check_drafter",
        "model.scorer.cache is not target.scorer.cache",
        "False",
        ("tests/test_decode.py", "-k", "belongs"),
    ),
    # -- security --------------------------------------------------------------------------------
    Mutant(
        "formulas get into the CSV",
        "results/store.py:_no_formula",
        "if not isinstance(value, str): return value",
        "return value",
        STORE,
    ),
    Mutant(
        "files are written through links",
        "base/files.py:refuse_link",
        "path.is_symlink()",
        "False",
        ("tests/test_security.py", "-k", "link"),
    ),
    Mutant(
        "the name of an unfinished file can be foretold",
        "base/files.py:write_bytes",
        'f".{path.name}.{secrets.token_hex(8)}.partial"',
        'f".{path.name}.partial"',
        ("tests/test_security.py", "-k", "prepared"),
    ),
    Mutant(
        "C1 controls reach the terminal",
        "base/textsafe.py:_CONTROLS",
        're.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")',
        're.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\u202a-\\u202e\\u2066-\\u2069]")',
        ("tests/test_textsafe.py",),
    ),
    Mutant(
        "an index may name weights outside its folder",
        "models/checkpoints.py:plain_name",
        'not file or path.is_absolute() or ".." in path.parts or ":" in file or "\\0" in file',
        'not file or path.is_absolute()  or ":" in file or "\\0" in file',
        ("tests/test_models.py", "tests/test_security.py", "-k", "outside or leave"),
    ),
    Mutant(
        "a built-in model's hash is not looked at",
        "models/builtin.py:fetch_builtin",
        "sha256(gguf) != model.gguf_sha256",
        "not sha256(gguf)",
        ("tests/test_builtin.py", "-k", "wrong_hash"),
    ),
    Mutant(
        "a damaged file of the hub's cache is taken",
        "models/hub.py:HubModel._is_sound",
        "return blob.name in _hashes(blob, size, self._report)",
        "pass",
        ("tests/test_security.py", "-k", "hub"),
    ),
    Mutant(
        "a model's own code is run",
        "models/load.py:_read_weights",
        "loader.from_pretrained(str(folder), config=config, dtype=dtype, device_map=placement, "
        "use_safetensors=safetensors, trust_remote_code=False, local_files_only=True, output_loading_info=True)",
        "loader.from_pretrained(str(folder), config=config, dtype=dtype, device_map=placement, "
        "use_safetensors=safetensors, trust_remote_code=True, local_files_only=True, output_loading_info=True)",
        ("tests/test_security.py",),
    ),
    Mutant(
        "pickled weights are loaded unasked",
        "models/checkpoints.py:weight_candidates",
        '["pytorch_model.bin", "pytorch_model.bin.index.json"] if allow_pickle else []',
        '["pytorch_model.bin", "pytorch_model.bin.index.json"] if True else []',
        ("tests/test_models.py", "-k", "pickled"),
    ),
    # -- many requests ------------------------------------------------------------------------------
    Mutant(
        "a request that was put back drafts on without the target's keys",
        "decoding/schedule.py:_Job.due",
        "self.pending.scorer is not target and target.cached_len < self.verified",
        "False",
        SCHEDULE,
    ),
    Mutant(
        "hidden states of a prompt's first parts are lost",
        "decoding/schedule.py:_Job.with_states",
        "output._replace(hidden=torch.cat(states))",
        "output",
        SCHEDULE,
    ),
    Mutant(
        "requests of a batch share what a policy has learned",
        "generate.py:GenerationRun.as_request",
        "DraftPlan.of(self.policy).fork()",
        "DraftPlan.of(self.policy)",
        ("tests/test_generate_many.py", "-k", "rules_learn"),
    ),
    Mutant(
        "passes do not wait for those who draft",
        "decoding/schedule.py:Scheduler._chosen",
        "[job for job in self._active if job.drafts] or candidates",
        "candidates",
        SCHEDULE,
    ),
    Mutant(
        "a drafter that reads a long prompt holds the others up",
        "decoding/schedule.py:Scheduler._make",
        "job.since, job.reading = self._passes, True",
        "job.since = self._passes",
        SCHEDULE,
    ),
    Mutant(
        "memory of a request that has ended stays taken",
        "decoding/schedule.py:Scheduler._end",
        "with suppress(Exception): scorer.rollback(0)",
        "pass",
        SCHEDULE,
    ),
    Mutant(
        "a request writes into blocks that others share",
        "backends/torch/blocks.py:BlockAllocator.extend",
        "shared = [i for i in written if self._holders[blocks[i]] > 1]",
        "shared: list[int] = []",
        BLOCKS,
    ),
    Mutant(
        "a request that is rolled back keeps a block too many",
        "backends/torch/blocks.py:BlockAllocator.truncate",
        "-(-length // self.size)",
        "length // self.size + 1",
        BLOCKS,
    ),
    Mutant(
        "blocks are shared whatever precedes them",
        "backends/torch/blocks.py:BlockAllocator._digest",
        "before + part.tobytes()",
        "part.tobytes()",
        BLOCKS,
    ),
    Mutant(
        "a request sees what lies behind its own rows",
        "backends/torch/pools.py:BatchedCache._joint_span",
        "mask[i, 0, :count, : part.end - first] = _seen(part, first, part.end, window)",
        "mask[i, 0, :count] = True",
        RAGGED,
    ),
    Mutant(
        "rows go back in the order of the pool",
        "backends/torch/batch.py:BatchedModel.score",
        "given[i]",
        "given[order[i]]",
        RAGGED,
    ),
    Mutant(
        "what a cheaper form has read passes for the target's own",
        "backends/torch/scorer.py:Scorer.mark_read",
        "isinstance(self.cache, PooledCache) and self._owns_pooled",
        "isinstance(self.cache, PooledCache)",
        ("tests/test_pools.py", "-k", "cheaper_form"),
    ),
    # -- configurations and exports ---------------------------------------------------------------
    Mutant(
        "a rule of the configuration outlives its drafter",
        "cli/config.py:_left",
        '{*_RULE, "drafter_dtype"}',
        '{"drafter_dtype"}',
        ("tests/test_config.py", "-k", "command_line_wins"),
    ),
    Mutant(
        "SGLang verifies one token too few",
        "export/sglang.py:SGLang.fill",
        "setting.gamma + 1",
        "setting.gamma",
        ("tests/test_export.py", "-k", "on_every_engine"),
    ),
    Mutant(
        "an exported assistant stops at a threshold of its own",
        "export/transformers.py:_drafting",
        'setting.gamma, "constant", 0.0',
        'setting.gamma, "constant", 0.4',
        ("tests/test_export.py", "-k", "same_tokens and big"),
    ),
    # -- tuning ------------------------------------------------------------------------------------
    Mutant(
        "a server outlives a specbench that was killed",
        "bench/engines/guard.py:main",
        "ready and not os.read(0, 1024)",
        "False",
        ("tests/test_started.py", "-k", "after_a_kill"),
    ),
    Mutant(
        "servers measured later are not compared with plain decoding beside them",
        "tune/engine_search.py:EngineSearch._measure_chunk",
        "timing.seconds / slower",
        "timing.seconds * slower",
        ("tests/test_started.py", "-k", "groups_are_compared"),
    ),
    Mutant(
        "shorter drafts of an engine are predicted to accept what longer ones do",
        "tune/engine_search.py:predict",
        "sum(rates[: setting.gamma])",
        "sum(rates)",
        ("tests/test_started.py", "-k", "predicted_from_two"),
    ),
    Mutant(
        "a conversation gets another first line in each turn",
        "bench/grid.py:Sweep._cells",
        "options.prompt_cache == 'keep'",
        "False",
        ("tests/test_conversations.py", "-k", "one_first_line"),
    ),
    Mutant(
        "vllm bench serve's times between chunks are taken for those of tokens",
        "results/others.py:_vllm",
        "'tpot'",
        "'itl'",
        ("tests/test_others.py", "-k", "one_name"),
    ),
    Mutant(
        "doctor says nothing of what it had no time for",
        "doctor/findings.py:verdict_of",
        "_not_examined(seen)",
        "[]",
        ("tests/test_doctor.py", "-k", "how_little"),
    ),
    Mutant(
        "a race drops slower candidates, sure or not",
        "tune/race.py:Race.upper_bound",
        "self._log_bound(name, over, self.level)",
        "self._log_ratio(name, over)",
        ("tests/test_race.py", "-k", "wrong_no_oftener"),
    ),
    Mutant(
        "all looks of a race spend as much as the last",
        "tune/race.py:Race.look",
        "self._share if last else self._share / self._looks",
        "self._share",
        ("tests/test_race.py", "-k", "spend_no_more"),
    ),
    Mutant(
        "machine load counts as the generation's own slowness",
        "tune/race.py:Race._differences",
        "speed + correction",
        "speed",
        ("tests/test_race.py", "-k", "thought_slow"),
    ),
    Mutant(
        "who rests never comes back to a race",
        "tune/race.py:Race.look",
        "name not in self.eliminated or self.eliminated[name].bound is not None",
        "name not in self.eliminated",
        ("tests/test_race.py", "-k", "measured_again"),
    ),
    Mutant(
        "a race is decided while others may be much faster",
        "tune/race.py:Race.look",
        'self.verdict != "open" and not self.open',
        'self.verdict != "open"',
        ("tests/test_race.py", "-k", "wrong_no_oftener"),
    ),
    Mutant(
        "drafting costs nothing where requests share passes",
        "tune/candidates.py:batch_ratio",
        "passes * costs.drafter_s[drafter][batch] + costs.target_pass_s(batch, mean_rows(generations))",
        "costs.target_pass_s(batch, mean_rows(generations))",
        ("tests/test_tune.py", "-k", "predicted_from_its_steps_and_shared"),
    ),
    Mutant(
        "a resumed search measures everything again",
        "tune/search.py:StoredSearch._measure",
        "cell.key not in self._stored",
        "cell.key not in self._stored or not cell.warmup",
        ("tests/test_tune.py", "-k", "nothing_is_measured_again"),
    ),
    # -- trained heads ---------------------------------------------------------------------------
    Mutant(
        "states of drafts off the path are handed on",
        "decoding/loop.py:_along",
        "hidden[[*range(before), *(before + node for node in path)]]",
        "hidden[: before + len(path)]",
        HEADS,
    ),
    Mutant(
        "the bias of DSpark is that of the token before the last",
        "backends/torch/block_scorers.py:_paths",
        "[*found[parent + 1], token]",
        "[*found[parent + 1], found[parent + 1][-1]]",
        ("tests/test_block_heads.py", "-k", "dspark"),
    ),
    Mutant(
        "a draft goes on although it will hardly be accepted",
        "policies/confidence_head.py:ConfidenceHeadLength.num_children",
        "self._survival >= self.threshold",
        "self._survival >= 0",
        ("tests/test_block_heads.py", "-k", "threshold"),
    ),
    Mutant(
        "a block in training sees the state of its own first token",
        "train/block_students.py:DFlashStudent.forward",
        "BlockAttention(each, starts + 1)",
        "BlockAttention(each, starts + 2)",
        ("tests/test_train.py", "-k", "losses_are"),
    ),
    Mutant(
        "DSpark's bias learns from the last part of a batch alone",
        "train/students.py:_SoftCrossEntropy.forward",
        "gradients[2] += difference.T @ inputs[part].to(head.dtype)",
        "gradients[2] = difference.T @ inputs[part].to(head.dtype)",
        ("tests/test_train.py", "-k", "a_bias_learns"),
    ),
    Mutant(
        "Gemma 4's assistant sees a position more than its window",
        "backends/torch/assistant.py:shared_layers",
        "text.sliding_window - 1",
        "text.sliding_window",
        ("tests/test_assistant.py", "-k", "chain"),
    ),
    Mutant(
        "Gemma 4's assistant drafts from a cache that is to be read again",
        "backends/torch/assistant.py:AssistantScorer._is_cached",
        "self.target_cache.length == len(context) - 1",
        "True",
        ("tests/test_assistant.py", "-k", "read_again"),
    ),
    Mutant(
        "Gemma 4 reads only the last tokens of a prompt in layers that share keys",
        "backends/torch/forward.py:HFForward._kept_logits",
        "rows == 1",
        "rows",
        ("tests/test_zoo.py", "-k", "gemma4-pairs"),
    ),
    Mutant(
        "an MTP layer reads the hidden state where the embedding belongs",
        "backends/torch/mtp.py:MtpLayer.read",
        "joined[::-1] if self._hidden_first else joined",
        "joined if self._hidden_first else joined[::-1]",
        MTP,
    ),
    Mutant(
        "an MTP layer drafts after the output of the layer before at the token before",
        "backends/torch/mtp_scorer.py:MtpScorer._run",
        "known[base] if parents[node] < 0 else self._outputs[layer - 1][parents[node]]",
        "known[max(0, base - 1)] if parents[node] < 0 else self._outputs[layer - 1][parents[node]]",
        MTP,
    ),
    Mutant(
        "the window of an MTP layer is one position too wide",
        "backends/torch/head_forward.py:_span",
        "torch.as_tensor(given.positions, device=device) - window",
        "torch.as_tensor(given.positions, device=device) - window - 1",
        MTP,
    ),
    Mutant(
        "an MTP layer in training does not begin as the target's last one",
        "train/mtp_student.py:MtpStudent._make",
        "_layer_of_target(model)",
        "(None, None)",
        ("tests/test_train.py", "-k", "an_mtp_layer"),
    ),
    Mutant(
        "an MTP layer's attention has a larger sink than it was trained with",
        "backends/torch/head_forward.py:_attend_with_sinks",
        "sinks[:, None, None]",
        "sinks[:, None, None] + 9",
        MTP,
    ),
    Mutant(
        "layers that are not chained read a draft token with the first one's state",
        "backends/torch/mtp_scorer.py:MtpScorer._run",
        "known[base + len(_branch(node, parents)) - 1]",
        "known[base]",
        MTP,
    ),
    Mutant(
        "a checkpoint keeps the target's own MTP layer beside a trained one",
        "models/mtp_checkpoint.py:_copy_weights",
        "layout.match(name, layers) is None",
        "True",
        CHECKPOINT,
    ),
    Mutant(
        "experts of a trained MTP layer are stored as its module has them",
        "models/mtp_checkpoint.py:_layer_tensors",
        "stored_layer(config, block)",
        "block",
        CHECKPOINT,
    ),
    Mutant(
        "the layer that a checkpoint has does not draft by default",
        "cli/options.py:default_drafter",
        "has_mtp_layers(models.parse_model(target))",
        "False",
        MTP,
    ),
    Mutant(
        "a head continues from keys of its own drafts",
        "backends/torch/head_scorers.py:EagleScorer._drop_drafts",
        "cache.rollback(self._read)",
        "pass",
        HEADS,
    ),
    Mutant(
        "a token goes with the state at its own position",
        "backends/torch/head_scorers.py:EagleScorer.take_states",
        "states[-fresh:]",
        "states[-fresh:].roll(-1, 0)",
        HEADS,
    ),
    Mutant(
        "a node goes with the output before its parent",
        "backends/torch/head_scorers.py:EagleScorer._read_draft",
        "parents[node] + 1",
        "max(0, parents[node])",
        HEADS,
    ),
    Mutant(
        "SpecForge's layers are taken for vLLM's",
        "models/head_files.py:HeadFiles.layers",
        '[each + 1 for each in _whole_numbers(nested["eagle_aux_hidden_state_layer_ids"], self.name)]',
        '_whole_numbers(nested["eagle_aux_hidden_state_layer_ids"], self.name)',
        HEADS,
    ),
    Mutant(
        "a pass with hidden states is no native one",
        "backends/torch/forward.py:NativeForward._run",
        "self._lookup(cache)",
        "None if layers else self._lookup(cache)",
        ("tests/test_bitexact.py", "-k", "states or twice"),
    ),
    Mutant(
        "a layer named twice gives the states of another one",
        "backends/torch/forward.py:Forward.run",
        "[once.index(layer) for layer in layers]",
        "[min(i, len(once) - 1) for i in range(len(layers))]",
        ("tests/test_native.py", "-k", "hidden_states"),
    ),
    Mutant(
        "the trial of passes of every width asks for no hidden states",
        "backends/torch/trials.py:_WIDTHS_WITH_STATES",
        "(1, 5, 32)",
        "()",
        ("tests/test_bitexact.py", "-k", "trial"),
    ),
    Mutant(
        "hidden states of another shape are taken for a head's",
        "models/drafters.py:require_states",
        "hidden.shape == (len(tokens), len(layers), width)",
        "hidden.shape[-1] == width",
        ("tests/test_heads.py", "-k", "shape"),
    ),
    Mutant(
        "a pass that fails fails all who took part",
        "decoding/schedule.py:Scheduler._make",
        "for each in parts:\n    self._make([each], events)",
        "for job, _ in parts: self._fail(job, error, events)",
        ("tests/test_schedule.py", "-k", "breaks or raises"),
    ),
    Mutant(
        "states that cannot be joined end all requests",
        "decoding/schedule.py:Scheduler._make",
        "rows = job.with_states(rows)",
        "pass",
        ("tests/test_schedule.py", "-k", "states"),
    ),
    Mutant(
        "a request that cannot be preempted ends the one that needed memory",
        "decoding/schedule.py:Scheduler._preempt",
        "self._fail(job, error, events)\nreturn",
        "raise error",
        ("tests/test_schedule.py", "-k", "put_back"),
    ),
    Mutant(
        "a context of a head counts as read though its pass has failed",
        "backends/torch/head_scorers.py:EagleScorer._read_context",
        "found = yield self._input(ids, self.head.fuse(states), range(past, past + len(ids)), None, 1)",
        "self._mark_read(context, states)\n"
        "found = yield self._input(ids, self.head.fuse(states), range(past, past + len(ids)), None, 1)",
        ("tests/test_heads.py", "-k", "shared_pass_that_fails"),
    ),
    Mutant(
        "a consumer that fails ends the engine",
        "serve/engine.py:Engine._step",
        'try:\n    job.deliver(event)\nexcept Exception:\n    self._end(job, "failed")\n    continue',
        'try:\n    job.deliver(event)\nexcept KeyError:\n    self._end(job, "failed")\n    continue',
        ("tests/test_serve.py", "-k", "consumer_that_fails"),
    ),
    Mutant(
        "a wide tree is read in one pass whatever its bits",
        "backends/torch/scorer.py:Scorer._feed_tree",
        "self.cache.max_exact_tokens or len(fed)",
        "len(fed)",
        ("tests/test_bitexact.py", "-k", "tree"),
    ),
    Mutant(
        "each token's experts are counted, also those that another token chose",
        "backends/torch/experts.py:ExpertChoices._count",
        "seen.scatter_(1, ids.flatten(1), True)[:, :none].sum(dim=1)",
        "(ids < none).sum(dim=(1, 2))",
        ("tests/test_experts.py", "-k", "routers"),
    ),
    Mutant(
        "auto takes each pass to have read the expected experts",
        "policies/width_times.py:WidthTimes.add",
        "experts - 1.0",
        "self._place(n)",
        ("tests/test_policies.py", "-k", "time_of_a_pass_follows"),
    ),
    Mutant(
        "tokens that follow are taken to read no more experts",
        "policies/width_times.py:_series",
        "(1.0 - ratio**n) / (1.0 - ratio)",
        "1.0",
        ("tests/test_policies.py", "-k", "experts_of_unseen"),
    ),
    Mutant(
        "predictions are of the timed passes' experts",
        "decoding/theory.py:PassCosts.reading",
        "ratio - self.experts[n]",
        "0.0",
        ("tests/test_theory.py", "-k", "experts"),
    ),
    Mutant(
        "a request's step counts the experts of the whole batch",
        "backends/torch/batch.py:BatchedModel.score",
        "choices.read(fed[i], whole.total)",
        "choices.read(slice(None), whole.total)",
        ("tests/test_experts.py", "-k", "batches"),
    ),
    Mutant(
        "a pass in which nobody drafted divides by none",
        "policies/batch_costs.py:RequestCosts.verify_s",
        "max(0, batch_costs.drafters - (self._rows > 1)) + 1",
        "batch_costs.drafters - (self._rows > 1) + 1",
        ("tests/test_batch_costs.py", "-k", "catches_up"),
    ),
    Mutant(
        "what drafts cost long ago is believed forever",
        "policies/batch_costs.py:BatchCosts.observe",
        "self._forget()",
        "",
        ("tests/test_batch_costs.py", "-k", "learnt_anew"),
    ),
    # -- stopping --------------------------------------------------------------------------------
    Mutant(
        "a run that may stop at several looks has ordinary intervals",
        "results/summary.py:confidence_of",
        "run.stopping is None",
        "True",
        ("tests/test_stopping.py",),
    ),
    Mutant(
        "a sweep with --until looks after every prompt",
        "bench/stopping.py:StoppingRule.ending_before",
        "decoded in self._looks",
        "decoded",
        ("tests/test_stopping.py",),
    ),
    # -- long contexts -----------------------------------------------------------------------------
    Mutant(
        "a window moves on, and the drafter keeps what it has read",
        "drafters/window.py:WindowDrafter._own_context",
        "self._forget()",
        "pass",
        ("tests/test_window.py", "-k", "first_tokens"),
        fast=True,
    ),
    Mutant(
        "a prompt of a length of context has a token more",
        "bench/contexts.py:_cut",
        "count(found := cut(letters)) == tokens",
        "count(found := cut(letters)) > tokens",
        ("tests/test_contexts.py", "-k", "exactly"),
    ),
    Mutant(
        "a drafter that was blind once stays so",
        "decoding/reach.py:ContextReach.learn",
        "_ACCEPTED if accepted else _REJECTED",
        "0.0 if accepted else _REJECTED",
        ("tests/test_contexts.py", "-k", "blind_once"),
        fast=True,
    ),
    Mutant(
        "costs of passes do not follow the context",
        "policies/costs.py:GivenCosts.observe",
        "self.start(step.position + len(step.tokens))",
        "pass",
        ("tests/test_contexts.py", "-k", "auto_reads"),
    ),
    # -- what readers and trackers are told ------------------------------------------------------
    Mutant(
        "a tracker is given warm-ups",
        "bench/tracking.py:tracked",
        "not isinstance(event, CellDone) or event.cell.warmup or event.measurement.result is None",
        "not isinstance(event, CellDone) or event.measurement.result is None",
        ("tests/test_trackers.py",),
    ),
    Mutant(
        "a chart gives the number of generations for that of prompts",
        "show/report/charts.py:_text",
        "counted(prompts, 'prompt')",
        "counted(2 * prompts, 'prompt')",
        ("tests/test_report.py", "-k", "charts_say"),
    ),
)


# -- where they go ---------------------------------------------------------------------------------


class LostError(Exception):
    """Raised if the place of a bug is missing or not unique; the message names the nearest code."""


def definitions(tree: ast.AST, prefix: str = "", local: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes and constants of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.", not isinstance(node, ast.ClassDef))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not local:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + each.id, node) for each in targets if isinstance(each, ast.Name))
        else:
            yield from definitions(node, prefix, local)


def locate(where: str, package: Path) -> tuple[Path, ast.Module, list[ast.AST]]:
    """Return the file that defines ``where``, its tree, and its definitions of that name."""
    file, _, name = where.partition(":")
    named = [package / file] if (package / file).exists() else []
    known: list[str] = []
    for paths in (named, sorted(path for path in package.rglob("*.py") if path not in named)):
        found = []
        for path in paths:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            defined = list(definitions(tree))
            known += [f"{path.relative_to(package).as_posix()}:{each}" for each, _ in defined]
            if nodes := [node for each, node in defined if each == name]:
                found.append((path, tree, nodes))
        if len(found) == 1:
            return found[0]
        if found:
            files = ", ".join(str(path.relative_to(package)) for path, *_ in found)
            raise LostError(f"{file} has no {name}, and several others have: {files}")
    last = name.rpartition(".")[2]
    near = [each for each in known if re.split("[:.]", each)[-1] == last]
    raise LostError(f"no {name} in {file} or elsewhere" + like(where, near or known))


def like(old: str, known: Iterable[str]) -> str:
    """Return what resembles ``old`` most, as the end of a message."""
    found = difflib.get_close_matches(old, sorted(set(known)), 3, 0.4)
    return "".join(f"\n    nearest: {each}" for each in found)


def mutated(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """Return the file that a bug changes, and its source with the bug; may raise LostError."""
    path, tree, defined = locate(mutant.where, package)
    old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    sought: list[ast.AST] = list(old)
    put: list[ast.AST] = list(new)
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        sought, put = [old[0].value], [new[0].value]
    kind = ast.stmt if isinstance(sought[0], ast.stmt) else ast.expr
    dumps = [ast.dump(each) for each in sought]
    places: list[tuple[ast.AST, str, int | None]] = []
    candidates: list[ast.AST] = []
    for owner in (each for node in defined for each in ast.walk(node)):
        for field, value in ast.iter_fields(owner):
            nodes = value if isinstance(value, list) else [value]
            if not all(isinstance(each, kind) for each in nodes):
                continue
            there = [ast.dump(each) for each in nodes]
            candidates += nodes
            places += [
                (owner, field, i if isinstance(value, list) else None)
                for i in range(len(there) - len(dumps) + 1)
                if there[i : i + len(dumps)] == dumps
            ]
    if len(places) != 1:
        times = f"{path.relative_to(package).as_posix()} has it {len(places)} times in {mutant.where}"
        near = "" if places else like(ast.unparse(sought[0]), map(ast.unparse, candidates))
        raise LostError(f"{times}: {mutant.old}{near}")
    owner, field, at = places[0]
    if at is None:
        setattr(owner, field, put[0])
    else:
        body = getattr(owner, field)
        body[at : at + len(sought)] = put
        if not body:
            body.append(ast.Pass())
    return path, ast.unparse(ast.fix_missing_locations(tree))


# -- the process that plants them ------------------------------------------------------------------


class Watcher:
    """A pytest plugin that remembers the first test that failed."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and self.failed is None:
            self.failed = str(getattr(report, "nodeid", "?"))


def forget(copy: Path) -> None:
    """Remove every module of the copy from the interpreter, so that it is imported again."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] in ("specbench", "conftest") or (file and Path(file).is_relative_to(copy)):
            del sys.modules[name]


def test(copy: Path, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run a part of the suite; return pytest's exit code and the first failed test."""
    import pytest

    forget(copy)
    existing = [
        word
        for word in arguments
        if not word.startswith("tests/") or (copy / word.partition("::")[0]).exists()
    ]
    watcher = Watcher()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *existing]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = int(pytest.main(options, plugins=[watcher]))
    import specbench

    assert Path(specbench.__file__ or "").is_relative_to(copy), (
        "the installed package was tested, not the copy"
    )
    return code, watcher.failed


def plant(names: Iterable[str]) -> None:
    """Plant the named mutants in the copy in the working folder; print a line of JSON for each."""
    copy = Path.cwd()
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy)]
    wanted = [mutant for mutant in (CONTROL, *MUTANTS) if mutant.name in set(names)]
    broken: dict[tuple[str, ...], str] = {}
    for arguments in dict.fromkeys(mutant.tests for mutant in wanted):
        code, failed = test(copy, arguments)
        if code != 0:
            broken[arguments] = failed or f"pytest's code {code}"
    for mutant in wanted:
        if mutant.tests in broken:
            say(name=mutant.name, verdict="fails without the bug", by=broken[mutant.tests])
            continue
        try:
            file, bug = mutated(mutant, copy / "specbench")
        except LostError as error:
            say(name=mutant.name, verdict="not found", by=str(error))
            continue
        text = file.read_text(encoding="utf-8")
        began = time.perf_counter()
        file.write_text(bug, encoding="utf-8")
        try:
            code, failed = test(copy, mutant.tests)
        finally:
            file.write_text(text, encoding="utf-8")
        verdict = {0: "survived", 1: "caught"}.get(code, f"pytest's code {code}")
        say(name=mutant.name, verdict=verdict, by=failed, seconds=round(time.perf_counter() - began, 1))


def say(**fields: object) -> None:
    """Print a line for the waiting process."""
    sys.__stdout__.write(json.dumps(fields) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


# -- the command -----------------------------------------------------------------------------------


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names; all without any")
    parser.add_argument("--fast", action="store_true", help="those that CI plants")
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plant:
        plant(arguments.words)
        return 0
    chosen = [
        mutant
        for mutant in MUTANTS
        if (mutant.fast or not arguments.fast)
        and (not arguments.words or any(word in mutant.name for word in arguments.words))
    ]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in COPIED:
            source, target = ROOT / name, Path(place) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        process = subprocess.Popen(
            [sys.executable, __file__, "--plant", *(mutant.name for mutant in (CONTROL, *chosen))],
            cwd=place,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            found[result["name"]] = result["verdict"]
            print(f"{result['verdict']:9} {result['name']}  [{result['by'] or '-'}]", flush=True)
        process.wait()
    expected = {CONTROL.name: "survived"} | {mutant.name: "caught" for mutant in chosen}
    good = found == expected and process.returncode == 0
    caught = sum(found.get(mutant.name) == "caught" for mutant in chosen)
    print(json.dumps({"planted": len(chosen), "caught": caught, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
