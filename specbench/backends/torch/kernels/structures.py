"""What is handed to the native library, as ctypes sees it."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch


class CMatrix(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("bits", c_int32),
        ("width", c_int32),
        ("depth", c_int32),
        ("unused", c_int32),
    )


class CLayer(Structure):
    _fields_ = (
        ("projections", CMatrix),
        ("output", CMatrix),
        ("gates", CMatrix),
        ("down", CMatrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    )


class CModel(Structure):
    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CMatrix),
        ("norm", c_void_p),
        ("embedding_norm", c_void_p),
        ("count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("shared", c_int32),
        ("size", c_int32),
        ("middle", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("adds_to_normed", c_int32),
        ("unused", c_int32),
    )


class CRequest(Structure):
    _fields_ = (
        ("places", c_void_p),
        ("mask", c_void_p),
        ("mask_stride", c_int64),
        ("first", c_int32),
        ("past", c_int32),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("strides", POINTER(c_int64)),
    )


class CPass(Structure):
    _fields_ = (
        ("model", POINTER(CModel)),
        ("x", c_void_p),
        ("embedded", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("strides", POINTER(c_int64)),
        ("requests", POINTER(CRequest)),
        ("which", c_void_p),
        ("logits", c_void_p),
        ("states", POINTER(c_void_p)),
        ("states_stride", c_int64),
        ("rows", c_int32),
        ("wanted", c_int32),
        ("count", c_int32),
        ("is_bfloat16", c_int32),
        ("parallel", c_void_p),
        ("threads", c_int32),
        ("level", c_int32),
    )


class CPacking(Structure):
    _fields_ = (
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("weight", c_void_p),
        ("halves", c_void_p),
        ("panels", c_void_p),
        ("rows", c_int32),
        ("columns", c_int32),
        ("bits", c_int32),
        ("unused", c_int32),
    )


@cache
def array(kind: Any, count: int) -> Any:
    """The type of an array, which ctypes forgets, but only the collector finds, where nobody keeps it."""
    return kind * count


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Without gaps in memory."""
    return None if tensor is None else tensor.contiguous()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
