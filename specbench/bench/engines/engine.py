"""The interface between a sweep and what decodes: loaded models, servers, a test's script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specbench.base.errors import RunError
from specbench.bench.grid import SweepConfig
from specbench.bench.serving import Encoded, Workload
from specbench.decoding.records import Step
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions
from specbench.results.lines import CostLine, Pool, ServerAnswer, Speculation
from specbench.results.run import TargetModel

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished generation.

    Attributes:
        token_ids: The output; of a server as far as its tokens are known.
        ttft_s, decode_s: Time to the first emission, of a request from when it was sent, and after it.
        first_tokens: Tokens of the first emission.
        steps: Steps; empty if specbench did not decode.
        log_probability: Natural logarithm of the target's probability of the output; ``None`` if not computed.
        reported_tokens: Tokens of a server's output, where ``token_ids`` may lack some.
        server: What else a server reported.
        arrived_s, queued_s: When a request was sent, since the group began; how long it waited for its turn.
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
        requests: In the order in which they were sent.
        seconds: From the beginning to the end of the last of them.
        tokens: Tokens emitted in this time, those of requests that are not measured included.
        pool: Use of the target's KV cache pool; ``None`` without one.
        speculation: Drafted tokens of all requests, if a server counts them.
    """

    requests: tuple[Outcome, ...]
    seconds: float
    tokens: int
    pool: Pool | None = None
    peak_memory_bytes: int | None = None
    speculation: Speculation | None = None


class BenchEngine(Protocol[Encoded]):
    """What decodes for a sweep. Its models stay loaded; calls do not affect later ones."""

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """Return the field ``target`` of ``run.json``."""
        ...

    @property
    def heads(self) -> Mapping[str, TrainingMetadata]:
        """How trained heads came about, by the names of their drafters."""
        return {}

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Encoded:
        """Return a conversation as the engine takes it, up to the turn after the given answers."""
        ...

    def generate(
        self, config: SweepConfig, prompt: Encoded, decoding: DecodingOptions, *, seed: int
    ) -> Outcome:
        """Decode one prompt; any exception means that this generation failed."""
        ...

    def generate_group(
        self, config: SweepConfig, workload: Workload[Encoded], decoding: DecodingOptions
    ) -> GroupOutcome:
        """Decode requests together, in the batch of the configuration; any exception means that all failed."""
        ...

    def measure_costs(
        self, prompt: Encoded, widths: Sequence[int], tree_nodes: Sequence[int] = ()
    ) -> list[CostLine]:
        """Time forward passes of the target with each width, and of the drafters, also with ``tree_nodes`` of a tree.

        A sweep repeats this, so that a disturbance affects a few of the times and not their median.

        Raises:
            RunError: They cannot be timed.
        """
        raise RunError("Forward passes of this engine cannot be timed.")

    def measure_shared_costs(
        self, prompt: Encoded, requests: int, widths: Sequence[int], only: Collection[str] | None = None
    ) -> list[CostLine]:
        """Time forward passes that ``requests`` share: of the target with each width per request, and of the drafters,
        all or ``only`` some."""
        raise RunError("Forward passes of this engine cannot be timed.")

    def difference(
        self, prompt: Encoded, tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        """Return where two greedy outputs differ first, and whether rounding explains it; ``None`` if unknown."""
        ...
