"""Code, help, messages and pages use the words of docs/glossary.md: those that they replaced do not come back."""

from __future__ import annotations

import io
import re
import tokenize
import tomllib

import prose
import pytest

# Identifiers that are gone, and what each is called now.
NAMES = {
    "Ahead": "pack_manifest",
    "Answered": "BenchResult",
    "Asked": "BenchRequest",
    "Asking": "Decoding",
    "BasePolicy": "DraftPolicy",
    "Fall": "Elimination",
    "GraphPass": "GraphForward",
    "Known": "FixedCandidates",
    "LengthPolicy": "DraftPolicy",
    "LengthRule": "DraftPolicy",
    "Load": "Workload, BatchCosts or MachineLoad",
    "Marks": "Metrics",
    "NativePass": "NativeForward",
    "OrdinaryPass": "HFForward",
    "Pass": "ForwardRequest",
    "Proposer": "LoadedDrafter",
    "Prospects": "TokenDistribution",
    "Room": "budget, or capacity",
    "Rows": "ForwardOutput",
    "Rule": "DraftPolicy",
    "RuleSpec": "PolicySpec",
    "Seats": "RequestFactory",
    "Shelf": "JsonStore",
    "ShortPass": "FusedForward",
    "Stand": "TrainerState",
    "Story": "training_metadata",
    "Told": "ServerReport, or reported",
    "_Stand": "TrainerState",
    "_lonely": "best_free_block",
    "_sharp": "hardest_case",
    "_told": "the noun",
    "another": "should_continue",
    "apart": "as_request",
    "at_once": "immediately, or in one call",
    "but": "except_, without",
    "choose_pass": "choose_forward",
    "dear": "expensive",
    "declined": "rejected_guess",
    "driven": "run_decoding",
    "held_up": "noise_correction",
    "length_policy": "draft_policy",
    "lonely": "best_free_block",
    "looks_back": "context_dependent",
    "onwards": "next_frontier",
    "prefers_pass": "prefer_model",
    "quick": "use_fast_layers, or fast",
    "quicken": "use_fast_layers, or fast",
    "quicker": "use_fast_layers, or fast",
    "room": "budget, or capacity",
    "row_price": "min_accept_prob",
    "seats": "RequestFactory",
    "sharp": "hardest_case",
    "shelf": "JsonStore",
    "slowness": "relative_slowdown",
    "so_many": "count",
    "stand": "TrainerState",
    "stories": "training_metadata",
    "told": "ServerReport, or reported",
    "told_by": "the noun",
    "twin": "clone_for",
    "under": "below",
    "way": "implementation, method",
    "ways": "implementation, method",
    "whoever": "the noun",
}

# What texts do not say, what they say instead, and the surfaces that still have it.
PHRASES = {
    r"\b[Aa]sked\b": ("requested", "docstrings messages"),
    r"\b[Aa]t once\b": ("immediately, or in one call", "docstrings"),
    r"\banew\b": ("again", "docstrings"),
    r"\b[Bb]ehind\b": ("after", "docstrings"),
    r"\b[Bb]esides?\b": ("next to, or in addition to", ""),
    r"\bby itself\b": ("alone, or automatically", "pages docstrings messages"),
    r"(?<!cannot )(?<!be )\b[Tt]old\b": ("reported", ""),
    r"\bdear(er|est|ly)?\b": ("expensive", ""),
    r"\bdraft-length rules?\b": ("draft policy", ""),
    r"\bforetell\b": ("predict", ""),
    r"\bfor ever\b": ("forever", ""),
    r"\b(go|goes|going|went|gone) on\b": ("continue", "docstrings messages"),
    r"\bheld (?!out)": ("cached, or kept", "messages"),
    r"\blearnt\b": ("learned", ""),
    r"\blength rules?\b": ("draft policy", ""),
    r"\blonely\b": ("isolated", ""),
    r"\bno counterpart\b": ("cannot express", ""),
    r"(^|[.:] )Of (?!\w+ing\b)": ("the noun first", "docstrings"),
    r"\bput right\b": ("corrected", ""),
    r"\bquick(er|est|ly)?\b": ("fast", ""),
    r"\bquite\b": ("nothing", ""),
    r"\broll-backs?\b": ("rollback", ""),
    r"\broom\b": ("budget, capacity or space", "docstrings messages"),
    r"\bside by side\b": ("together", "docstrings"),
    r"\bso (many|much)\b": ("a number, or that many", "docstrings"),
    r"\btaken up\b|\btakes up\b": ("used", "messages"),
    r"\bthe words of\b": ("the options of, or the notation of", ""),
    r"\bunder way\b": ("active", "docstrings"),
    r"\bwhat it is over\b": ("relative to", ""),
    r"(^|[.;] )Who \w+": ("the noun first", ""),
    r"\b[Ww]ho(?:ever)\b": ("the noun", ""),
}

SURFACES = {
    "pages": prose.of_pages,
    "docstrings": prose.docstrings,
    "messages": prose.messages,
    "helps": prose.helps,
}


@pytest.mark.smoke
def test_replaced_names_do_not_come_back():
    pattern = re.compile(rf"\b({'|'.join(NAMES)})\b")
    found = []
    for source in prose.SOURCES:
        text = source.read_text(encoding="utf-8")
        if pattern.search(text):
            found += [
                f"{source.relative_to(prose.ROOT)}:{token.start[0]}: {token.string} (use {NAMES[token.string]})"
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.NAME and token.string in NAMES
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("surface", SURFACES)
def test_replaced_phrases_do_not_come_back(surface):
    found = [
        f"{place}: {match[0]!r} (use {instead}): {text[:100]}"
        for place, text in SURFACES[surface]()
        for pattern, (instead, left) in PHRASES.items()
        if surface not in left and (match := re.search(pattern, text))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("surface", SURFACES)
def test_proselint_finds_nothing(surface):
    pytest.importorskip("proselint", reason="of the extra `test`")
    from proselint.checks import __register__
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    pyproject = tomllib.loads((prose.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config = {"max_errors": 100, "checks": pyproject["tool"]["proselint"]["checks"]}
    registry = CheckRegistry()
    registry.register_many(__register__)
    texts = list(SURFACES[surface]())
    # One document, as proselint also compares: one line for each text, between lines that differ.
    document = "\n\n".join(f"{text}\n\n§{number}" for number, (_, text) in enumerate(texts))
    found = []
    for each in LintFile(surface, document).lint(config):
        following = re.search(r"§(\d+)", document[each.check_result.span[0] :])
        place, text = texts[int(following[1])]
        found.append(f"{place}: {each.check_result.message}: {text[:100]}")
    assert not found, "\n".join(found)
