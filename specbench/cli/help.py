"""Commands whose help lists their options under headings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from specbench.cli.conflicts import refuse_conflicts
from specbench.cli.resume import options_of_run
from specbench.options import OUTPUT

MOST_USED = (
    "target", "drafter", "server", "prompts", "max_new_tokens", "temperature", "draft_policy", "gamma", "dtype",
    "compare", "batch", "limit", "out", "resume", "port", "tokens", "minutes", "json_output", "verbose", "quiet",
)  # fmt: skip
"""Options that people need first, in the order in which help lists them."""
_FIRST = 10

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "generate": (
        'specbench generate "Why is the sky blue?"',
        'specbench generate --compare --target org/big --drafter org/small "Write a quicksort."',
        'specbench generate --debug -n 32 "Count to ten."',
    ),
    "serve": ("specbench serve", "specbench serve --target org/big --drafter org/small --batch 4"),
    "train": (
        "specbench train --out head --kind medusa --tokens 200000",
        "specbench train --out head --target org/big --resume",
    ),
    "predict": (
        "specbench predict --answers log.jsonl --drafter org/small --target-pass-ms 25",
        "specbench predict --answers log.jsonl --tokenizer org/big --temperature 0 --target-pass-ms 25",
    ),
    "tune": (
        "specbench tune",
        "specbench tune --target org/big --drafter org/small --minutes 15",
    ),
    "sweep": (
        "specbench sweep --gamma 1..8",
        "specbench sweep --target org/big --drafter org/small --drafter lookup --until sure",
        "specbench sweep --server plain=http://127.0.0.1:8000 --server drafting=http://127.0.0.1:8001",
    ),
    "plot": ("specbench plot results/", "specbench plot results/ --only speedup --format svg"),
    "compare": (
        "specbench compare results/old results/new",
        'specbench compare "results/run:lookup auto" results/run:plain',
    ),
    "export": (
        "specbench export results/ --to vllm",
        'specbench export "results/run:lookup γ=4" --to llama.cpp',
    ),
    "check": (
        "specbench check",
        "specbench check --temperature 1 --drafter self:int8",
        "specbench check --target org/big --outputs answers.jsonl",
        "specbench check --server http://localhost:8000/v1 --against http://localhost:8001/v1 -t 1",
    ),
    "doctor": ("specbench doctor http://127.0.0.1:8000",),
}
"""The commonest command lines of commands that take more than a name."""


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the headings of their ``rich_help_panel``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, with the options of a run that is continued."""
        if "--resume" in args and ctx.info_name in ("sweep", "tune"):
            args = [*options_of_run(self, ctx, args), *args]
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            refuse_conflicts(ctx)
        return rest

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the commonest command lines, and then what the command does."""
        for line in EXAMPLES.get(ctx.info_name, ()):
            formatter.write(f"  {line}\n")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups under headings; of a command with many, the most used ones come first."""
        parameters = {str(each.name): each for each in self.get_params(ctx)}
        first = [name for name in MOST_USED if name in parameters][:_FIRST]
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        if len(parameters) > 2 * _FIRST:
            groups["Most used options"] = []
        for name in sorted(parameters, key=lambda name: first.index(name) if name in first else _FIRST):
            parameter = parameters[name]
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.secondary_opts and parameter.default is True:  # what is on needs no word
                    record = parameter.secondary_opts[0], str(getattr(parameter, "help", ""))
                heading = getattr(parameter, "rich_help_panel", None) or OUTPUT
                if parameter.param_type_name == "argument":
                    heading = "Arguments"
                elif name in first and "Most used options" in groups:
                    heading = "Most used options"
                groups.setdefault(heading, []).append(record)
        groups = {heading: records for heading, records in groups.items() if records}
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
