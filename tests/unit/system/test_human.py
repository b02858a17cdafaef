import pytest

from ckptd.system import human
from ckptd.system.units import parse_duration_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.44, "0.4s"),
        (3, "3s"),
        (9.96, "10s"),
        (59.6, "1m"),
        (200, "3m20s"),
        (11520, "3h12m"),
        (187200, "2d4h"),
    ],
)
def test_duration(seconds, text):
    assert human.duration(seconds) == text


@pytest.mark.parametrize("seconds", [0.5, 12, 3600, 3660, 90000])
def test_a_duration_reads_back(seconds):
    assert parse_duration_s(human.duration(seconds)) == seconds


def test_ranges_draw_runs_together():
    assert human.ranges([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"
    assert human.ranges([]) == ""


def test_percent_of_nothing_is_all():
    assert (human.percent(1, 4), human.percent(0, 0)) == ("25 %", "100 %")


def test_counted():
    assert (human.counted(1, "rank"), human.counted(0, "rank")) == ("1 rank", "0 ranks")


def test_printable_leaves_nothing_that_steers_the_terminal():
    assert human.printable("a\x1b[2Jb\nc\u202e") == "a\N{REPLACEMENT CHARACTER}[2Jb\nc\N{REPLACEMENT CHARACTER}"
