"""What ranks of a node want published, kept in its arena: merged, bounded, and never said by anybody else."""

import os

import pytest

from ckptd.arena.arena import Arena
from ckptd.arena.publications import Publications
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.spare_pages import take
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.publication import MAX_INTENTS, Draft, Intent, Publication
from tests.runs import OTHER_RUN, RUN

JOB = JobKey("/store", "job")


@pytest.fixture
def arena(tmp_path):
    os.makedirs(tmp_path / arena_paths.job_dir(JOB))
    take(str(tmp_path))
    return tmp_path


def place(*names, directory="/run/a"):
    return Publication(directory, True, "/run/latest", "a", names)


def save(counter, run=RUN):
    return SaveId(1, counter, counter, run)


def test_files_of_the_ranks_of_a_node_add_up(arena):
    kept = Publications(str(arena))
    kept.keep(JOB, save(1), place("b"))
    kept.keep(JOB, save(1), place("a"))
    kept.keep(JOB, save(1), place("c", directory="/run/other"))
    (intent,) = kept.due(JOB)
    assert intent.to == place("a", "b"), "of two places the first counts, and only its files"
    assert os.stat(arena / arena_paths.job_dir(JOB) / f"{save(1).text}.publication").st_mode & 0o777 == 0o600


def test_another_daemon_finds_what_is_due_with_what_is_newer(arena):
    kept = Publications(str(arena))
    for number in (1, 2, 3):
        kept.keep(JOB, save(number), place("a"))
    kept.done(JOB, Intent(save(1), place("a")))
    kept.done(JOB, Intent(save(3), place("a")))
    again = Publications(str(arena))
    assert [intent.save for intent in again.due(JOB)] == [save(2), save(3)]
    assert [intent.save for intent in again.from_on(JOB, save(1))] == [save(1), save(2), save(3)]
    assert [again.is_due(JOB, save(number)) for number in (1, 2, 3)] == [False, True, False]
    again.keep(JOB, save(3), place("a"))
    assert not again.is_due(JOB, save(3)), "a rank says it again, to a daemon that has restarted"
    again.done(JOB, Intent(save(2), place("a")))
    assert again.due(JOB) == []


def test_a_state_is_wanted_at_one_more_place_whatever_became_of_the_first(arena):
    kept, first, more = Publications(str(arena)), Draft("/run/a", "/run/.a"), Draft("/run/b", "/run/.b")
    kept.keep(JOB, save(1), Publication.of_state(first))
    (told,) = kept.due(JOB)
    kept.keep(JOB, save(1), Publication.of_state(more))
    kept.done(JOB, told)
    (intent,) = kept.due(JOB)
    assert intent.to.drafts == (first, more), "what was asked for meanwhile is still to be done"
    kept.done(JOB, intent)
    assert kept.due(JOB) == []
    kept.keep(JOB, save(1), Publication.of_state(Draft("/run/c", "/run/.c")))
    (intent,) = kept.due(JOB)
    assert [draft.place for draft in intent.to.drafts] == ["/run/a", "/run/b", "/run/c"]


def test_the_oldest_go(arena):
    kept = Publications(str(arena))
    for number in range(1, MAX_INTENTS + 10):
        kept.keep(JOB, save(number), place("a"))
    assert [intent.save.counter for intent in kept.due(JOB)] == list(range(10, MAX_INTENTS + 10))


@pytest.mark.parametrize("runs", [(RUN, OTHER_RUN), (OTHER_RUN, RUN)])
def test_what_one_run_left_hides_nothing_of_another_that_had_its_number(arena, runs):
    mine, theirs = runs
    kept = Publications(str(arena))
    for number in (1, 3):
        kept.keep(JOB, save(number, theirs), place("a"))
    kept.keep(JOB, save(2, mine), place("a"))
    kept.keep(JOB, save(4, mine), place("a"))
    kept.done(JOB, Intent(save(4, mine), place("a")))
    due = [save(1, theirs), save(2, mine), save(3, theirs), save(4, mine)]
    assert [intent.save for intent in kept.due(JOB)] == due
    assert [intent.save for intent in kept.from_on(JOB, save(2, mine))] == [save(2, mine), save(4, mine)]


@pytest.mark.parametrize("runs", [(RUN, OTHER_RUN), (OTHER_RUN, RUN)])
def test_where_a_job_was_started_over_what_the_earlier_run_left_goes_first(arena, runs):
    """Its counters are higher: they say nothing of what is older."""
    mine, theirs = runs
    kept = Publications(str(arena))
    for number in range(100, 100 + MAX_INTENTS):
        kept.keep(JOB, save(number, theirs), place("a"))
    kept.keep(JOB, save(1, mine), place("a"))
    kept.keep(JOB, save(2, mine), place("a"))
    assert {save(1, mine), save(2, mine)} <= {intent.save for intent in kept.due(JOB)}
    assert len(kept.due(JOB)) == MAX_INTENTS


def test_what_cannot_be_read_is_nothing(arena):
    kept = Publications(str(arena))
    kept.keep(JOB, save(1), place("a"))
    (arena / arena_paths.job_dir(JOB) / f"{save(2).text}.publication").write_bytes(b"?")
    os.symlink("/etc/hostname", arena / arena_paths.job_dir(JOB) / f"{save(3).text}.publication")
    assert [intent.save for intent in kept.due(JOB)] == [save(1)]


def test_the_end_of_a_job_leaves_nothing(arena):
    kept = Publications(str(arena))
    kept.keep(JOB, save(1), place("a"))
    kept.keep(JOB, save(2), place("a"))
    kept.done(JOB, Intent(save(2), place("a")))
    Arena(str(arena)).forget_job(JOB)
    assert not (arena / arena_paths.job_dir(JOB)).exists()
