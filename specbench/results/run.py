"""``run.json``: what a run measured, on which machine, and its conclusions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from specbench.base.errors import unknown
from specbench.base.record import Count, Estimate, Json, Number, Record, Size, doc
from specbench.base.textsafe import one_line
from specbench.decoding.theory import PassCosts
from specbench.models.training_metadata import TrainingMetadata
from specbench.rows import Row

VERSION = 4
"""Of the files of a run; others are not read."""

KIND = "specbench-sweep"

OTHER_ANSWERS = ("beam",)
"""Kinds of configurations whose answers are not meant to be plain decoding's."""

FOREIGN = ("transformers", "assisted", *OTHER_ANSWERS)
"""Kinds of configurations that another library decodes."""

PLAIN = "plain decoding"
"""What speedups are over, in words, where it is no server."""

BUSY_WARNINGS = frozenset({"machine-busy", "steal"})
"""Warnings of ``findings.review`` that other programs use the machine."""

RIVALS = ("speculative", "server")
"""Kinds of configurations among which the fastest is looked for; one that is its own baseline is none of them."""


class Environment(Record):
    """The machine, and versions. ``null``: not known."""

    cpu: Annotated[str | None, doc("processor")] = None
    cpu_capability: Annotated[str | None, doc("torch's instruction set")] = None
    physical_cores: Count | None = None
    cores: Annotated[Count | None, doc("logical cores that the process may use")] = None
    threads: Annotated[Count | None, doc("of torch")] = None
    huge_pages: Annotated[str | None, doc("Linux's setting for transparent huge pages")] = None
    ram_gb: Size | None = None
    os: str | None = None
    python: str | None = None
    torch: str | None = None
    transformers: str | None = None
    specbench: str | None = None
    devices: Annotated[list[str] | None, doc("names of accelerators")] = None
    git_commit: Annotated[str | None, doc('of the checkout; "+" after it if files were changed since')] = None


class TargetModel(Record):
    """The target."""

    name: str | None = None
    fingerprint: Annotated[str | None, doc("hash of its weights")] = None
    dtype: str | None = None
    device: str | None = None
    vocab_size: Count | None = None
    packed: Annotated[bool | None, doc("whether native passes read its weights where oneDNN packed them")] = (
        None
    )
    model_defaults: Annotated[Json | None, doc("what was applied of the model's own generation settings")] = (
        None
    )


class PromptInfo(Record):
    """A prompt."""

    id: str
    category: str = ""
    turns: Annotated[Count, doc("how many were run")] = 1
    fingerprint: Annotated[str | None, doc("hash of the text")] = None


class Mismatch(Record):
    """A greedy output that is not plain decoding's, and where they part."""

    config: str
    prompt: str
    turn: Count
    repeat: Count
    position: Annotated[Count, doc("first differing token")]
    gap: Annotated[
        Number | None, doc("between the target's logits of the two tokens; `null` if not computed")
    ] = None
    gap_units: Annotated[Number | None, doc("the same in units of rounding")] = None
    numerical_tie: Annotated[bool | None, doc("whether rounding explains it")] = None

    def __post_init__(self) -> None:
        if self.numerical_tie is not None and self.gap is None:
            raise ValueError("without a gap nobody knows whether it is a tie")


class Tuned(Record):
    """What `specbench tune` found out about a configuration."""

    speedup: Annotated[Estimate, doc("over plain decoding")]
    categories: Annotated[dict[str, Estimate], doc("speedups by category")]
    verdict: Literal["faster", "slower", "cannot tell"]


class TuningAnswer(Record):
    """The answer of `specbench tune`."""

    headline: Annotated[str, doc("a sentence")]
    details: Annotated[list[str], doc("sentences")]
    choice: Annotated[str, doc("id of the configuration that it recommends")]
    provisional: bool
    measured: Annotated[dict[str, Tuned], doc("by id, all that were measured but plain decoding")]


