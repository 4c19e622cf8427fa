"""Plants known bugs, one at a time, and asks whether the test suite notices.

    python benchmarks/mutation.py              # all of them, a few minutes
    python benchmarks/mutation.py --fast       # the classical mistakes of speculative decoding; CI runs these
    python benchmarks/mutation.py stop residual    # those whose names contain a word

Each bug is a change of a few words in a copy of the package, against which the smallest part of the suite that should
notice it is run. Beforehand the same tests must pass on the unchanged copy, and a change that changes nothing must go
unnoticed. Prints a table, with the test that noticed; exit code 1 if a bug survives or its place is no longer found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("specbench", "tests", "benchmarks", "prompts", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A bug to plant.

    Attributes:
        name: What is wrong with it.
        file: Where, within the package.
        old: The text to replace; it stands there exactly once.
        new: What to put in its place.
        tests: Arguments for pytest that select what should notice.
        fast: Whether CI plants it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False


DECODE = ("tests/test_decode.py",)
ACCEPT = ("tests/test_accept.py",)
EXACT = ("tests/test_exact.py::test_the_output_distribution_is_the_targets[model-multinomial]",)
STEP = ("tests/test_properties.py::test_a_step_emits_p_whatever_the_drafter",)
RANDOM = ("tests/test_properties.py", "-k", "random_number or no_say")
ROLL_BACK = ("tests/test_properties.py", "-k", "roll_back")
CATCH_UP = (
    "tests/test_properties.py::test_after_any_roll_back_the_logits_are_those_of_the_whole_context[full-dynamic]",
)
SAMPLING = ("tests/test_sampling.py",)
CACHES = ("tests/test_caches.py", "-k", "mistral or llama or gemma3")
STORE = ("tests/test_store.py",)
SIBLINGS = ("tests/test_siblings.py",)
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
    "decoding/verify.py",
    '"""The verdict on a draft: accept, correct or add a bonus token.',
    '"""The verdict on a draft: accept, correct, or add a bonus token.',
    ACCEPT,
    fast=True,
)

