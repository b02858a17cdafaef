"""Code uses the field's standard terms: the table is in words.py."""

import io
import re
import tokenize

from tests.unit.sources import ROOT
from tests.unit.words import NAMES, PROSE

OWN = {"tests/unit/words.py", "tests/unit/test_words.py"}


def _files(where, suffix):
    found = []
    for start in where:
        base = ROOT / start
        found += [base] if base.is_file() else sorted(base.rglob("*" + suffix)) if base.is_dir() else []
    return [p for p in found if p.suffix == suffix and str(p.relative_to(ROOT)) not in OWN and ".venv" not in p.parts]


def _tokens(path):
    return tokenize.generate_tokens(io.StringIO(path.read_text()).readline)


def names_left():
    left = []
    texts = {}
    for row in NAMES:
        pattern = re.compile(rf"(?:{row.coined})\Z")
        for path in _files(row.where, ".py"):
            if path not in texts:
                texts[path] = [(t.start[0], t.string) for t in _tokens(path) if t.type == tokenize.NAME]
            left += [
                f"{path.relative_to(ROOT)}:{n}: {name}: {row.standard}"
                for n, name in texts[path]
                if pattern.match(name)
            ]
    return left


def prose_left():
    left = []
    for row in PROSE:
        pattern = re.compile(row.coined)
        for path in _files(row.where, ".py"):
            for token in _tokens(path):
                found = token.type in {tokenize.COMMENT, tokenize.STRING} and pattern.search(token.string)
                left += [f"{path.relative_to(ROOT)}:{token.start[0]}: {found.group()}: {row.standard}"] if found else []
    return left


def test_names_are_standard_terms():
    assert names_left() == []


def test_comments_are_standard_terms():
    assert prose_left() == []
