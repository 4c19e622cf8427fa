"""Running `specbench check --server`: the sampled output of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.bench.encoding import encode_conversation
from specbench.bench.prompts import load_prompts
from specbench.check.render import server_parts
from specbench.check.servers import PROMPTS, TOKENS, ServerCheck, target_score
from specbench.cli.check_options import SERVER_ANSWERS
from specbench.cli.check_run import show_result
from specbench.cli.progress import StageProgress, starting
from specbench.cli.summary import show_notes
from specbench.experiment import server_keys
from specbench.loaded import load_models, load_notes, transforms_of
from specbench.specs.servers import ServerSpec, parse_server

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.cli.check_options import CheckedOptions
    from specbench.recipe import Recipe


def check_server(asked: CheckedOptions, recipe: Recipe, tokens: int | None, *, scored: bool) -> int:
    """Check the sampled output of a server, and print the result; return the exit code.

    Args:
        tokens: Most tokens of an answer; ``None`` for the default.
        scored: Whether the target scores the answers.
    """
    if recipe.sampling.temperature == 0:
        raise UsageError("--server checks sampled output.", "Add --temperature 1.")
    specs, tokens = _specs(asked), tokens or TOKENS
    if not scored and len(specs) == 1 and recipe.sampling.temperature != 1:
        raise UsageError(
            "Log probabilities of servers are those of temperature 1.",
            "Give --temperature 1, or --target or --against to compare with.",
        )
    notes, score, encoded = list[str](), None, list[list[int]]()
    with starting(asked.quiet) as progress:
        prompts = load_prompts(asked.prompts or ["all"])
        prompts = sorted(prompts, key=lambda prompt: len(prompt.turns[0]))[:PROMPTS]
        if scored:
            target, _ = load_models(recipe, (), progress)
            encoded = [encode_conversation(target, prompt) for prompt in prompts]
            score = target_score(target, transforms_of(recipe, target.language_model), encoded)
            notes = load_notes(target, (), recipe.decoding)
    messages = [_messages(prompt) for prompt in prompts]
    rounds = -(-(asked.limit or SERVER_ANSWERS) // len(prompts))
    check = ServerCheck(
        specs,
        server_keys(specs),
        messages,
        recipe.sampling.temperature,
        tokens,
        rounds,
        score,
        [*map(len, encoded)],
    )
    whom = f" to each of {len(specs)} servers" if len(specs) > 1 else ""
    notes.append(
        f"Sends at most {counted(check.requests, 'request', form=',')}: {counted(len(prompts), 'prompt')},"
        f" {rounds} times each{whom}, for up to {tokens} tokens."
    )
    try:
        with StageProgress(asked.quiet) as bar:
            if not asked.quiet:
                show_notes(notes, spaced=False, console=bar.console)
            for done in check.run():
                bar.update("asking", done, rounds)
    finally:  # an interrupt loses nothing of what is answered
        if check.done:
            check.look()
            show_result(asked, check.to_dict(), server_parts(check))
    return int(check.verdict != "no deviation")


def _specs(asked: CheckedOptions) -> list[ServerSpec]:
    """Return the server to check and the one to compare it with; itself for ``off``."""
    server = parse_server(str(asked.server), "server")
    if asked.against is None:
        return [server]
    return [server, server if asked.against == "off" else parse_server(asked.against, "against")]


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    """Return a prompt's first turn as messages."""
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return [*system, {"role": "user", "content": prompt.turns[0]}]
