"""Man pages and completions: made from the commands, complete, and taken by the programs that read them."""

import os
import re
import shutil
import subprocess
import sys

import click
import pytest

from ckptd.cli import _VERBS, cli
from scripts import manual

PAGES = manual.pages()


def test_there_is_a_page_of_each_verb():
    assert set(PAGES) == {"ckptd.1", *(f"ckptd-{verb}.1" for verb in _VERBS)}
    assert all(f"ckptd\\-{verb}(1)" in PAGES["ckptd.1"] for verb in _VERBS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_all_options_and_only_our_macros(name):
    context = click.Context(cli, info_name="ckptd")
    verb = name.removesuffix(".1").removeprefix("ckptd").removeprefix("-")
    command = cli.get_command(context, verb) if verb else cli
    flags = [flag for one in command.params if isinstance(one, click.Option) for flag in one.opts]
    assert all(flag.replace("-", "\\-") in PAGES[name] for flag in flags)
    macros = {line.split()[0] for line in PAGES[name].splitlines() if line.startswith((".", "'"))}
    assert macros <= {".TH", ".SH", ".PP", ".TP", ".B", ".nf", ".fi"}
    assert "\b" not in PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_groff_reads_it_without_a_warning(name):
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("no groff")
    done = subprocess.run(
        [groff, "-man", "-ww", "-Tutf8"], input=PAGES[name], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "SYNOPSIS" in re.sub(".\b", "", done.stdout), "as a terminal shows what is struck twice"


def test_text_is_never_a_command_of_roff():
    assert manual._text(".TH") == "\\&.TH"
    assert manual._text("'a") == "\\&'a"
    assert manual._text("a\\fB--b") == "a\\efB\\-\\-b"


COMPLETE = """
COMP_WORDS=({words}); COMP_CWORD={at}
source {file}
_ckptd_completion ckptd
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [("ckptd pru", ["prune"]), ("ckptd list --so", ["--sort"]), ("ckptd export --format d", ["dcp"])],
)
def test_bash_completes_verbs_options_and_choices(words, expected, tmp_path):
    manual.main(str(tmp_path))
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    program = bin_dir / "ckptd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptd "$@"\n')
    program.chmod(0o755)
    script = COMPLETE.format(
        words=words, at=len(words.split()) - 1, file=tmp_path / "bash-completion/completions/ckptd"
    )
    environ = os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert [line for line in done.stdout.splitlines() if line] == expected, done.stderr


def test_the_words_of_all_three_shells_ask_ckptd():
    made = manual.completions()
    assert len(made) == 3
    assert all("_CKPTD_COMPLETE=" in text for text in made.values())
