"""``python -m bench.journal``: it measures daemons that are what it says, and leaves nothing."""

import os
import pathlib
import re
import tempfile

import pytest

from bench import journal
from tests.cluster import ROOT


def test_a_difference_is_that_of_pairs_and_says_how_far_they_scatter():
    ours = [value + 0.5 for value in (1.0, 9.0, 2.0, 8.0, 3.0)]
    assert journal.difference(ours, [1.0, 9.0, 2.0, 8.0, 3.0], 10) == "+5.000 (+5.000 to +5.000)"
    assert journal.difference([2.0], [1.0], 1) == "+1.000"


@pytest.mark.process
def test_a_round_measures_a_daemon_with_and_one_without_a_journal_and_leaves_nothing(monkeypatch, capsys):
    monkeypatch.setattr(journal, "_FLUSHED_S", 0.5)
    monkeypatch.setattr(journal, "_WARM_UP", 1)
    trees = dict.fromkeys((journal.ON, journal.OFF), pathlib.Path(ROOT))
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as memory:
        monkeypatch.setattr(journal, "_MEMORY", memory)
        stalls, costs = journal.play(trees, saves=4, idle_s=0.2, nbytes=1 << 16)
        assert os.listdir(memory) == []
    assert {name: len(found) for name, found in stalls.items()} == {journal.ON: 4, journal.OFF: 4}
    assert all(cost.daemon_nbytes > 1 << 20 and cost.worker_nbytes > 1 << 20 for cost in costs.values())
    journal.report(stalls, {name: [cost] for name, cost in costs.items()})
    said = capsys.readouterr().out
    on, off = re.findall(r"([0-9]+) B on record", said)
    assert int(on) > 0 == int(off)
    assert "journal - off: save " in said
