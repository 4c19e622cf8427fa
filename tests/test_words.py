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
    "LengthPolicy": "DraftPolicy",
}

# What a text does not say, and what it says instead.
PHRASES = {
    r"\bfor ever\b": "forever",
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
    patterns = {re.compile(pattern): instead for pattern, instead in PHRASES.items()}
    found = [
        f"{place}: {match[0]!r} (use {instead}): {text[:100]}"
        for place, text in SURFACES[surface]()
        for pattern, instead in patterns.items()
        if (match := pattern.search(text))
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
