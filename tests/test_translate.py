"""Drafters with another tokenizer: what is shared, how a context is read, and that outputs stay the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import sequences
from scripted_drafters import PROMPT, VOCAB, translating
from tiny import SPECIAL_TOKENS, WORDS, save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specbench.base.errors import UsageError
from specbench.cli import run
from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import StepPlan, run_to_end
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.translate import TranslatingDrafter, Translation, longest_matches
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.generate_many import speculative_generate_many
from specbench.models.drafters import wrap_drafter
from specbench.models.load import LanguageModel, wrap_model
from specbench.models.pairing import token_bytes, translation_of
from specbench.models.target import Target, wrap_target
from specbench.policies import FixedLength
from specbench.specs.drafters import Lookup

TEXT = "the otter is in the sea — émoji 🦦 and another thing"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def other_words(*words: str, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    """``tiny_tokenizer`` with other words: other numbers for what is the same, and tokens that are missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny.WORDS", words)
        return tiny_tokenizer(special_tokens=special_tokens)


def sentence_piece(*words: str) -> PreTrainedTokenizerFast:
    """A vocabulary as SentencePiece writes it: ▁ for blanks, and bytes as tokens."""
    pieces = [UNKNOWN, BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", *words]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token=UNKNOWN,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in (UNKNOWN, BEGIN, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN
    )


def language_model(tokenizer: PreTrainedTokenizerFast, seed: int = 1, **options: Any) -> LanguageModel:
    return wrap_model(tiny_llama(seed, vocab_size=len(tokenizer), **options), tokenizer, name="other")


def between(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> Translation:
    found = translation_of(language_model(ours), language_model(theirs))
    assert found is not None
    return found


def spelling(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> bytes:
    known = token_bytes(tokenizer)
    return b"".join(known[token] for token in ids)


# -- what is shared ----------------------------------------------------------------------------------


def test_tokens_with_the_same_bytes_are_shared_and_no_id_twice():
    ours, theirs = tiny_tokenizer(), other_words("the", "Ġan", "ing")
    shared = between(ours, theirs).shared
    own, other = ours.get_vocab(), theirs.get_vocab()
    assert shared[own["the"]] == other["the"]
    assert own["tion"] not in shared
    assert len(set(shared.values())) == len(shared)
    assert {own[piece] for piece in own.keys() & other.keys()} == shared.keys()


def test_blanks_and_bytes_are_spelled_in_two_ways():
    ours, theirs = tiny_tokenizer(), sentence_piece("▁the", "▁is")
    shared = between(ours, theirs).shared
    own, other = ours.get_vocab(), theirs.get_vocab()
    assert shared[own["Ġthe"]] == other["▁the"]
    assert shared[own["Ġ"]] == other["▁"]
    assert shared[own["a"]] == other["a"], "a token beside its byte is written with that"
    assert shared[own["b"]] == other["<0x62>"]
    assert shared[own["Ċ"]] == other["<0x0A>"]
    assert other["<0x61>"] not in shared.values()
    back = between(theirs, ours).shared
    assert back[other["▁the"]] == own["Ġthe"]
    assert other["<0x61>"] not in back


def test_special_tokens_are_shared_by_what_they_are_for():
    ours, theirs = tiny_tokenizer(), sentence_piece("▁the")
    assert between(ours, theirs).shared[ours.get_vocab()[SPECIAL_TOKENS[0]]] == theirs.eos_token_id
    renamed = other_words(*WORDS, special_tokens=("<end>", "<|im_end|>", "<|im_start|>"))
    shared = between(ours, renamed).shared
    for name, twin in zip(SPECIAL_TOKENS, ("<end>", "<|im_start|>", "<|im_end|>"), strict=True):
        assert shared[ours.get_vocab()[name]] == renamed.get_vocab()[twin]


def test_special_tokens_are_no_text():
    ours = other_words(*WORDS, special_tokens=("<x>", "<|im_start|>"))
    theirs = other_words("the", special_tokens=("<y>",))
    translation = between(ours, theirs)
    start = ours.get_vocab()["<|im_start|>"]
    assert start not in translation.shared
    assert spelling(theirs, translation.ids([start])) == b"<|im_start|>"


def test_the_same_vocabulary_needs_no_translation_whatever_ends_a_text():
    other = tiny_tokenizer()
    other.eos_token = "<|im_end|>"
    assert translation_of(tiny_language_model(), tiny_language_model(tokenizer=other)) is None


def test_too_little_in_common():
    many = [
        f"Ġ{first}{second}{third}" for first in "abcdefghij" for second in "abcdefghij" for third in "xyz"
    ]
    large = other_words(*WORDS, *many)
    small = sentence_piece()
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"the": 0})))
    with pytest.raises(UsageError, match="the bytes of other's tokens are unknown"):
        between(large, few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench.models.pairing.LEAST_SHARED", 0.9)
        with pytest.raises(UsageError, match=r"of the target's \d+ tokens the drafter has 25\d"):
            between(large, small)


# -- how a context is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [other_words("the", "Ġanother", "Ġsea"), sentence_piece("▁the", "▁sea")])
def test_a_context_has_the_same_bytes_in_both(theirs):
    ours = tiny_tokenizer()
    ids = ours(TEXT)["input_ids"]
    assert spelling(theirs, between(ours, theirs).ids(ids)) == TEXT.encode()


def test_characters_that_are_not_complete_are_spelled_by_their_bytes():
    ours, theirs = other_words("the", "ðŁ¦¦"), other_words("and")
    translation = between(ours, theirs)
    otter = ours("🦦")["input_ids"]
    assert translation.ids(otter) == theirs("🦦")["input_ids"]
    assert longest_matches(b"abcab", {b"a": 1, b"ab": 2, b"c": 3}) == [2, 3, 2]
    assert longest_matches(b"axb", {b"a": 1, b"b": 2}) == [1, 2]


def test_a_text_begins_as_the_drafter_s_texts_do():
    theirs = sentence_piece("▁the")
    assert between(tiny_tokenizer(), theirs).first is None
    backend = theirs.backend_tokenizer
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    assert between(tiny_tokenizer(), theirs).first == theirs.bos_token_id


# -- real models -------------------------------------------------------------------------------------


def pair(theirs: PreTrainedTokenizerFast, **options: Any) -> tuple[Target, ModelDrafter]:
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    return target, wrap_drafter(language_model(theirs, **options), target)


@pytest.mark.parametrize("cache", ["dynamic", "none"])
def test_greedy_outputs_are_those_of_plain_decoding(cache):
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    drafter = wrap_drafter(language_model(other_words("the", "Ġan", "er")), target, cache=cache)
    assert isinstance(drafter, TranslatingDrafter)
    plain = autoregressive_generate(TEXT, target, max_new_tokens=40, ignore_eos=True)
    for each in (drafter, CascadeDrafter(LookupDrafter(Lookup(None, 1, before_model=True)), drafter)):
        found = speculative_generate(TEXT, target, each, gamma=4, max_new_tokens=40, ignore_eos=True)
        assert found.token_ids == plain.token_ids
        assert any(step.drafted for step in found.steps)


def test_requests_side_by_side_read_in_ids_of_their_own():
    target, drafter = pair(other_words("the", "Ġan", "er"))
    settings: dict[str, Any] = {"gamma": 3, "max_new_tokens": 20, "sampling": Sampling(0.7)}
    texts = [TEXT[: 10 * number] for number in range(2, 6)]
    # Prompts are read in parts, and somebody is put back.
    many = speculative_generate_many(
        texts, target, drafter, max_batch=3, max_tokens_per_pass=20, pool_tokens=160, **settings
    )
    for text, found in zip(texts, many.results(), strict=True):
        alone = speculative_generate(text, target, drafter, **settings)
        assert isinstance(found, Generation), found
        assert found.token_ids == alone.token_ids
        assert [step.drafted for step in found.steps] == [step.drafted for step in alone.steps]


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [None, Sampling(1.0)])
def test_a_model_with_its_tokens_renumbered_drafts_for_itself(sampling):
    """Everything is accepted: what it reads and drafts is what the target would."""
    ours = tiny_tokenizer()
    theirs = tiny_tokenizer(special_tokens=[*SPECIAL_TOKENS, "<more>"][::-1])
    target = wrap_target(tiny_llama(0), ours)
    twin = tiny_llama(0, vocab_size=len(theirs))
    order = [theirs.convert_tokens_to_ids(ours.convert_ids_to_tokens(i)) for i in range(len(ours))]
    source, copy = tiny_llama(0).state_dict(), twin.state_dict()
    for name, tensor in copy.items():
        if tensor.shape == source[name].shape:
            tensor.copy_(source[name])
        else:
            tensor[order] = source[name]
    drafter = wrap_drafter(wrap_model(twin, theirs, name="twin"), target)
    assert isinstance(drafter, TranslatingDrafter)
    found = speculative_generate(
        TEXT, target, drafter, gamma=4, max_new_tokens=40, ignore_eos=True, sampling=sampling
    )
    assert [step.accepted for step in found.steps[:-1]] == [4] * (len(found.steps) - 1)


