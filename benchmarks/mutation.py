"""Plant known bugs, one at a time, and see that a test notices each.

    python benchmarks/mutation.py                  # all of them, some minutes
    python benchmarks/mutation.py stop residual    # those whose names contain a word

`pytest -m slow tests/test_mutation.py` plants those of the algorithm. A bug replaces a piece of one function, which is
found by its name; how the source is formatted does not matter. A process of its own imports the package with that
function changed, and runs the tests that are named beside the bug. Nothing is written to the source.
"""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Bug(NamedTuple):
    """A bug to plant.

    Attributes:
        name: What is wrong with it.
        where: ``file:name``, the qualified name of a function in a file of the package.
        old: What to replace: Python source, which the function has exactly once.
        new: What to put in its place.
        tests: What should notice: files of ``tests/``, and options of pytest.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


def table(text: str) -> tuple[Bug, ...]:
    """Read bugs of four lines each: the name; place and tests; what to replace; what to put in its place."""
    bugs = []
    for block in text.strip().split("\n\n"):
        name, place, old, new = block.splitlines()
        where, tests = place.split(maxsplit=1)
        bugs.append(Bug(name, where, old.removeprefix("- "), new.removeprefix("+ "), tests))
    return tuple(bugs)


ALGORITHM = table("""
rollback keeps one token too many
decoding/loop.py:decode  test_decode.py
- target.rollback(len(context) - 1, verdict.path)
+ target.rollback(len(context), verdict.path)

rollback removes one token too many
decoding/loop.py:decode  test_decode.py
- target.rollback(len(context) - 1, verdict.path)
+ target.rollback(len(context) - 2, verdict.path)

the drafter is not rolled back
drafters/chain.py:ChainDrafter.update  test_decode.py
- self.scorer.rollback(len(outcome.context) - 1, outcome.path)
+ pass

wrong guesses stay in the drafter's cache
drafters/chain.py:ChainDrafter._drop_guesses  test_guesses.py -k those_without_guesses
- self.scorer.rollback(len(context) + right)
+ pass

specinfer tests what a draw has chosen before that draw
decoding/verdicts.py:specinfer  test_trees.py -k 'follows_from_a_draw'
- (draws or certain).pop(place)
+ (certain or draws).pop(place if not certain else 0)

a drafter draws from what a format bans
decoding/sampling.py:Sampling.rules_out_all  test_distributions.py -k banned
- self.defaults is None and self.format is None
+ True

the entry of a node that was right stays where it is
decoding/loop.py:decode  test_trees.py -k 'greedy_outputs'
- target.rollback(len(context) - 1, verdict.path)
+ target.rollback(len(context) - 1)

a node sees the one next to it
decoding/tree.py:_ancestors  test_trees.py -k 'greedy_outputs'
- parent + 1
+ row - 1

a node has the position after the one next to it
decoding/tree.py:tree_rows  test_trees.py -k 'greedy_outputs'
- rows.sum(axis=1, dtype=np.int64)
+ first + np.arange(1, len(rows) + 1)

the logits after another node are read
decoding/verify.py:judge_greedily  test_trees.py -k 'greedy_outputs'
- logits[node + 1 : node + 2]
+ logits[node : node + 1]

a candidate keeps its share of q when it was drawn
decoding/verdicts.py:_without  test_trees.py test_distributions.py -k 'refused and traversal or has_read'
- rest[token] = 0.0
+ pass

what is left of p is not made whole again
decoding/verdicts.py:traverse.visit  test_trees.py test_distributions.py -k 'refused and traversal or has_read'
- total / (total + 1.0 - chance)
+ total

recursive keeps a rejected candidate's share of p
decoding/verdicts.py:recursive  test_distributions.py -k 'exact_or_refused and recursive'
- p = remainder(p, q, token)
+ pass

a drafter's best token is hidden from the next reader
decoding/distributions.py:largest  test_trees.py -k largest
- values[every, place] = value
+ value = place