MUTANTS = (
    # -- the issue's own list --------------------------------------------------------------------
    Mutant(
        "roll-back keeps one token too many",
        "decoding/loop.py",
        "        target.keep(len(context) - 1, verdict.path)\n",
        "        target.keep(len(context), verdict.path)\n",
        DECODE,
        fast=True,
    ),
    Mutant(
        "roll-back removes one token too many",
        "decoding/loop.py",
        "        target.keep(len(context) - 1, verdict.path)\n",
        "        target.keep(len(context) - 2, verdict.path)\n",
        DECODE,
    ),
    Mutant(
        "the drafter is not rolled back",
        "decoding/loop.py",
        "        drafter.keep(len(context) - 1, verdict.path)\n",
        "        pass\n",
        DECODE,
    ),
    Mutant(
        "the drafter keeps what it drafted in a sibling's place",
        "decoding/loop.py",
        "        drafter.keep(len(context) - 1, verdict.path)\n",
        "        drafter.keep(len(context) - 1)\n",
        SIBLINGS,
    ),
    Mutant(
        "a prompt's last row is computed along with the tree after it",
        "backends/torch/scorer.py",
        "        if self.cache.length == 0 and self.cache.prefill_apart:\n",
        "        if False:\n",
        ("tests/test_bitexact.py", "-k", "tree_changes"),
    ),
    Mutant(
        "a name of a run is a format string of a figure",
        "show/plots/canvas.py",
        'return _joined(self.parts, f"γ = {gamma:g}")',
        'return _joined(self.parts, "γ = {0:g}").format(gamma)',
        ("tests/test_security.py", "-k", "format_string"),
    ),
    Mutant(
        "specinfer tests what a draw has chosen before that draw",
        "decoding/verdicts.py",
        "        node, q = (draws or certain).pop(place)\n",
        "        node, q = (certain or draws).pop(place if not certain else 0)\n",
        DISTRIBUTIONS,
    ),
    Mutant(
        "a drafter draws from what is banned",
        "decoding/sampling.py",
        "        return self.defaults is not None and bool(",
        "        return self.defaults is None and bool(",
        BANNED,
    ),
    Mutant(
        "a node of a tree is expected whether the one before it is kept or not",
        "decoding/theory.py",
        "reached.append(before * rates[rank] if",
        "reached.append(rates[rank] if",
        THEORY,
    ),
    Mutant(
        "a tree calibrated for other weights of a drafter is taken up",
        "models/tree_choices.py",
        "[self.dtype, self.device, self.drafter, self.weights,",
        "[self.dtype, self.device, self.drafter,",
        CALIBRATED,
    ),
    Mutant(
        "ranks of the command line give way to calibrated ones",
        "models/tree_choices.py",
        'if rule.word != "static-tree" or "ranks" in rule.options:',
        'if rule.word != "static-tree":',
        CALIBRATED,
    ),
    Mutant(
        "a tree is chosen as if a drafter read all nodes of a depth for the price of one",
        "tune/ranks.py",
        "for behind in (0, *read))",
        "for behind in [min(each, 1) for each in (0, *read)])",
        CALIBRATED,
    ),
    Mutant(
        "leaves of a tree count as nodes that a drafter reads",
        "decoding/theory.py",
        "for node in set(parents) if node >= 0)",
        "for node in range(len(parents)))",
        THEORY,
    ),
    Mutant(
        "the entry of a sibling that was right stays where it is",
        "decoding/loop.py",
        "        target.keep(len(context) - 1, verdict.path)\n",
        "        target.keep(len(context) - 1)\n",
        SIBLINGS,
    ),
    Mutant(
        "a sibling sees the draft beside it",
        "decoding/tree.py",
        "        found[row] |= found[parent + 1]\n",
        "        found[row] |= found[row - 1]\n",
        SIBLINGS,
    ),
    Mutant(
        "a sibling has the place behind the draft beside it",
        "decoding/tree.py",
        "ancestors.sum(axis=1, dtype=np.int64)",
        "np.arange(1, len(ancestors) + 1)",
        SIBLINGS,
    ),
    Mutant(
        "the logits behind another sibling are read",
        "decoding/verify.py",
        "sampling.choose(logits[node + 1 : node + 2]",
        "sampling.choose(logits[node : node + 1]",
        SIBLINGS,
    ),
    Mutant(
        "a candidate keeps its share of q when it was drawn",
        "decoding/verdicts.py",
        "    rest = q.clone()\n    rest[token] = 0.0\n",
        "    rest = q.clone()\n",
        TREES,
    ),
    Mutant(
        "what is left of p is not made whole again",
        "decoding/verdicts.py",
        "chance = total / (total + 1.0 - chance) if chance < 1.0 else 1.0",
        "chance = total if chance < 1.0 else 1.0",
        TREES,
    ),
    Mutant(
        "a drafter's best token is hidden from whoever looks next",
        "decoding/prospects.py",
        "values[every, place] = value",
        "value = place",
        ("tests/test_trees.py", "-k", "largest"),
    ),
    Mutant(
        "a column that ties with the last one counted is left out",
        "decoding/prospects.py",
        "highest >= np.partition(",
        "highest > np.partition(",
        ("tests/test_trees.py", "-k", "largest"),
    ),
    Mutant(
        "a node of a tree is read at the place of the one before it",
        "drafters/model.py",
        "place = {-1: -1} | {node: i for i, node in enumerate(self._read_nodes)}",
        "place = {-1: -1} | {node: i - 1 for i, node in enumerate(self._read_nodes)}",
        TREES,
    ),
    Mutant(
        "a drafter keeps nodes that are not on the path",
        "drafters/model.py",
        "place = {node: i for i, node in enumerate(self._read_nodes)}\n            read",
        "place = {node: 0 for i, node in enumerate(self._read_nodes)}\n            read",
        TREES,
    ),
    Mutant(
        "the drafter does not catch up with what it was not fed",
        "backends/torch/scorer.py",
        "*context[start:]",
        "*context[max(start, len(context) - 1) :]",
        CATCH_UP,
        fast=True,
    ),
    Mutant(
        "residual without clamp",
        "decoding/verify.py",
        "(p[i] - draft.q[i]).clamp_min_(0.0)",
        "(p[i] - draft.q[i])",
        STEP,
        fast=True,
    ),
    Mutant(
        "p and q swapped in the residual",
        "decoding/verify.py",
        "(p[i] - draft.q[i]).clamp_min_(0.0)",
        "(draft.q[i] - p[i]).clamp_min_(0.0)",
        ACCEPT,
        fast=True,
    ),
    Mutant(
        "p and q swapped in the acceptance",
        "decoding/verify.py",
        "p_of_token.div_(q_of_token.clamp_min_(_SMALLEST))",
        "q_of_token.div_(p_of_token.clamp_min_(_SMALLEST))",
        ACCEPT,
        fast=True,
    ),
    Mutant(
        "a stop inside the accepted run is ignored",
        "decoding/loop.py",
        "        kept, reason = stops.cut(verdict.tokens)\n",
        "        kept, reason = len(verdict.tokens), stops.cut(verdict.tokens[-1:])[1]\n",
        DECODE,
        fast=True,
    ),
    Mutant(
        "a token of low confidence is thrown away",
        "drafters/model.py",
        "                if drawn is None:\n",
        "                if drawn is None or (drawn.q is not None and float(drawn.q[drawn.token]) < 0.2):\n",
        EXACT,
        fast=True,
    ),
    Mutant(
        "the numbers that tested the drafts are used again for the draw",
        "decoding/sampling.py",
        "        r = torch.rand(len(acceptance), generator=self.generator,",
        "        r = torch.rand(len(acceptance), generator=self.generator.clone_state(),",
        RANDOM,
        fast=True,
    ),
    # -- acceptance ------------------------------------------------------------------------------
    Mutant(
        "the generator is seeded anew for every draw",
        "decoding/sampling.py",
        "        u = torch.rand(1, generator",
        "        self.generator.manual_seed(0)\n        u = torch.rand(1, generator",
        RANDOM,
    ),
    Mutant(
        "the rejected token is returned instead of the corrected one",
        "decoding/verify.py",
        "        return Verdict(path, tokens)\n",
        "        return Verdict(path, [*tokens[:-1], (draft.tokens + tokens[-1:])[len(path)]])\n",
        DECODE,
        fast=True,
    ),
    Mutant(
        "drafts behind a rejected one are kept",
        "decoding/sampling.py",
        "next((i for i, chance in enumerate(chances) if not r[i] < chance), len(r))",
        "sum(r[i] < chance for i, chance in enumerate(chances))",
        SAMPLING,
    ),
    Mutant(
        "the bonus token comes from the row before",
        "decoding/verify.py",
        "    distribution = p[accepted]\n",
        "    distribution = p[max(0, accepted - 1)]\n",
        EXACT,
        fast=True,
    ),
    Mutant(
        "a certain drafter's rejected token may come again",
        "decoding/verify.py",
        "        rest[draft.tokens[i]] = 0.0\n",
        "",
        ACCEPT,
    ),
    Mutant(
        "tokens drawn from another distribution than the q that is kept",
        "drafters/model.py",
        "return Drawn(random.draw(q), known, q)",
        "return Drawn(random.draw(q * q), known, q)",
        EXACT,
    ),
    Mutant(
        "α of tokens that were not tested",
        "decoding/explain.py",
        'tested = kept if cut else accepted + (closing == "corrected")',
        "tested = gamma",
        DECODE,
    ),
    # -- what a model's files ask for ------------------------------------------------------------
    Mutant(
        "a configuration chooses the attention",
        "models/checkpoints.py",
        "if key not in INNER_WORKINGS + OUTPUTS and not any(word in key for word in IMPLEMENTATIONS)",
        "if key not in INNER_WORKINGS + OUTPUTS",
        ("tests/test_security.py", "-k", "choose_the_code"),
    ),
    Mutant(
        "a configuration gives the attention another name",
        "models/checkpoints.py",
        'INNER_WORKINGS = ("attribute_map", ',
        "INNER_WORKINGS = (",
        ("tests/test_security.py", "-k", "choose_the_code"),
    ),
    Mutant(
        "the context limit forgets a scaling",
        "models/load.py",
        "int(max([limit, *scaled]))",
        "int(limit)",
        ("tests/test_models.py", "-k", "scaling"),
    ),
    Mutant(
        "a model's own settings see the context before the drafts alone",
        "decoding/model_defaults.py",
        "ids[:, : before_drafts + place]",
        "ids[:, :before_drafts]",
        ("tests/test_model_defaults.py", "-k", "distributions"),
    ),
    Mutant(
        "the check's reference lacks the model's own settings",
        "check/reference.py",
        "**{**settings.model_defaults, ",
        "**{",
        ("tests/test_model_defaults.py", "-k", "reference"),
    ),
    Mutant(
        "siblings under transforms that look back",
        "decoding/loop.py",
        "verification.takes_trees and not sampling.looks_back",
        "verification.takes_trees",
        ("tests/test_model_defaults.py", "-k", "siblings"),
    ),
    # -- transforms ------------------------------------------------------------------------------
    Mutant(
        "the repetition penalty sees drafts that come later",
        "decoding/sampling.py",
        "for place, token in fresh if place < drafts]",
        "for place, token in fresh]",
        SAMPLING,
    ),
    Mutant(
        "the repetition penalty remembers another context",
        "decoding/sampling.py",
        "        if not known or len(self.mask)",
        "        if len(self.mask)",
        ("tests/test_properties.py", "-k", "own_context"),
    ),
    Mutant(
        "top-k drops the last token it should keep",
        "decoding/sampling.py",
        "scores.masked_fill(scores < smallest_kept",
        "scores.masked_fill(scores <= smallest_kept",
        SAMPLING,
    ),
    Mutant(
        "a nucleus lacks its edge",
        "decoding/sampling.py",
        "scores.masked_fill(scores < edge",
        "scores.masked_fill(scores <= edge",
        SAMPLING,
    ),
    Mutant(
        "min-p is taken of the mass instead of the largest",
        "decoding/sampling.py",
        "probabilities < min_p * top,",
        "probabilities < min_p,",
        SAMPLING,
    ),
    # -- ends and limits -------------------------------------------------------------------------
    Mutant(
        "one token more than asked for",
        "decoding/loop.py",
        "limit - position - 1",
        "limit - position",
        DECODE,
    ),
    Mutant(
        "accepted drafts behind a stop are counted",
        "decoding/explain.py",
        "accepted=min(accepted, kept)",
        "accepted=accepted",
        DECODE,
    ),
    Mutant(
        "the drafter goes beyond its own context",
        "drafters/model.py",
        "limit - self._length(context) + 1",
        "limit - self._length(context) + 2",
        DECODE,
    ),
    Mutant(
        "logits of a trimmed head stand in wrong places",
        "models/prepare.py",
        "places=None if draftable is None else torch.tensor(draftable)",
        "places=None if draftable is None else torch.tensor(draftable).flip(0)",
        ("tests/test_vocabulary.py",),
    ),
    Mutant(
        "a drafter with another tokenizer keeps what is spelled otherwise by now",
        "drafters/translate.py",
        "next((i for i in range(start, length) if ids[i] != self._fed[i]), length)",
        "length",
        ("tests/test_translate.py",),
    ),
    Mutant(
        "the chat template's end of turn is no end",
        "models/load.py",
        "[tokenizer.eos_token_id, end_of_turn(tokenizer)]",
        "[tokenizer.eos_token_id]",
        ("tests/test_models.py", "-k", "end_ids"),
    ),
    Mutant(
        "a special token is no stop string",
        "decoding/stops.py",
        "if token in self._stop_ids:",
        "if False:",
        ("tests/test_text.py", "-k", "special_token"),
    ),
    Mutant(
        "bytes are shown before their run has ended",
        "decoding/stops.py",
        "        if byte is not None:\n",
        "        if False:\n",
        ("tests/test_text.py", "-k", "decoded_text"),
    ),
    Mutant(
        "the beginning of a stop string is shown",
        "decoding/stops.py",
        "len(self._decoded) - self._possible_stop()",
        "len(self._decoded)",
        ("tests/test_text.py", "-k", "held_back"),
    ),
    Mutant(
        "a chat prompt gets a second BOS",
        "generate.py",
        "(_encodable(str(text)), add_special_tokens=False)",
        "(_encodable(str(text)), add_special_tokens=True)",
        ("tests/test_properties.py", "-k", "chat_prompt"),
    ),
    # -- caches ----------------------------------------------------------------------------------
    Mutant(
        "a self-drafter leaves its keys in the target's cache",
        "drafters/model.py",
        "            self.scorer.keep(verified)\n",
        "            pass\n",
        DECODE,
    ),
    Mutant(
        "sliding layers do not record their past",
        "backends/torch/caches.py",
        "        self._cache.activate_past_recording()\n",
        "",
        CACHES,
    ),
    Mutant(
        "sliding layers are not cropped when nothing is removed",
        "backends/torch/caches.py",
        "        layer.crop(-surplus)\n\n    def _rollback_convolution",
        "        if surplus:\n            layer.crop(-surplus)\n\n    def _rollback_convolution",
        CACHES,
    ),
    Mutant(
        "convolution states are not rolled back",
        "backends/torch/caches.py",
        "                self._rollback_convolution(layer, surplus)\n",
        "                pass\n",
        ROLL_BACK,
    ),
    Mutant(
        "the preallocated window lacks a position",
        "backends/torch/caches.py",
        "self.used - (self.sliding_window - 1 + key_states.shape[-2])",
        "self.used - (self.sliding_window - 2 + key_states.shape[-2])",
        CACHES,
    ),
    Mutant(
        "the preallocated cache keeps one position more",
        "backends/torch/caches.py",
        "            self.used = max(length, 0)\n",
        "            self.used = max(length, 0) + 1\n",
        CACHES,
    ),
    Mutant(
        "native passes write where keys and values were",
        "backends/torch/caches.py",
        "if layer.used != length or layer.keys is not keys:",
        "if layer.used != length:",
        ("tests/test_native.py", "-k", "in_between"),
    ),
    Mutant(
        "the prompt and drafts of a first pass go in together",
        "backends/torch/caches.py",
        "any(_forgets(layer) for layer in self._cache.layers)",
        "False",
        CACHES,
    ),
    Mutant(
        "a draft may be longer than what a window's cache takes back",
        "decoding/records.py",
        "LONGEST_DRAFT = 256",
        "LONGEST_DRAFT = 320",
        ("tests/test_caches.py", "-k", "longest_draft"),
    ),
    Mutant(
        "what was no number stays in the cache",
        "backends/torch/caches.py",
        "        if not held.sum().isfinite():\n            held.zero_()\n",
        "        held.sum()\n",
        ("tests/test_caches.py", "-k", "spoils"),
    ),
    Mutant(
        "short passes get no mask",
        "backends/torch/kernels/attention.py",
        "attn_mask=mask, ",
        "attn_mask=torch.zeros_like(mask), ",
        ("tests/test_attention.py",),
    ),
    Mutant(
        "the last token of a block of keys takes another way than the tokens beside it",
        "backends/torch/kernels/attention.py",
        "if masks is None and key.shape[2] % KEY_BLOCK == 0:",
        "if False:",
        ("tests/test_bitexact.py", "-k", "edge"),
    ),
    Mutant(
        "an int8 target gets passes that depend on their width",
        "models/prepare.py",
        '            return "preallocated"\n',
        '            return "dynamic"\n',
        ("tests/test_bitexact.py", "-k", "int8"),
    ),
    Mutant(
        "ties of an int8 target are counted in units of the logits' own dtype",
        "backends/torch/parity.py",
        "scores(logits, context)[0], target.rounding)",
        "scores(logits, context)[0], logits.dtype)",
        ("tests/test_check.py", "-k", "tie_needs"),
    ),
    Mutant(
        "a single row in half precision is taken at its word",
        "backends/torch/kernels/linear.py",
        "    if dtype != torch.float32:\n        return True\n",
        "",
        ("tests/test_bitexact.py", "-k", "half_precision"),
    ),
    Mutant(
        "threads take each other's masks",
        "backends/torch/kernels/attention.py",
        "    return _last_masks(mask, (groups, dtype), lambda: fold_mask(mask, groups, dtype))\n",
        "    made = _last_masks(mask, (groups, dtype), lambda: fold_mask(mask, groups, dtype))\n"
        "    globals().update(_last=(mask, made))\n"
        '    return globals()["_last"][1]\n',
        ("tests/test_attention.py", "-k", "thread"),
    ),
    Mutant(
        "short passes pass hooks by",
        "backends/torch/kernels/surgery.py",
        "for hooks in self._hooks\n",
        "for hooks in ()\n",
        ("tests/test_short_passes.py", "-k", "hooks_are_called"),
    ),
    Mutant(
        "joined layers read what they read before a hook changed it",
        "backends/torch/kernels/surgery.py",
        "        hooked = self.hooks.there()\n",
        "        hooked = False\n",
        ("tests/test_short_passes.py", "-k", "negate"),
    ),
    Mutant(
        "short passes keep a norm's old weights",
        "backends/torch/passes.py",
        "found is None or found.mark() is not mark:",
        "found is None:",
        ("tests/test_short_passes.py", "-k", "stale"),
    ),
    Mutant(
        "a paused run goes on upon another one's context",
        "decoding/loop.py",
        "        if (target.epoch, drafter.epoch) != begun:\n",
        "        if False:\n",
        ("tests/test_decode.py", "-k", "paused"),
    ),
    Mutant(
        "packed weights are not saved",
        "backends/torch/kernels/linear.py",
        '        destination[prefix + "weight"] = self.weight\n',
        "        pass\n",
        ("tests/test_packing.py", "-k", "saved"),
    ),
    Mutant(
        "padding of the vocabulary can be drawn",
        "backends/torch/scorer.py",
        'value=float("-inf")',
        "value=0.0",
        ("tests/test_caches.py", "-k", "padded"),
    ),
    # -- drafters and rules ----------------------------------------------------------------------
    Mutant(
        "of equally frequent tokens the first seen is taken",
        "drafters/ngram.py",
        "count >= self.counts[self._best]",
        "count > self.counts[self._best]",
        ("tests/test_ngram.py",),
    ),
    Mutant(
        "n-gram counts leak into the next prompt",
        "drafters/ngram.py",
        "            self._continuations.clear()\n",
        "",
        ("tests/test_ngram.py",),
    ),
    Mutant(
        "the lookup's places leak into the next prompt",
        "drafters/lookup.py",
        "        self._earlier.clear()\n",
        "",
        ("tests/test_lookup.py",),
    ),
    Mutant(
        "a draft-length rule's state leaks into the next prompt",
        "decoding/loop.py",
        "        rule.reset()\n",
        "        pass\n",
        DECODE,
    ),
    Mutant(
        "the heuristic counts what a stop has hidden",
        "lengths/outcomes.py",
        "        if step.gamma == 0 or step.closing is None:\n            return  # nothing was drafted",
        "        if step.gamma == 0:\n            return  # nothing was drafted",
        ("tests/test_lengths.py", "-k", "heuristic"),
    ),
    # -- results ---------------------------------------------------------------------------------
    Mutant(
        "half a line stays when a write fails",
        "results/store.py",
        "            os.ftruncate(file, before)\n",
        "            pass\n",
        STORE,
    ),
    Mutant(
        "half a line is taken for a whole one",
        "results/store.py",
        "    if parse(data[start:]) is not None:\n",
        "    if data[start:]:\n",
        STORE,
    ),
    Mutant(
        "an old trace is emptied before there is a new one",
        "cli/watchers.py",
        "flags & ~os.O_TRUNC",
        "flags",
        ("tests/test_cli.py", "-k", "refused_command_leaves"),
    ),
    Mutant(
        "the end of a longer trace stays behind a new one",
        "cli/watchers.py",
        "                file.truncate()\n",
        "                pass\n",
        ("tests/test_cli.py", "-k", "longer_one"),
    ),
    Mutant(
        "a run.json of any types is taken",
        "results/store.py",
        "    wrong = misfit(run, _RUN_SHAPE)\n",
        "    wrong = None\n",
        ("tests/test_ill_typed.py", "-k", "fields"),
    ),
    Mutant(
        "a run goes on with longer outputs",
        "bench/manifest.py",
        "        if then != now:\n",
        "        if False:\n",
        ("tests/test_cli_sweep.py", "-k", "incomparable"),
    ),
    Mutant(
        "a run is overwritten",
        "results/store.py",
        "            if cls.exists(path):\n",
        "            if False:\n",
        STORE,
    ),
    Mutant(
        "a configuration may say anything of layers and windows",
        "models/checkpoints.py",
        "    if (wrong := misfit(read, _FIELDS)) is not None:\n",
        "    if (wrong := None) is not None:\n",
        ("tests/test_ill_typed.py", "-k", "fields_of_a_model"),
    ),
    Mutant(
        "a self drafter is taken for another target",
        "generate.py",
        "and model.scorer.cache is not target.scorer.cache:",
        "and False:",
        ("tests/test_decode.py", "-k", "belongs"),
    ),
    # -- security --------------------------------------------------------------------------------
    Mutant(
        "formulas get into the CSV",
        "results/store.py",
        "    if not isinstance(value, str):\n        return value\n    # A bare",
        "    return value\n    # A bare",
        STORE,
    ),
    Mutant(
        "files are written through links",
        "files.py",
        "    if path.is_symlink():\n",
        "    if False:\n",
        ("tests/test_security.py", "-k", "link"),
    ),
    Mutant(
        "the name of an unfinished file can be foretold",
        "files.py",
        ".{secrets.token_hex(8)}.partial",
        ".partial",
        ("tests/test_security.py", "-k", "prepared"),
    ),
    Mutant(
        "C1 controls reach the terminal",
        "textsafe.py",
        "\\x7f-\\x9f",
        "\\x7f",
        ("tests/test_textsafe.py",),
    ),
    Mutant(
        "an index may name weights outside its folder",
        "models/checkpoints.py",
        'or ".." in path.parts',
        "",
        ("tests/test_models.py", "tests/test_security.py", "-k", "outside or leave"),
    ),
    Mutant(
        "a built-in model's hash is not looked at",
        "models/builtin.py",
        "    if sha256(gguf) != model.gguf_sha256:\n",
        "    if not sha256(gguf):\n",
        ("tests/test_builtin.py", "-k", "wrong_hash"),
    ),
    Mutant(
        "a damaged file of the hub's cache is taken",
        "models/hub.py",
        "                return blob.name in _hashes(blob, size, self._report)\n",
        "                pass\n",
        ("tests/test_security.py", "-k", "hub"),
    ),
    Mutant(
        "a model's own code is run",
        "models/load.py",
        "                trust_remote_code=False,\n",
        "                trust_remote_code=True,\n",
        ("tests/test_security.py",),
    ),
    Mutant(
        "pickled weights are loaded unasked",
        "models/checkpoints.py",
        "if allow_pickle else []",
        "if True else []",
        ("tests/test_models.py", "-k", "pickled"),
    ),
    # -- many requests ------------------------------------------------------------------------------
    Mutant(
        "a request that was put back drafts on without the target's keys",
        "decoding/schedule.py",
        "        if self.asked.scorer is not target and target.held < self.verified:\n",
        "        if False:\n",
        SCHEDULE,
    ),
    Mutant(
        "hidden states of a prompt's first parts are lost",
        "decoding/schedule.py",
        "return rows._replace(hidden=torch.cat(states))",
        "return rows",
        SCHEDULE,
    ),
    Mutant(
        "requests side by side share what a rule has learnt",
        "generate.py",
        "DraftPolicy.of(self.policy).fork()",
        "DraftPolicy.of(self.policy)",
        ("tests/test_generate_many.py", "-k", "rules_learn"),
    ),
    Mutant(
        "passes do not wait for those who draft",
        "decoding/schedule.py",
        "[job for job in self._active if job.drafts] or candidates",
        "candidates",
        SCHEDULE,
    ),
    Mutant(
        "a drafter that reads a long prompt holds the others up",
        "decoding/schedule.py",
        "job.since, job.reading = self._passes, True",
        "job.since = self._passes",
        SCHEDULE,
    ),
    Mutant(
        "memory of a request that has ended stays taken",
        "decoding/schedule.py",
        "            with suppress(Exception):\n                scorer.keep(0)\n",
        "            pass\n",
        SCHEDULE,
    ),
    Mutant(
        "a request writes into blocks that others share",
        "backends/torch/pools.py",
        "shared = [i for i in written if self._holders[blocks[i]] > 1]",
        "shared: list[int] = []",
        BLOCKS,
    ),
    Mutant(
        "a request that is rolled back keeps a block too many",
        "backends/torch/pools.py",
        "        kept = -(-length // self.size)\n",
        "        kept = length // self.size + 1\n",
        BLOCKS,
    ),
    Mutant(
        "blocks are shared whatever stands before them",
        "backends/torch/pools.py",
        "blake2b(before + part.tobytes()",
        "blake2b(part.tobytes()",
        BLOCKS,
    ),
    Mutant(
        "a request sees what lies behind its own rows",
        "backends/torch/pools.py",
        "mask[i, 0, :count, : part.end - first] = _seen(part, first, part.end, window)",
        "mask[i, 0, :count] = True",
        RAGGED,
    ),
    Mutant(
        "rows go back in the order of the pool",
        "backends/torch/batch.py",
        "scorer.fit(made.logits[given[i]])",
        "scorer.fit(made.logits[given[order[i]]])",
        RAGGED,
    ),
    Mutant(
        "what a cheaper form has read passes for the target's own",
        "backends/torch/scorer.py",
        "        if isinstance(self.cache, Slot) and self._owns_slot:\n",
        "        if isinstance(self.cache, Slot):\n",
        ("tests/test_pools.py", "-k", "cheaper_form"),
    ),
    # -- configurations and exports ---------------------------------------------------------------
    Mutant(
        "a rule of the configuration outlives its drafter",
        "cli/config.py",
        '        taken |= {*_RULE, "drafter_dtype"}',
        '        taken |= {"drafter_dtype"}',
        ("tests/test_config.py", "-k", "command_line_wins"),
    ),
    Mutant(
        "SGLang verifies one token too few",
        "tune/export/sglang.py",
        "width = setting.drafter, setting.gamma + 1",
        "width = setting.drafter, setting.gamma",
        ("tests/test_export.py", "-k", "on_every_engine"),
    ),
    Mutant(
        "an exported assistant stops at a threshold of its own",
        "tune/export/transformers.py",
        '"constant", 0.0',
        '"constant", 0.4',
        ("tests/test_export.py", "-k", "same_tokens and big"),
    ),
    # -- tuning ------------------------------------------------------------------------------------
    Mutant(
        "a race drops whoever is behind, sure or not",
        "tune/race.py",
        "self._bound(name, over, self.level)",
        "self._ahead(name, over)",
        ("tests/test_race.py", "-k", "wrong_no_oftener"),
    ),
    Mutant(
        "all looks of a race spend as much as the last",
        "tune/race.py",
        "self._share if last else self._share / self._looks",
        "self._share",
        ("tests/test_race.py", "-k", "spend_no_more"),
    ),
    Mutant(
        "what held a generation up counts as its own slowness",
        "tune/race.py",
        "return blocks, speed + held, doubt",
        "return blocks, speed, doubt",
        ("tests/test_race.py", "-k", "thought_slow"),
    ),
    Mutant(
        "who rests never comes back to a race",
        "tune/race.py",
        "if name not in self.fallen or self.fallen[name].most is not None]",
        "if name not in self.fallen]",
        ("tests/test_race.py", "-k", "measured_again"),
    ),
    Mutant(
        "a race is decided while others may be much faster",
        "tune/race.py",
        'self.verdict != "open" and not self.open',
        'self.verdict != "open"',
        ("tests/test_race.py", "-k", "wrong_no_oftener"),
    ),
    Mutant(
        "drafting costs nothing where requests share passes",
        "tune/batches.py",
        "passes * costs.drafter_s[drafter][batch] + ",
        "",
        ("tests/test_tune.py", "-k", "predicted_from_its_steps_and_shared"),
    ),
    Mutant(
        "a tuning that goes on measures everything again",
        "tune/search.py",
        "        if cell.key not in self._rows:\n",
        "        if cell.key not in self._rows or not cell.warmup:\n",
        ("tests/test_tune.py", "-k", "nothing_is_measured_again"),
    ),
    # -- trained heads ---------------------------------------------------------------------------
    Mutant(
        "states of drafts off the path are handed on",
        "decoding/loop.py",
        "return hidden[[*range(before), *(before + node for node in path)]]",
        "return hidden[: before + len(path)]",
        HEADS,
    ),
    Mutant(
        "a head goes on from keys of its own drafts",
        "backends/torch/head_scorers.py",
        "            cache.keep(self._read)\n        self._features",
        "            pass\n        self._features",
        HEADS,
    ),
    Mutant(
        "a token goes with the state at its own position",
        "backends/torch/head_scorers.py",
        "self._states.append(states[-fresh:]",
        "self._states.append(states[-fresh:].roll(-1, 0)",
        HEADS,
    ),
    Mutant(
        "a node goes with the output before its parent",
        "backends/torch/head_scorers.py",
        "self._features[parents[node] + 1]",
        "self._features[max(0, parents[node])]",
        HEADS,
    ),
    Mutant(
        "guesses stand one place off",
        "drafters/look_ahead.py",
        "return self._guesses[place - self._first][None]",
        "return self._guesses[place - self._first - 1][None]",
        ("tests/test_heads.py", "-k", "rows_of_pass"),
    ),
    Mutant(
        "SpecForge's layers are taken for vLLM's",
        "models/heads.py",
        "each + 1 for each in",
        "each for each in",
        HEADS,
    ),
    Mutant(
        "a pass with hidden states is no native one",
        "backends/torch/passes.py",
        "        own = self._layers(held)\n        made = None",
        "        own = None if layers else self._layers(held)\n        made = None",
        ("tests/test_bitexact.py", "-k", "states or twice"),
    ),
    Mutant(
        "a layer named twice gives the states of another one",
        "backends/torch/passes.py",
        "[once.index(layer) for layer in layers]",
        "[min(i, len(once) - 1) for i in range(len(layers))]",
        ("tests/test_native.py", "-k", "hidden_states"),
    ),
    Mutant(
        "the trial of passes of every width asks for no hidden states",
        "backends/torch/trials.py",
        "_WIDTHS_WITH_STATES = (1, 5, 32)",
        "_WIDTHS_WITH_STATES = ()",
        ("tests/test_bitexact.py", "-k", "trial"),
    ),
    Mutant(
        "hidden states of another shape are taken for a head's",
        "models/prepare.py",
        "hidden.shape == (len(tokens), len(layers), width)",
        "hidden.shape[-1] == width",
        ("tests/test_heads.py", "-k", "shape"),
    ),
    Mutant(
        "a pass that fails fails all who took part",
        "decoding/schedule.py",
        "            for each in parts:  # one by one, only those whose fault it is fail\n"
        "                self._make([each], events)\n",
        "            for job, _ in parts:\n                self._fail(job, error, events)\n",
        ("tests/test_schedule.py", "-k", "breaks or raises"),
    ),
    Mutant(
        "states that cannot be joined end all requests",
        "decoding/schedule.py",
        "                    rows = job.with_states(rows)\n",
        "                    pass\n",
        ("tests/test_schedule.py", "-k", "states"),
    ),
    Mutant(
        "who cannot be put back ends the one that wanted the room",
        "decoding/schedule.py",
        "            self._fail(job, error, events)\n            return\n        job.states = []",
        "            raise error\n        job.states = []",
        ("tests/test_schedule.py", "-k", "put_back"),
    ),
    Mutant(
        "a context of a head counts as read though its pass has failed",
        "backends/torch/head_scorers.py",
        "        ids, states = self._news(context)\n        found = yield",
        "        ids, states = self._news(context)\n        self._was_read(context, states)\n        found = yield",
        ("tests/test_heads.py", "-k", "shared_pass_that_fails"),
    ),
    Mutant(
        "a consumer that fails ends the engine",
        "serve/engine.py",
        "            except Exception:  # nobody is there to be told; the others go on\n",
        "            except KeyError:\n",
        ("tests/test_serve.py", "-k", "consumer_that_fails"),
    ),
    Mutant(
        "what drafts cost long ago is believed for ever",
        "lengths/load.py",
        "            self._forget()\n",
        "",
        ("tests/test_load.py", "-k", "learnt_anew"),
    ),
)


