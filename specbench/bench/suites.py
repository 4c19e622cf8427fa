"""The prompts that a command names, and public benchmarks: files that are fetched once, kept in the cache, and known by
their sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import httpx2
from huggingface_hub import constants
from msgspec.structs import replace

from specbench.base.cache import SUITES_FOLDER, cache_folder
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, sha256, write_bytes
from specbench.base.progress import Progress, announce
from specbench.bench.prompts import Prompt, interleave, load_prompts, shuffled
from specbench.results.run import StoredSuite

_TIMEOUT_S = 60.0
_MOST_BYTES = 8 * 2**20


_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
_DEEP_SPEC = "https://raw.githubusercontent.com/deepseek-ai/DeepSpec/afdfa7c9382a3341a3e6f17756dd816da79f132c"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


_FROM_DEEP_SPEC = (
    ("mt-bench", "df05defbcea350dff39f7d2996a7cba8a029e6e06069dfcdab11ceb998d743b0"),
    ("gsm8k", "63330a20a17f416fdfca978ebcd5124f8da5546affb3a079b65a6e8daf42b41f"),
    ("math500", "4f530d9d3126dca41c12a96e78ec0dd460b7202052ba86101c4da159cea33aac"),
    ("humaneval", "7aaed6a3987007ecee4851ee4572fde214aa2a36ae83fa21be9c5f443aa71675"),
    ("mbpp", "019b981f7122e39ce58866cf93f4206511c72532cb537bbaf298753a0f128ba7"),
    ("livecodebench", "40ed536492f331ac27b3b68506072366ca1d3a304b92c31d822574e778c87318"),
    ("swe-bench", "fb8f2e01529b5093b193797e449522a0fd6d51f61be0885a30a622fb23564ba8"),
    ("arena-hard-v2", "e5fcce94ffb1a2ef2082b5c63ac36608f2b7faf00da13ecb94ce2adc649b7b91"),
    ("lbpp", "0b973ef7ec26993896884a2cbfde640706390261778b4dc7a221ccb95b539ae2"),
    ("aime25", "b8835996839caa1d982c5bb9ecaeca636424f0b8ed9f33a40b084feb1c1766d0"),
)

SUITES = {
    "spec-bench": StoredSuite(
        name="spec-bench",
        source=f"{_SPEC_BENCH}/data/spec_bench/question.jsonl",
        sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        license="Apache-2.0",
        tasks=dict.fromkeys(_MT_BENCH, "multi-turn conversation"),
    ),
    **{
        name: StoredSuite(
            name=name, source=f"{_DEEP_SPEC}/eval_datasets/{name}.jsonl", sha256=digest, license="MIT"
        )
        for name, digest in _FROM_DEEP_SPEC
    },
}
"""Public benchmarks by name."""


def choose_prompts(
    names: Sequence[str], limit: int | None = None, *, seed: int = 0, progress: Progress | None = None
) -> tuple[list[Prompt], list[StoredSuite]]:
    """Return the prompts of ``--prompts``, and the public benchmarks that they are from.

    Args:
        names: Public benchmarks (``SUITES``, or files with the sha256 of one), or what ``load_prompts`` takes.
        limit: Number of prompts, as ``load_prompts`` takes them. Of public benchmarks as many of each task, drawn at
            random by ``seed``, so that a smaller limit gives a part of a larger one. ``None`` returns all, in order.
        seed: Seed of the draw.
        progress: What to tell about a download.

    Raises:
        UsageError: See ``load_prompts``; or a public benchmark is named beside other prompts.
        RunError: A benchmark cannot be fetched, or is not the one that is known by this name.
    """
    files = {name: path for name in names if (path := _file_of(name, progress)) is not None}
    if not files:
        return load_prompts(names, limit), []
    for other in [name for name in names if name not in files]:
        raise UsageError(
            f"{next(iter(files))} is a public benchmark and {other} is not, so a limit means two things.",
            "Leave one of them out.",
        )
    prompts, stored, tasks = list[Prompt](), list[StoredSuite](), dict[str, str]()
    for path in files.values():
        name = _names()[sha256(path)]
        suite, found = SUITES[name], load_prompts([path])
        tasks |= suite.tasks
        prompts += found
        stored.append(replace(suite, prompts=len(found)))
    if limit is not None:
        prompts = interleave(
            interleave(shuffled(prompts, seed)),
            limit,
            lambda prompt: tasks.get(prompt.category, prompt.category),
        )
    return prompts, stored


def _names() -> dict[str, str]:
    """Return the names of public benchmarks by the sha256 of their files."""
    return {suite.sha256: name for name, suite in SUITES.items()}


def _file_of(name: str, progress: Progress | None) -> Path | None:
    """Return the file of a public benchmark, which is fetched if need be; ``None`` for other prompts."""
    if name in SUITES:
        return _fetched(name, progress)
    path = Path(name)
    return path if path.is_file() and sha256(path) in _names() else None


def _fetched(name: str, progress: Progress | None) -> Path:
    """Return the file of a suite in the cache, which is fetched first if it is not there or is damaged."""
    suite = SUITES[name]
    path = cache_folder() / SUITES_FOLDER / f"{name}.jsonl"
    if path.is_file() and sha256(path) == suite.sha256:
        return path
    elsewhere = f"Download {suite.source}, and give the file: --prompts {name}.jsonl."
    if constants.HF_HUB_OFFLINE:
        raise RunError(
            f"The suite {name} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it.", elsewhere
        )
    announce(progress, f"fetching {name} ({suite.license})")
    data = bytearray()
    try:
        with httpx2.stream("GET", suite.source, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                data += piece
                if len(data) > _MOST_BYTES:
                    break
    except httpx2.HTTPError as error:
        raise RunError(
            f"The suite {name} could not be fetched ({type(error).__name__}).", elsewhere
        ) from None
    if hashlib.sha256(data).hexdigest() != suite.sha256:
        raise RunError(
            f"What was fetched for the suite {name} has another sha256 than it should have.", elsewhere
        )
    with file_errors(f"The suite {name} cannot be kept in {str(path.parent)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, bytes(data))
    return path