def test_a_head_is_cut_once():
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    model = language_model(other_words("the", "Ġan"))
    first, again = wrap_drafter(model, target), wrap_drafter(model, target)
    assert first.traits.vocabulary.ids == again.traits.vocabulary.ids
    assert model.model.get_output_embeddings().out_features == len(first.traits.vocabulary.ids)
    other = wrap_target(tiny_llama(0, vocab_size=300), other_words("Ġan", "er"))
    with pytest.raises(UsageError, match="was already trimmed to another vocabulary"):
        wrap_drafter(model, other)


# -- exact -------------------------------------------------------------------------------------------


def test_whatever_is_emitted_the_cache_follows():
    """Other tokens than were drafted too, as of another drafter; the scorer looks what it holds."""
    for emitted in sequences(VOCAB, 3):
        drafter = translating()
        drafter.begin(PROMPT)
        context = list(PROMPT)
        for _ in range(3):
            draft = run_to_end(
                drafter.propose(context, StepPlan(3, FixedLength(3), Sampling(), Randomness(0)))
            )
            assert draft.tokens
            context += emitted
            drafter.update(StepOutcome(context, len(emitted), torch.empty(0), draft.tokens, (0, 1)))


# -- what is said of it ------------------------------------------------------------------------------


def test_the_command_says_that_the_tokenizers_differ(tmp_path, capfd):
    theirs, folder = other_words("the", "Ġan"), tmp_path / "foreign"
    tiny_llama(1, vocab_size=len(theirs)).save_pretrained(folder)
    theirs.save_pretrained(folder)
    words = ["--target", str(save_tiny(tmp_path / "target")), "--drafter", str(folder), "--dtype", "float32"]
    run(["generate", "the otter", *words, "-n", "4", "--json"])
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("has another tokenizer than the target: tokens are translated") == 1