# -- the process that plants them ------------------------------------------------------------------


class Watcher:
    """A pytest plugin that remembers the first test that failed."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and self.failed is None:
            self.failed = str(getattr(report, "nodeid", "?"))


def forget(copy: Path) -> None:
    """Take every module of the copy out of the interpreter, so that the next import reads the files again."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] in ("specbench", "conftest") or (file and Path(file).is_relative_to(copy)):
            del sys.modules[name]


def test(copy: Path, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run a part of the suite; pytest's exit code and the first test that failed."""
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
    """Plant the named mutants in the copy that is the working folder; a line of JSON for each to stdout."""
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
        file = copy / "specbench" / mutant.file
        text = file.read_text(encoding="utf-8")
        began = time.perf_counter()
        if text.count(mutant.old) != 1:
            say(
                name=mutant.name,
                verdict="not found",
                by=f"{mutant.file} has it {text.count(mutant.old)} times",
            )
            continue
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            code, failed = test(copy, mutant.tests)
        finally:
            file.write_text(text, encoding="utf-8")
        verdict = {0: "survived", 1: "caught"}.get(code, f"pytest's code {code}")
        say(name=mutant.name, verdict=verdict, by=failed, seconds=round(time.perf_counter() - began, 1))


def say(**fields: object) -> None:
    """A line for the process that waits."""
    sys.__stdout__.write(json.dumps(fields) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


# -- the command -----------------------------------------------------------------------------------


def main() -> int:
    """Run it; the exit code."""
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
