"""Train a head: the target writes texts, and ``transformers.Trainer`` trains on them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from specbench.base.cache import cache_folder
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, write_bytes, write_text
from specbench.base.progress import quiet_transformers
from specbench.bench.encoding import encode_conversation
from specbench.models.checkpoints import text_config
from specbench.models.drafters import require_states
from specbench.models.training_metadata import TRAINING_FILE
from specbench.train import TrainingSettings
from specbench.train.batches import Batches
from specbench.train.students import EagleStudent, MedusaStudent
from specbench.train.texts import Text, write_texts

if TYPE_CHECKING:
    from specbench.base.record import Json
    from specbench.bench.prompts import Prompt
    from specbench.models.target import Target

Update = Callable[[str, int, int | None, str], object]

STUDENTS: dict[str, type[EagleStudent]] = {"eagle": EagleStudent, "medusa": MedusaStudent}
"""Kinds of heads that can be trained."""

_SAVE_INTERVAL_S = 60.0
_MIN_VOCAB = 8192


def check_folder(out: Path, *, resume: bool) -> None:
    """Raise ``UsageError`` if a training cannot begin or go on in a folder, before anything is loaded."""
    unfinished = any(out.glob("state-*"))
    if resume and not unfinished:
        raise UsageError(f"There is no unfinished training in {str(out)!r}.", "Leave --resume out.")
    if unfinished and not resume:
        raise UsageError(
            f"The training in {str(out)!r} has not ended.", "Add --resume, or choose another --out."
        )
    if out.exists() and not resume and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{str(out)!r} is not an empty folder.", "Choose another --out.")


def train_head(
    target: Target,
    prompts: Sequence[Prompt],
    settings: TrainingSettings,
    out: Path,
    *,
    source: str = "",
    resume: bool = False,
    update: Update = lambda *_: None,
) -> None:
    """Train a head, from the beginning or from its last checkpoint.

    Args:
        target: The target, which must not be quantized.
        prompts: What the target answers.
        out: The folder of the result. While the training runs, it has the head as of the last checkpoint.
        source: Name of the prompts in the training metadata.
        update: Receives the progress, as ``specbench.cli.progress.StageProgress.update`` does.

    Raises:
        UsageError: The target or head cannot be trained, the folder is not empty, the training was begun with other
            options, no prompt fits the target's context, or the texts are too short.
        RunError: A folder cannot be written.
    """
    check_folder(out, resume=resume)
    if target.quantization is not None:
        raise UsageError(f"Heads cannot be trained for an {target.dtype} target.", "Choose another dtype.")
    encoded = [encode_conversation(target, prompt) for prompt in prompts]
    where = f"The folder {str(out)!r} or the cache folder {str(cache_folder())!r}"
    full = RunError(f"{where} has no space left.", "Free some, and add --resume.")
    with file_errors(f"{where} cannot be written", "Change that, and add --resume.", full=full):
        facts = [target.language_model.identity, target.dtype, encoded, asdict(settings)]
        state = out / f"state-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
        if resume and not state.is_dir():
            raise UsageError(
                f"The training in {str(out)!r} was begun with other models, prompts or options.",
                "Give the same, or choose another --out.",
            )
        state.mkdir(parents=True, exist_ok=True)
        texts = write_texts(target, encoded, settings.tokens, settings.answer_tokens, settings.seed, update)
        if not any(text.written > 1 for text in texts):
            raise UsageError("The target's answers are too short to learn from.", "Choose other prompts.")
        student = _make_student(target, texts, settings)
        batches = Batches(target.language_model.model, texts, student, settings)
        with quiet_transformers():
            trainer = transformers.Trainer(
                student,
                _arguments(state, student, settings.seed),
                data_collator=itemgetter(0),
                train_dataset=batches,
                callbacks=[_Callback(lambda: write_head(out, student, target), update)],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=_last_checkpoint(state))
        write_head(out, student, target)
        metadata = {
            "format": 1,
            "kind": settings.kind,
            "target": {"name": target.name, "fingerprint": target.language_model.identity},
            "settings": asdict(settings),
            "data": {"prompts": source, "texts": len(texts), "tokens": batches.written},
            "loss": [
                (entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
            ],
        }
        write_text(out / TRAINING_FILE, json.dumps(metadata, indent=1) + "\n")
        shutil.rmtree(state)


def write_head(folder: Path, student: EagleStudent, target: Target) -> None:
    """Write a head's files, each of them atomically; raise ``OSError`` if they cannot be written."""
    vocab = student.draft_vocab.cpu()
    # The target's token is d + d2t[d], and t2d marks the draft vocabulary.
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, vocab, True)
    own = {"lm_head.weight": student.rows, "d2t": vocab - torch.arange(len(vocab)), "t2d": drafted}
    if student.algorithm is None:
        own = {"lm_heads.0.weight": student.rows, "token_map": vocab}
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in (student.tensors() | own).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    write_text(folder / "config.json", json.dumps(_config(student, target), indent=1) + "\n")