class Tuning(Record):
    """The search of `specbench tune` ([tuning](tuning.md))."""

    predicted: Annotated[dict[str, Number], doc("speedups, by id")]
    raced: Annotated[list[str], doc("ids")]
    left_out: Annotated[dict[str, str], doc("why others were not, by id")]
    tokens: Annotated[
        Count | None, doc("of an output at most, if fewer than asked for: the target is slow")
    ] = None
    ranking: Annotated[list[str], doc("ids of those measured, the leader first; empty until it ends")] = []
    verdict: Annotated[str | None, doc("`faster`, `equal`, `plain`, `open`")] = None
    answer: Annotated[TuningAnswer | None, doc("what everything shows")] = None


class Stopping(Record):
    """When a sweep with ``--until`` stops ([metrics](metrics.md#stop-when-sure))."""

    until: Annotated[str, doc("`sure`, or the half-width of the interval, such as `5%`")]
    minutes: Annotated[Size | None, doc("time limit")]
    confidence: Annotated[
        Number, doc("of the intervals of speedups, so that those of all looks hold together")
    ]
    ended: Annotated[
        Literal["decided", "time", "blocks"] | None,
        doc("why: `decided`, `time` (the limit), `blocks` (all were decoded); `null` until it ends"),
    ] = None


class Run(Record):
    """What ``run.json`` holds."""

    schema: Annotated[Count, doc("version of the files")] = VERSION
    kind: Annotated[str, doc(f'"{KIND}"')] = KIND
    specbench: Annotated[str, doc("version that measured")] = ""
    run_id: Annotated[str, doc("random; ties lines to their run")]
    command: Annotated[list[str], doc("the command line, its paths cut down to names")] = []
    options: Annotated[Json, doc("everything that defines the grid and the measurement, see below")]
    environment: Environment
    target: TargetModel
    configs: list[Row]
    prompts: list[PromptInfo]
    heads: Annotated[dict[str, TrainingMetadata], doc("by drafter")] = {}
    seed: Annotated[int | None, doc("of the options, for convenience, like the next ones")] = None
    repeats: Count = 1
    warmup: Count = 0
    max_new_tokens: Count | None = None
    ignore_eos: bool = False
    created: Annotated[str | None, doc("ISO 8601, UTC")] = None
    finished: Annotated[str | None, doc("likewise; `null` until everything is measured")] = None
    costs: Annotated[
        PassCosts | None, doc("seconds of single passes; `null` if they could not be measured")
    ] = None
    differences: Annotated[list[Mismatch] | None, doc("looked at when the run ends; `null` before")] = None
    warnings: Annotated[list[Json], doc("what is doubtful: `id`, `severity`, `text`, `remedy`")] = []
    tuning: Annotated[Tuning | None, doc("of `specbench tune`")] = None
    stopping: Annotated[Stopping | None, doc("with `--until`: when it stops")] = None

    @property
    def baseline(self) -> str:
        """The name of the baseline of speedups: plain decoding, or the first of several servers."""
        return one_line(next((config.drafter for config in self.configs if config.kind == "server"), PLAIN))


def _named(rows: Sequence[Row], name: str) -> Row | None:
    """Return the row with an id or label; else the only one that is not a baseline and has the name as its drafter, its
    policy, or either of their shortest forms.
    """
    exact = next((row for field in ("id", "label") for row in rows if getattr(row, field) == name), None)
    wanted = [
        row
        for row in rows
        if row.id != row.baseline and name in (row.drafter, *row.id.split("@"), *row.label.rsplit(" ", 1))
    ]
    return exact or (wanted[0] if len(wanted) == 1 else None)


def find_config(run: Run, name: str, where: str) -> Row:
    """Return the configuration with an id or label, or the only one of which a word of these is meant.

    Raises:
        UsageError: There is no such configuration, or there are several.
    """
    if found := _named(run.configs, name):
        return found
    raise unknown("configuration", name, (one_line(config.label) for config in run.configs), f" in {where}")
