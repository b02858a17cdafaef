"""The page of the charts, its charts and its figures are of one run; constants are measured by the product's code."""

import dataclasses
import importlib.util
import re

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed", allow_module_level=True)

from bench.charts import constants, figures, page
from bench.charts.values import Stated
from scripts.documents import ROOT

FOLDER = ROOT / "docs" / "charts"
AGAIN = "run .venv/bin/python -m bench.charts --draw"


@pytest.fixture(scope="module")
def data():
    return figures.read(FOLDER)


def test_the_page_says_what_the_figures_say(data):
    assert (ROOT / "docs" / page.PAGE).read_text() == page.markdown(data), AGAIN


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_chart_is_drawn_from_the_figures(data, name):
    text = (FOLDER / name).read_text()
    assert re.findall(r"<dc:identifier>(\w+)</dc:identifier>", text) == [data.digest], AGAIN


def test_the_page_shows_each_chart(data):
    text = page.markdown(data)
    assert sorted(re.findall(r"\]\(charts/(.+\.svg)\)", text)) == sorted(figures.FIGURES)


def test_each_size_was_played_with_each_scheme(data):
    assert sorted((one.nodes, one.scheme) for one in data.plays) == sorted(
        (nodes, scheme) for nodes in data.sizes for scheme in data.schemes
    )
    assert set(data.sizes) >= {4, 16, 64, 256}
    assert data.schemes == ["none", "xor", "double"]


def test_other_figures_make_another_page_and_charts(data, tmp_path):
    first = dataclasses.replace(data.plays[0], staged_s=77.0)
    other = dataclasses.replace(data, plays=[first, *data.plays[1:]])
    assert "| 77 |" in page.markdown(other)
    assert other.digest != data.digest
    figures.write(tmp_path, other)
    figures.draw(tmp_path, other)
    assert figures.read(tmp_path) == other
    assert {path.name for path in tmp_path.iterdir()} == {figures.DATA, *figures.FIGURES}
    assert all(other.digest in (tmp_path / name).read_text() for name in figures.FIGURES)


def test_constants_are_those_of_the_code():
    found = constants.measure([4], Stated(tensors=20), nbytes=8 << 20, repeat=1)
    assert all(1e-6 < seconds < 1e-2 for seconds in (found.packet_out_s, found.packet_in_s))
    assert 0 < found.encode_byte_s < found.decode_byte_s < 1e-5
    assert all(1e8 < speed < 1e12 for speed in (found.copy_bytes_per_s, found.digest_bytes_per_s))
    assert found.pulled == pytest.approx({"xor/4": 1.0, "double/4": 2.0}, rel=0.05)
    assert 0 < found.encode["xor/4"] < found.encode["double/4"]
    assert list(found.commit) == ["4"]
    assert found.hardware(Stated(), 4).encode_byte_s == found.encode
