"""DSpark, as its authors and ``speculators`` write it.

markov_head.markov_w1.weight, .markov_w2.weight    [vocab, rank], [draft vocab, rank], unless ``markov_rank`` is 0
markov_head.gate_proj.weight, .bias                [rank, hidden + rank], of the type ``gated``
markov_head.joint_proj.weight, .bias               [3·rank, hidden + 2·rank], of the type ``rnn``
confidence_head.proj.weight, .bias                 [1, hidden], with ``confidence_head_with_markov`` hidden + rank
...                                                of DFlash, see ``dflash.py``
"""

from __future__ import annotations

from torch import nn

from specbench.backends.torch.block_heads import DSparkHead, MarkovType
from specbench.backends.torch.heads import EagleShape
from specbench.base.record import Count
from specbench.models.heads.base import HeadFiles
from specbench.models.heads.dflash import block_shape, register


@register("dspark")
def _dspark(files: HeadFiles, shape: EagleShape) -> nn.Module:
    rank = files.setting("markov_rank", Count, 256)
    markov = files.setting("markov_head_type", MarkovType, "vanilla")
    confidence = files.setting("enable_confidence_head", bool, True)
    reads_token = confidence and files.setting("confidence_head_with_markov", bool, True)
    if reads_token and not rank:
        raise files.damaged("its confidence_head_with_markov needs a markov_rank above 0")
    block = block_shape(
        files,
        anchored=True,
        markov=markov if rank else None,
        rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
    )
    return DSparkHead(shape, block)