def _config(student: EagleStudent, target: Target) -> Json:
    """Return the ``config.json``."""
    model, vocab = target.language_model, len(student.draft_vocab)
    own = {"target": target.name, "target_fingerprint": model.identity, "dtype": "bfloat16"}
    if student.algorithm is None:
        return {**student.settings(), **own, "truncated_vocab_size": vocab}
    return {
        **student.settings(),
        **own,
        "speculators_model_type": student.algorithm,
        "speculators_version": "0.3.0",
        "draft_vocab_size": vocab,
        "speculators_config": {
            "algorithm": student.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": student.depth}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": model.model.config.architectures or [],
            },
        },
    }


def _make_student(target: Target, texts: Sequence[Text], settings: TrainingSettings) -> EagleStudent:
    """Return a new head, whose draft vocabulary are the tokens that the target writes most often."""
    model, whole = target.language_model.model, target.vocab_size
    total = text_config(model.config).num_hidden_layers
    require_states(target, (total,))
    written = Counter(token for text in texts for token in text.tokens[text.start :])
    read = Counter(token for text in texts for token in text.tokens[: text.start])
    ranked = [token for counts in (written, read) for token, _ in counts.most_common()]
    # Tokens that were not seen come last, by id: tokenizers number their merges by frequency.
    order = dict.fromkeys([*target.end_ids, *ranked, *range(whole)])
    size = max(_MIN_VOCAB, whole // 4)
    vocab = torch.tensor(sorted([token for token in order if token < whole][:size]), device=model.device)
    transformers.set_seed(settings.seed)
    student = STUDENTS[settings.kind](model, vocab, settings.depth)
    return student.to(model.device)


def _arguments(state: Path, student: EagleStudent, seed: int) -> transformers.TrainingArguments:
    arguments = transformers.TrainingArguments(
        str(state),
        num_train_epochs=1,  # of the batches in their order, which has the repetitions
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        learning_rate=student.rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=0.05,
        adam_beta2=0.95,
        weight_decay=0.01,
        bf16=student.rows.dtype == torch.bfloat16,
        use_cpu=student.rows.device.type == "cpu",
        seed=seed,
        logging_steps=0.01,  # of all steps
        save_strategy="no",  # _Callback saves
        save_total_limit=1,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # batches cannot be split over several
    return arguments


def _last_checkpoint(state: Path) -> str | None:
    """Return the folder of the last whole checkpoint; its last file is that of the trainer's state."""
    whole = [file.parent for file in state.glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda folder: int(folder.name.partition("-")[2]), default=None)
    return None if last is None else str(last)


class _Callback(TrainerCallback):
    """Shows the progress, and saves a checkpoint and the head every minute."""

    def __init__(self, write: Callable[[], None], update: Update) -> None:
        self._write, self._update, self._saved = write, update, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        step, total = state.global_step, state.max_steps
        losses = [f", loss {entry['loss']:.2f}" for entry in state.log_history if "loss" in entry]
        self._update("training", step, total, f"step {step:,} of {total:,}{''.join(losses[-1:])}")
        if time.monotonic() - self._saved >= _SAVE_INTERVAL_S:
            control.should_save, self._saved = True, time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._write()
