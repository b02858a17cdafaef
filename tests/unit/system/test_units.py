import pytest

from ckptd.system.units import format_size, parse_duration_s, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64G", 64 << 30),
        ("64g", 64 << 30),
        ("64GB", 64 << 30),
        ("64 GiB", 64 << 30),
        ("1.5K", 1536),
        ("2T", 2 << 40),
        ("512 b", 512),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1", "64X", "64 G B", "1e9", "0x10", "inf"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("2.5", 2.5),
        ("90s", 90),
        ("24h", 86400),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("500ms", 0.5),
        ("2d", 172800),
    ],
)
def test_durations(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "1w", "1h30", "1h,30m"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="no duration"):
        parse_duration_s(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (0, 1023, 1024, 64 << 20, 3 << 49)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "64.0 MiB",
        "1.5 PiB",
    ]
