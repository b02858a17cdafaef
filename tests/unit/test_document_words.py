"""Documents use standard terms: a sentence has an actor, and none of the words that a reader has to guess at."""

import re

import pytest

from tests.unit.test_document_names import DOCUMENTS

# A word, and what to write in its place.
INSTEAD = {
    "anew": "again, new",
    "as ever": "as usual, unchanged",
    "besides": "also, beyond",
    "hears?|heard": "receives, learns, gets",
    "in vain": "without an answer, without success",
    "nobody": "no process, no user: name it",
    "somebody|whoever": "a user, another program: name it",
    "tells|told": "shows, reports, sends, notifies",
    "doors?": "admission",
    "news": "updates, messages",
    "what is so": "the current state",
    "what lies there": "files, segments: name it",
}


def prose(text):
    """The text without code and without the targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


@pytest.mark.parametrize("word", INSTEAD)
def test_documents_use_standard_terms(word):
    pattern = re.compile(r"\b(?:" + word.replace(" ", r"\s+") + r")\b", re.IGNORECASE)
    found = [
        (document.name, text[max(0, match.start() - 50) : match.end() + 30])
        for document in DOCUMENTS
        for text in [prose(document.read_text())]
        for match in pattern.finditer(text)
    ]
    assert found == [], f"write {INSTEAD[word]}"


def test_code_is_no_prose():
    assert prose("a `told` b\n```\nnobody\n```\n[c](news.md)\n").split() == ["a", "b", "[c"]
