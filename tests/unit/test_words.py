"""Code and documents use the field's standard terms: the tables are in words.py."""

import ast
import functools
import io
import re
import tokenize

from tests.unit.sources import ROOT
from tests.unit.words import NAMES, SENTENCES, TESTS, TEXTS

CODE = r"(?:\s|`[^`]*`|\]\([^)]*\))+"  # what without_code() leaves out between two words, or white space
OWN = {ROOT / "tests/unit/words.py", ROOT / "tests/unit/test_words.py"}


def test_names_are_standard_terms():
    assert left(NAMES, names) == []


def test_comments_and_messages_have_no_coinage():
    assert left(TEXTS, texts) == []


def test_sentences_have_an_actor_and_no_private_word():
    assert left(SENTENCES, sentences) == []


def test_names_of_tests_have_no_private_word():
    assert left(TESTS, words_of_tests) == []


def test_code_is_no_sentence():
    assert without_code("a `told` b\n```\nnobody\n```\n[c](news.md)\n").split() == ["a", "b", "[c"]


def left(rows, read):
    """What is still there: file, line, the coinage, and what to write in its place."""
    found = []
    for row in rows:
        whole = re.compile(rf"(?:{row.coined})\Z")
        within = re.compile(rf"\b(?:{row.coined})\b".replace(" ", r"\s+"), re.IGNORECASE if read is sentences else 0)
        near = re.compile(rf"\b(?:{row.coined})\b".replace(" ", CODE), within.flags)
        find = whole.match if read is names else within.search
        for path in files(row.where):
            if not any(map(near.search if read is sentences else find, rough(read, path))):
                continue
            for number, text in read(path):
                match = find(text)
                found += [f"{path.relative_to(ROOT)}:{number}: {match.group()}: write {row.standard}"] if match else []
    return found


@functools.cache
def files(where):
    found = set()
    for start in where:
        base = ROOT / start
        found |= {base} if base.is_file() else {*base.rglob("*.py"), *base.rglob("*.md")}
    return sorted(found - OWN)


@functools.cache
def rough(read, path):
    """What read finds there, and more: it costs no tokens."""
    text = path.read_text()
    if read in (texts, sentences):
        return [text]
    found = set(re.findall(r"\w+", text))
    return found if read is names else [f" {name[5:].replace('_', ' ')} " for name in found if name.startswith("test_")]


@functools.cache
def tokens(path):
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline)) if path.suffix == ".py" else []


@functools.cache
def names(path):
    return [(token.start[0], token.string) for token in tokens(path) if token.type == tokenize.NAME]


@functools.cache
def words_of_tests(path):
    """The names of test functions, as sentences."""
    return [(line, f" {name[5:].replace('_', ' ')} ") for line, name in names(path) if name.startswith("test_")]


@functools.cache
def texts(path):
    kinds = {tokenize.COMMENT, tokenize.STRING}
    return [(token.start[0], token.string) for token in tokens(path) if token.type in kinds]


@functools.cache
def sentences(path):
    """Paragraphs of a document, docstrings and comments of code."""
    if path.suffix == ".md":
        return [(0, part) for part in without_code(path.read_text()).split("\n\n")]
    found = [(token.start[0], token.string) for token in tokens(path) if token.type == tokenize.COMMENT]
    values = [node.value for node in statements(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    found += [(one.lineno, one.value) for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [(number, without_code(text)) for number, text in found]


def statements(node):
    """Those of a module, however deep; none stands in an expression."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def without_code(text):
    """The text without code and without the targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