a node of a tree is read at the place of another one
drafters/model.py:ModelDrafter._frontier  test_trees.py -k 'greedy_outputs and dynamic'
- {node: i for i, node in enumerate(self._read_nodes)}
+ {node: i - 1 for i, node in enumerate(self._read_nodes)}

a drafter keeps nodes off the path
drafters/model.py:ModelDrafter.update  test_trees.py test_distributions.py -k 'refused and traversal or has_read'
- {node: i for i, node in enumerate(self._read_nodes)}
+ {node: 0 for i, node in enumerate(self._read_nodes)}

the drafter does not catch up with what it was not fed
backends/torch/scorer.py:Scorer._read  test_properties.py -k 'after_any_roll_back and llama-dynamic'
- context[first:]
+ context[max(first, len(context) - 1) :]

residual without clamp
decoding/verify.py:residual  test_properties.py -k a_step_emits_p
- (p[i] - draft.q[i]).clamp_min_(0.0)
+ p[i] - draft.q[i]

p and q swapped in the residual
decoding/verify.py:residual  test_accept.py
- p[i] - draft.q[i]
+ draft.q[i] - p[i]

p and q swapped in the acceptance
decoding/verify.py:acceptance_probabilities  test_accept.py
- p_of_token.div_(q_of_token.clamp_min_(_SMALLEST))
+ q_of_token.div_(p_of_token.clamp_min_(_SMALLEST))

a stop inside the accepted run is ignored
decoding/loop.py:decode  test_decode.py
- emitted, reason = stops.cut(verdict.tokens)
+ emitted, reason = len(verdict.tokens), stops.cut(verdict.tokens[-1:])[1]

a token of low confidence is thrown away
drafters/chain.py:ChainDrafter.propose  test_exact.py -k 'output_distribution and model-multinomial'
- drawn is None
+ drawn is None or (drawn[2] is not None and float(drawn[2][drawn[0]]) < 0.2)

the numbers that tested the drafts are used again for the draw
decoding/sampling.py:Randomness.test  test_properties.py -k 'random_number or no_say'
- self.generator
+ self.generator.clone_state()

the generator is seeded again for every draw
decoding/sampling.py:Randomness.draw  test_properties.py -k 'random_number or no_say'
- u = float(torch.rand(1, generator=self.generator, dtype=torch.float64))
+ self.generator.manual_seed(0); u = float(torch.rand(1, generator=self.generator, dtype=torch.float64))

the rejected token is returned instead of the corrected one
decoding/verify.py:judge_greedily  test_decode.py
- Verdict(path, tokens)
+ Verdict(path, [*tokens[:-1], (draft.tokens + tokens[-1:])[len(path)]])

drafts after a rejected one are kept
decoding/sampling.py:Randomness.test  test_sampling.py
- next((i for i, chance in enumerate(chances) if not r[i] < chance), len(r))
+ sum(r[i] < chance for i, chance in enumerate(chances))

the bonus token comes from the row before
decoding/verify.py:judge_chain  test_exact.py -k 'output_distribution and model-multinomial'
- p[accepted]
+ p[max(0, accepted - 1)]

a certain drafter's rejected token may come again
decoding/verify.py:residual  test_accept.py
- rest[draft.tokens[i]] = 0.0
+ pass

tokens are drawn from another distribution than the q that is kept
drafters/chain.py:ChainDrafter.draw  test_exact.py -k 'output_distribution and model-multinomial'
- plan.random.draw(q)
+ plan.random.draw(q * q)

α of tokens that were not tested
decoding/explain.py:record_of  test_decode.py
- emitted if cut else accepted + (closing == "corrected")
+ gamma

the repetition penalty sees drafts that come later
decoding/sampling.py:Sampling._penalize_seen  test_sampling.py
- [token for place, token in fresh if place < drafts]
+ [token for place, token in fresh]

