"""The client's code uses standard terms: in docstrings and comments as documents do, and in identifiers.

Messages to users are not compared: they have tests of their own.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.unit.test_document_words import INSTEAD

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client/ckptd_client"
ROOMS = ("_gather", "_state", "_local", "_preempt", "_image", "_daemon", "_save", "_load", "demo")
FILES = sorted({*(file for room in ROOMS for file in (CLIENT / room).rglob("*.py")), *(ROOT / "bench").rglob("*.py")})
# An identifier, and the one to use in its place.
IDENTIFIERS = {
    "Board|Boards": "NodeGroup",
    "Gate|OpenGate|gates?": "ExchangeAddress, PeerExchange, exchange",
    "Company|company": "Participants, participants",
    "Looks?": "Sampling, Sample",
    "Word": "RankRecord, RankPlan",
    "Landing|land": "Destination, deliver",
    "Fetch": "DeviceCopy",
}


def prose_of(source):
    """Lines of docstrings and of comments, each with its number; code in backquotes is left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found += list(enumerate(node.value.value.splitlines(), node.lineno))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [(number, re.sub(r"`[^`]*`", "", text)) for number, text in found]


def names_of(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]


def test_docstrings_and_comments_use_standard_terms():
    pattern = re.compile(r"\b(?:" + "|".join(INSTEAD).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {text.strip()}"
        for file in FILES
        for number, text in prose_of(file.read_text())
        if pattern.search(text)
    ]
    assert found == [], "tests/unit/test_document_words.py has what to write"


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_identifiers_are_standard_terms(name):
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in FILES
        if CLIENT in file.parents
        for number, text in names_of(file.read_text())
        if re.fullmatch(name, text)
    ]
    assert found == [], f"use {IDENTIFIERS[name]}"
