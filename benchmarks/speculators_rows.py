"""Compare the rows of block drafters with those of the package `speculators`, for the same files.

    python -m venv other && other/bin/pip install speculators
    python benchmarks/speculators_rows.py --python other/bin/python

The package has versions of torch and transformers of its own, so its modules run in another process: it gets the files
of a head, hidden states and a text, and returns the logits after the text's tokens. Heads of every kind have random
weights, and two are written as `specbench train` writes them. Rows may differ by 1e-4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1e-4
CONTEXT, DRAFT = [5, 19, 2, 77, 11, 3, 140, 9], [44, 8, 61]
STATES, FOUND = "states.safetensors", "found.safetensors"


# -- in the process of `speculators` ----------------------------------------------------------------


def run_speculators(folder: Path) -> None:
    """Compute the rows of the head in a folder with its modules of `speculators`, and write them."""
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    model: Any = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    model.config.transformer_layer_config._attn_implementation = "eager"
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    given = load_file(folder / STATES)
    context, tokens = len(CONTEXT), [*CONTEXT, *DRAFT]
    model._create_mask_fn = create_float_mask
    padded = torch.zeros(1, 64, dtype=torch.long)
    padded[0, : len(tokens)] = torch.tensor(tokens)
    states = torch.zeros(1, 64, given["states"].shape[1])
    states[0, : len(given["states"])] = given["states"]
    loss_mask, documents = torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.long)
    loss_mask[0, context - 1] = 1  # the only anchor
    seen = _Seen(sys.modules[type(model).__module__])
    with torch.no_grad():
        last = torch.zeros(1, 64, model.config.transformer_layer_config.hidden_size)
        model.forward(states, padded, loss_mask, last, documents, max_anchors=1)
    save_file({name: each.float().contiguous() for name, each in seen.rows(model).items()}, folder / FOUND)


class _Seen:
    """What a module of `speculators` computes its loss from, in place of the loss."""

    def __init__(self, module: ModuleType) -> None:
        self._given: dict[str, Any] = {}

        def compute_metrics(*given: Any, **named: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            names = ("logits", "targets", "confidence_logits")
            self._given = dict(zip(names, given, strict=False)) | named
            return torch.zeros(()), {}

        vars(module)["compute_metrics"] = compute_metrics
        # DFlash 2 learns with the target's token among the candidates, and drafts without.
        vars(module)["selector_training_candidates"] = lambda ids, wanted: (ids, wanted, wanted)

    def rows(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the logits at the places that predict tokens, and log-odds of acceptance."""
        given, first = self._given, int(not model.config.sample_from_anchor)
        if "candidate_logits" in given:
            unary = given["unary_logits"][0]
            ids, scores = given["training_candidate_ids"][0], given["candidate_logits"][0]
            return {"logits": torch.full_like(unary, float("-inf")).scatter_(-1, ids, scores)[first:]}
        found = {"logits": given["logits"][0, first:]}
        if getattr(model, "confidence_head", None) is None:
            return found
        return found | {"odds": given["confidence_logits"][0, first:]}


# -- in this process -------------------------------------------------------------------------------