the repetition penalty remembers another context
decoding/sampling.py:_Seen.and_more  test_properties.py -k own_context
- not known or len(self.mask) != width or self.ids.device != scores.device
+ len(self.mask) != width or self.ids.device != scores.device

top-k drops the last token that it should keep
decoding/sampling.py:_keep_top_k  test_sampling.py
- scores < smallest_kept
+ scores <= smallest_kept

a nucleus lacks its edge
decoding/sampling.py:_keep_nucleus  test_sampling.py
- scores < edge
+ scores <= edge

min-p is taken of the mass instead of the largest
decoding/sampling.py:_keep_min_p  test_sampling.py
- min_p * top
+ min_p

one token more than requested
decoding/loop.py:decode  test_decode.py
- request.limit - len(context) - 1
+ request.limit - len(context)

accepted drafts after a stop are counted
decoding/explain.py:record_of  test_decode.py
- min(accepted, emitted)
+ accepted

the drafter goes beyond its own context
drafters/chain.py:ChainDrafter._room  test_decode.py
- limit - self._length(context) + 1
+ limit - self._length(context) + 2

a draft policy's state leaks into the next prompt
decoding/loop.py:_observe  test_decode.py
- request.policy.begin(NewPrompt(unread, token_s, traits))
+ pass

states of drafts off the path reach the drafter
decoding/loop.py:_along  test_heads.py -k 'formula or every_draft'
- hidden[[*range(before), *(before + node for node in path)]]
+ hidden[: before + len(path)]
""")
"""Bugs of drafting, verification and the loop."""

SYSTEM = table("""
a self-drafter leaves its keys in the target's cache
drafters/model.py:SelfDrafter.drafting  test_decode.py
- self.scorer.rollback(verified)
+ pass

recurrent states are not rolled back
backends/torch/caches.py:KVCache.rollback  test_recurrent.py -k 'rollback or alone'
- self.recurrent.rollback(length)
+ pass

a rollback leaves the inputs of the convolution
backends/torch/recurrent_cache.py:History.rollback  test_recurrent.py -k 'rollback or alone'
- end = self.columns.shape[-1] - surplus
+ end = self.columns.shape[-1]

the preallocated window lacks a position
backends/torch/cache_layers.py:PreallocatedSlidingLayer.update  test_caches.py -k 'mistral or llama or gemma3'
- self.sliding_window - 1
+ self.sliding_window - 2

the preallocated cache keeps one position more
backends/torch/cache_layers.py:PreallocatedLayer.rollback  test_caches.py -k 'mistral or llama or gemma3'
- max(length, 0)
+ max(length, 0) + 1

what was no number stays in the cache
backends/torch/cache_layers.py:zero_nonfinite  test_caches.py -k spoils
- used.zero_()
+ pass

a request that was put back drafts on without the target's keys
decoding/schedule.py:_Job.due  test_schedule.py
- self.pending.scorer is not target and target.cached_len < self.verified
+ False

hidden states of a prompt's first parts are lost
decoding/schedule.py:_Job.with_states  test_schedule.py
- output._replace(hidden=torch.cat(states))
+ output

passes do not wait for those that draft
decoding/schedule.py:Scheduler._chosen  test_schedule.py
- [job for job in self._active if job.drafts] or candidates
+ candidates

memory of a request that has ended stays in use
decoding/schedule.py:Scheduler._end  test_schedule.py
- scorer.rollback(0)
+ pass

a request writes into blocks that others share
backends/torch/blocks.py:BlockAllocator.extend  test_pools.py -k whatever_others_do
- shared = [i for i in written if self._holders[blocks[i]] > 1]
+ shared: list[int] = []

blocks are shared whatever precedes them
backends/torch/blocks.py:BlockAllocator._digest  test_pools.py -k whatever_others_do
- before + part.tobytes()
+ part.tobytes()

a token of a request sees the one behind it
backends/torch/pools.py:_seen  test_batch.py -k 'gets_alone and llama-128'
- keys <= own
+ keys <= own + 1

