"""The interface between a sweep and the engine that decodes for it: loaded models or servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specbench.base.errors import RunError
from specbench.bench.serving import Encoded, Workload
from specbench.decoding.records import Step
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions
from specbench.results.lines import CostLine, Pool, ServerAnswer, Speculation
from specbench.results.run import TargetModel
from specbench.rows import Row

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished generation.

    Attributes:
        token_ids: The output; for a server, the known part of it.
        ttft_s, decode_s: Time to the first emission (for a request, from when it was sent), and time after that.
        first_tokens: Tokens of the first emission.
        steps: Records of the steps; empty if specbench did not decode.
        log_probability: Natural logarithm of the target's probability of the output; ``None`` if not computed.
        thinking_tokens: How many of the first tokens are thinking; ``None`` if not known.
        thinking_s: Time from the first emission to the end of the thinking; ``None`` if not known.
        reported_tokens: Number of tokens of a server's output, since ``token_ids`` can be incomplete.
        server: Other facts that a server reported.
        arrived_s, queued_s: When a request was sent, in seconds since the group began, and its time in the queue.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prefill_s: float
    ttft_s: float
    decode_s: float
    first_tokens: int = 1
    steps: tuple[Step, ...] = ()
    peak_memory_bytes: int | None = None
    log_probability: float | None = None
    thinking_tokens: int | None = None
    thinking_s: float | None = None
    reported_tokens: int | None = None
    server: ServerAnswer | None = None
    arrived_s: float = 0.0
    queued_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens of the output."""
        return len(self.token_ids) if self.reported_tokens is None else self.reported_tokens


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Generations that were decoded together.

    Attributes:
        requests: The generations, in the order in which they were sent.
        seconds: Time from the beginning until the last measured request ended.
        tokens: Tokens emitted in this time, including those of requests that are not measured.
        pool: Usage of the target's KV cache pool; ``None`` without a pool.
        speculation: Draft counts of all requests, if a server reports them.
    """

    requests: tuple[Outcome, ...]
    seconds: float
    tokens: int
    pool: Pool | None = None
    peak_memory_bytes: int | None = None
    speculation: Speculation | None = None


class BenchEngine(Protocol[Encoded]):
    """Interface of an engine that decodes for a sweep. Its models stay loaded, and calls do not affect later calls."""

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """Return the field ``target`` of ``run.json``."""
        ...

    @property
    def heads(self) -> Mapping[str, TrainingMetadata]:
        """The training metadata of trained heads, by the names of their drafters."""
        return {}

    def encode(self, prompt: Prompt, answers: Sequence[Any]) -> Encoded:
        """Return a conversation in the engine's form, up to the turn after the given answers: ids, or texts."""
        ...

    def count_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens the first turn of a prompt has, with everything that a chat template adds.

        Raises:
            UsageError: There is no tokenizer.
        """
        raise RunError("This engine cannot count the tokens of prompts.")

    def generate(self, config: Row, prompt: Encoded, decoding: DecodingOptions, *, seed: int) -> Outcome:
        """Decode one prompt; any exception means that this generation failed."""
        ...

    def generate_group(
        self, config: Row, workload: Workload[Encoded], decoding: DecodingOptions
    ) -> GroupOutcome:
        """Decode requests together, in the batch of the configuration; any exception means that all failed."""
        ...

    def measure_costs(
        self,
        prompt: Encoded,
        widths: Sequence[int],
        tree_nodes: Sequence[int] = (),
        context: int | None = None,
    ) -> list[CostLine]:
        """Time forward passes of the target with each number of tokens, and of the drafters.

        For drafters of trees, forward passes with ``tree_nodes`` nodes are timed too. ``context`` is the number of
        tokens before them; ``None`` for the usual one. A sweep repeats this call, so
        that a disturbance affects a few of the times but not their median.

        Raises:
            RunError: The forward passes cannot be timed.
        """
        raise RunError("Forward passes of this engine cannot be timed.")

    def difference(
        self, prompt: Encoded, tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        """Return where two greedy outputs first differ, and whether rounding explains this; ``None`` if unknown."""
        return None
