"""PARD: a causal language model that was trained to draft several tokens in a pass, as its authors write it.

Its folder is that of any model. The setting ``pard_token`` is the token that it reads in place of those to be guessed.
PARD-2 may also read the target's hidden states. Here it drafts without them, which its authors call target-independent.
"""

from __future__ import annotations

from specbench.backends.torch.scorer import Scorer
from specbench.drafters.model import ParallelDrafter
from specbench.models.head_files import HeadFiles
from specbench.models.heads.base import register

_MOST = 32
"""Tokens that it drafts at most, as in its authors' code."""


@register("pard", makes="model_drafter", check=lambda files, _: files.token("pard_token"))
def _drafter(files: HeadFiles, scorer: Scorer, name: str) -> ParallelDrafter:
    return ParallelDrafter(scorer, name, [files.token("pard_token")] * (_MOST - 1))
