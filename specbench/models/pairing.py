"""Match a drafter's tokens with a target's: equal ids, or different ids for the same bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench.base.errors import UsageError
from specbench.decoding.stops import special_tokens
from specbench.drafters.translate import Translation, longest_matches
from specbench.models.files import LEAST_SHARED
from specbench.models.load import LanguageModel
from specbench.models.tokenizers import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""SentencePiece's spelling of a byte token."""

_SPELLINGS = 4096
"""Number of texts whose spelling is cached."""


def translation_of(target: LanguageModel, drafter: LanguageModel) -> Translation | None:
    """Return the translation from the target's tokens to a drafter's; ``None`` if the tokens are the same.

    Padding the logits to different sizes makes no difference. If a tokenizer is missing, only the sizes are compared.

    Raises:
        UsageError: The two have too few tokens in common, or the bytes of their tokens are not known.
    """
    ours, theirs = target.tokenizer, cast("Any", drafter.tokenizer)
    if ours is None or theirs is None:
        if target.vocab_size == drafter.vocab_size:
            return None
        sizes = f"{target.vocab_size} logits against {drafter.vocab_size}"
        raise _incompatible(target, drafter, f"{sizes}, and no tokenizer to compare")
    vocabulary = ours.get_vocab()
    if ours is theirs or vocabulary == theirs.get_vocab():
        needed = max(vocabulary.values(), default=-1) + 1
        for model in (target, drafter):
            if model.vocab_size < needed:
                narrow = f"{model.name} has {model.vocab_size} logits for {needed} tokens"
                raise _incompatible(target, drafter, narrow)
        return None
    own, other = token_bytes(ours), token_bytes(theirs)
    if not own or not other:
        name = drafter.name if own else target.name
        unknown = f"the tokenizers differ, and the bytes of {name}'s tokens are unknown"
        raise _incompatible(target, drafter, unknown)
    specials, first = _special_pairs(ours, theirs), _by_bytes(other)
    pairs = specials | {token: first[text] for text, token in _by_bytes(own).items() if text in first}
    shared = {a: b for a, b in pairs.items() if a < target.vocab_size and b < drafter.vocab_size}
    ordinary = len(shared.keys() - specials.keys())
    if ordinary < LEAST_SHARED * len(own):
        few = f"of the target's {len(own)} tokens the drafter has {ordinary or 'none'}"
        raise _incompatible(target, drafter, few)
    tokens = len(own.keys() | special_tokens(ours).values())
    silent = (ours.bos_token, ours.eos_token, ours.pad_token, ours.unk_token)
    named = {token: name.encode() for name, token in special_tokens(ours).items() if name not in silent}
    return Translation(shared, own | named, _speller(theirs, other), _first(theirs), tokens)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes of all tokens except special ones, by id; empty if they are not known.

    Supported are byte-level vocabularies (GPT-2's alphabet, with Ġ for a blank) and SentencePiece's (with ▁ for a
    blank). SentencePiece's tokens of single bytes come last, so that other tokens are preferred to them.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    kind = "" if decoder is None else decoder.__getstate__().decode()
    read: Callable[[str], bytes | None]
    if '"ByteLevel"' in kind:
        read = _byte_level
    elif '"Metaspace"' in kind or "▁" in kind:
        read = _sentence_piece
    else:
        return {}
    special = set(special_tokens(tokenizer).values())
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    pieces = [item for item in tokenizer.get_vocab().items() if item[1] not in special]
    pieces.sort(key=lambda item: (_BYTE.fullmatch(item[0]) is not None, item[1]))
    found = {number: added[number].encode() if number in added else read(piece) for piece, number in pieces}
    return {number: text for number, text in found.items() if text}


_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}
"""GPT-2's characters for bytes."""


def _byte_level(piece: str) -> bytes | None:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return None


def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _by_bytes(tokens: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the first token with each spelling."""
    found: dict[bytes, int] = {}
    for token, text in tokens.items():
        found.setdefault(text, token)
    return found


def _special_pairs(ours: Any, theirs: Any) -> dict[int, int]:
    """Match special tokens by their roles, and then by their names."""
    own, other = special_tokens(ours), special_tokens(theirs)
    named = {number: other[name] for name, number in own.items() if name in other}
    roles: tuple[tuple[Any, Any], ...] = (
        (ours.eos_token_id, theirs.eos_token_id),
        (end_of_turn(ours), end_of_turn(theirs)),
        (ours.bos_token_id, theirs.bos_token_id),
    )
    pairs: dict[int, int] = {}
    for token, other_token in (*((a, named.get(a, b)) for a, b in roles), *named.items()):
        if None not in (token, other_token) and token not in pairs and other_token not in pairs.values():
            pairs[token] = other_token
    return pairs


def _first(tokenizer: Any) -> int | None:
    """Return the token that a tokenizer puts before a text, if any."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else None


def _speller(tokenizer: Any, tokens: Mapping[int, bytes]) -> Callable[[bytes], list[int]]:
    """Return a function that tokenizes bytes, by longest matches where the tokenizer would change the text."""
    vocabulary = _by_bytes(tokens)

    @lru_cache(_SPELLINGS)
    def spelled(text: bytes) -> list[int]:
        try:
            ids = [int(token) for token in tokenizer(text.decode(), add_special_tokens=False)["input_ids"]]
        except UnicodeDecodeError:  # a character is not complete yet
            return longest_matches(text, vocabulary)
        same = b"".join(tokens.get(token, b"") for token in ids) == text
        return ids if same else longest_matches(text, vocabulary)

    return spelled


def _incompatible(target: LanguageModel, drafter: LanguageModel, difference: str) -> UsageError:
    return UsageError(
        f"The drafter {drafter.name} cannot draft for {target.name}: {difference}.",
        "Choose a drafter with the target's tokenizer, or one that needs no model, such as ngram or lookup.",
    )