requests get the rows of others
backends/torch/batch.py:BatchedModel.score  test_batch.py -k 'gets_alone and llama-128'
- made.logits.split(counts)
+ made.logits.split(counts)[::-1]

what a cheaper form has read passes for the target's own
backends/torch/scorer.py:Scorer.mark_read  test_pools.py -k cheaper_form
- self._owns_cache
+ True

half a line stays when a write fails
results/store.py:_append  test_store.py
- os.ftruncate(file, before)
+ pass

half a line is taken for a whole one
results/store.py:_end_last_line  test_store.py
- parse(data[start:])
+ pass

a run continues with longer outputs
bench/manifest.py:refuse_other  test_cli_sweep.py -k cannot_be_compared
- stored != value
+ False

a resumed search measures everything again
tune/search.py:Search.measured  test_cli_tune.py -k interrupted_search
- cell.key not in self._stored
+ cell.key not in self._stored or not cell.warmup
""")
"""Bugs of caches, pools, batches and stored runs."""

CONTROL = ALGORITHM[0]._replace(name="(nothing changed)", new=ALGORITHM[0].old, tests="test_accept.py")


class LostError(Exception):
    """Raised if the place of a bug is missing, or not unique."""


def mutated(bug: Bug, package: Path) -> tuple[Path, ast.Module]:
    """Return the file that a bug changes, and its syntax tree with the bug; may raise LostError."""
    file, _, name = bug.where.partition(":")
    path = package / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owner: Any = tree
    for part in name.split("."):
        owner, parent = next((each for each in owner.body if getattr(each, "name", "") == part), None), owner
        if owner is None:
            raise LostError(f"{bug.name}: no {name} in {file}")
    source, old = ast.unparse(owner), ast.unparse(ast.parse(bug.old))
    found = list(re.finditer(rf"(?<![\w.]){re.escape(old)}(?!\w)", source))
    if len(found) != 1:
        raise LostError(f"{bug.name}: {name} in {file} has {len(found)} times: {old}")
    changed = source[: found[0].start()] + bug.new + source[found[0].end() :]
    parent.body[parent.body.index(owner)] = ast.parse(changed).body[0]
    return path, tree


def run_tests(bug: Bug) -> str | None:
    """Plant the bug in this process, run its tests, and return the first that failed."""
    path, tree = mutated(bug, ROOT / "specbench")
    code, load = compile(tree, str(path), "exec"), SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: code if Path(self.path) == path else load(self, name)  # type: ignore[method-assign]
    for name in [each for each in sys.modules if each.partition(".")[0] == "specbench"]:
        del sys.modules[name]  # imported by whoever started this process
    import pytest
    import torch

    torch.set_num_threads(1)
    failed: list[str] = []

    class Watcher:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:  # a property's failing examples are not kept
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        arguments = [f"tests/{each}" if each.endswith(".py") else each for each in shlex.split(bug.tests)]
        options = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--timeout", "60", *arguments]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = int(pytest.main(options, plugins=[Watcher()]))
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with {status}: {printed.getvalue()[-2000:]}")
    return failed[0] if failed else None


def noticed_by(bug: Bug) -> str | None:
    """Return the test that notices a bug, which is planted in a new process."""
    context = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "pytest"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(run_tests, bug).result()


def main() -> int:
    """Plant the bugs whose names contain one of the words, and return the exit code."""
    words = sys.argv[1:] or [""]
    bugs = [bug for bug in (*ALGORITHM, *SYSTEM) if any(word in bug.name for word in words)]
    print(f"without a bug: {noticed_by(CONTROL) or 'nothing fails'}")
    survived = 0
    for bug in bugs:
        test = noticed_by(bug)
        survived += test is None
        print(f"{'survived' if test is None else 'caught':9} {bug.name}  [{test or bug.tests}]", flush=True)
    print(f"{len(bugs) - survived} of {len(bugs)} caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