def random_heads() -> Iterator[tuple[str, dict[str, Any], dict[str, torch.Tensor]]]:
    """Yield names, settings and tensors of heads with random weights."""
    from head_files import (
        DRAFTED,
        GROUP,
        RANK,
        VOCAB,
        block_tensors,
        conditional_tensors,
        speculators_block_settings,
    )

    for anchor in (False, True):
        named = {"projector_type": None, "sample_from_anchor": anchor}
        yield f"dflash, {anchor=}", speculators_block_settings(**named), block_tensors(drafted=DRAFTED)
        for markov in ("vanilla", "gated", "rnn"):
            more = {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": markov}
            tensors = conditional_tensors("dspark", drafted=DRAFTED, markov=markov)
            yield f"dspark, {markov}, {anchor=}", speculators_block_settings(**named, **more), tensors
    more = {
        "speculators_model_type": "dflash2", "draft_vocab_size": VOCAB, "conv_group_size": GROUP,
        "selector_rank": RANK, "selector_top_k": 4, "projector_type": None,
    }  # fmt: skip
    yield "dflash2", speculators_block_settings(**more), conditional_tensors("dflash2")


def write_heads(folder: Path, target: Any) -> Iterator[tuple[str, Path]]:
    """Write heads of every kind, and yield their names and folders."""
    from head_files import write_head

    from specbench.train import result
    from specbench.train.kinds import make_student
    from specbench.train.lessons import Teacher

    model = target.language_model.model
    verifier = {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]}
    for number, (name, settings, tensors) in enumerate(random_heads()):
        settings["transformer_layer_config"] |= {"model_type": "qwen3"}
        methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        settings["speculators_config"] = {
            "algorithm": settings["speculators_model_type"], "default_proposal_method": "greedy",
            "proposal_methods": methods, "verifier": verifier,
        }  # fmt: skip
        yield name, write_head(folder / str(number), settings, tensors)
    for kind in ("dflash", "dspark"):
        for drafted in (None, torch.arange(0, 200, 2)):
            teacher = Teacher(model, drafted)
            student = make_student(kind, model, teacher.head, len(DRAFT) + 1, 0, 2, mask=7)
            with torch.no_grad():
                for parameter in student.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
            made = folder / f"{kind}-{drafted is None}"
            result.write_head(made, student, target, teacher.head, drafted, compact=False)
            which = "all tokens" if drafted is None else "draft vocabulary"
            yield f"{kind} from specbench train, {which}", made


def own_rows(folder: Path, target: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of specbench's drafter, and the acceptance that it predicts; write the states that it reads."""
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import ForwardRequest
    from specbench.models.drafters import load_drafter
    from specbench.options import LoadOptions

    drafter: Any = load_drafter(str(folder), target, LoadOptions(dtype="float32"))
    with torch.inference_mode():
        ids = torch.tensor([CONTEXT[:-1]])
        output = target.language_model.model(input_ids=ids, output_hidden_states=True)
    states = torch.stack([output.hidden_states[layer][0] for layer in drafter.layers], dim=1)
    save_file({"states": states.flatten(1).clone()}, folder / STATES)
    drafter.begin(CONTEXT)
    drafter.update(StepOutcome(CONTEXT, 1, torch.empty(0), states=states))
    draft = DRAFT[: drafter.scorer.longest - 1]
    return drafter.scorer.score(
        ForwardRequest(drafter.scorer, CONTEXT, draft)
    ).logits, drafter.scorer.acceptance


def compare(python: str) -> int:
    """Print the largest difference for each head; return the exit code."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import tiny_llama, tiny_tokenizer

    from specbench.models.target import wrap_target

    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tiny_llama(0, layers=3)
        for parameter in model.parameters():
            parameter.data = (
                parameter.data.bfloat16().float()
            )  # so that files of heads hold its rows to the bit
        model.save_pretrained(folder / "target")
        model.config.architectures = ["LlamaForCausalLM"]
        target = wrap_target(model, tiny_tokenizer(), name=str(folder / "target"), pack=False)
        heads = dict(write_heads(folder, target))
        own = {name: own_rows(head, target) for name, head in heads.items()}
        command = [python, __file__, "--of", *map(str, heads.values())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        for name, head in heads.items():
            rows, acceptance = own[name]
            theirs = load_file(head / FOUND)
            expected = theirs["logits"][: len(rows)]
            finite = expected.isfinite()
            assert rows.shape == expected.shape, (rows.shape, expected.shape)
            assert torch.equal(finite, rows.isfinite()), "another set of tokens"
            found = float((rows - expected)[finite].abs().max())
            if acceptance is not None:
                chances = theirs["odds"][: len(rows)].sigmoid()
                found = max(found, float((acceptance - chances).abs().max()))
            kind = json.loads((head / "config.json").read_text(encoding="utf-8"))["speculators_model_type"]
            assert (acceptance is not None) == (kind == "dspark")
            print(f"{name}: {len(rows)} rows differ by {found:.1e}")
            worst = max(worst, found)
    print(f"The largest difference is {worst:.1e}; allowed are {LIMIT:.0e}.")
    return int(worst > LIMIT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="Python with the package speculators")
    parser.add_argument("--of", type=Path, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of is None:
        raise SystemExit(compare(arguments.python))
    for each in arguments.of:
        run_speculators(each)
