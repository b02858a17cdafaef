"""The benchmark's own arithmetic: states of the promised shape, verdicts that mean what they say."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from rich.console import Console  # noqa: E402

from bench import measure, report, states  # noqa: E402
from bench.measure import Sample, Series  # noqa: E402
from bench.report import PeerResult, Report, Row  # noqa: E402

NBYTES = 8 << 20


def seconds(*values):
    return Series("s", values, 0.5)


def test_a_realistic_state_has_the_promised_size_and_number_of_tensors():
    state = states.realistic(NBYTES)
    assert states.nbytes_of(state) == pytest.approx(NBYTES, rel=0.02)
    assert 350 <= len(list(states.tensors(state))) <= 390


def test_a_realistic_state_mixes_what_a_mixed_precision_training_holds():
    state = states.realistic(NBYTES)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.bfloat16}
    masters = state["optimizer"]["masters"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    for index, (name, master) in enumerate(masters.items()):
        adam = state["optimizer"]["state"][index]
        assert adam["exp_avg"].shape == adam["exp_avg_sq"].shape == master.shape == state["model"][name].shape
        assert adam["step"].shape == ()
        assert adam["step"].dtype == torch.int64
    assert state["rng"]["torch"].dtype == torch.uint8
    assert isinstance(state["lr"], float)
    assert isinstance(state["epoch"], int)
    assert isinstance(state["scheduler"], dict)


def test_no_two_tensors_share_memory():
    tensors = list(states.tensors(states.realistic(NBYTES)))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_many_tensors_are_as_many_and_as_small_as_asked():
    state = states.many(100, 16 << 10)
    assert [tensor.nbytes for tensor in states.tensors(state)] == [16 << 10] * 100


def test_states_repeat_and_mutations_show_in_the_fingerprint():
    state, twin = states.realistic(NBYTES), states.realistic(NBYTES)
    assert states.fingerprint(state) == states.fingerprint(twin)
    for step in range(20):
        before = states.fingerprint(state)
        states.mutate(state, step)
        assert states.fingerprint(state) != before


def test_a_cleared_state_holds_nothing_of_what_it_was():
    state = states.many(10, 1024)
    states.clear(state)
    assert all(not tensor.any() for tensor in states.tensors(state))


@pytest.mark.parametrize(
    ("value", "bar", "sense", "verdict"),
    [
        (1.09, 1.10, "<=", "pass"),
        (1.10, 1.10, "<=", "pass"),
        (1.11, 1.10, "<=", "MISS"),
        (0.91, 0.90, ">=", "pass"),
        (0.90, 0.90, ">=", "pass"),
        (0.89, 0.90, ">=", "MISS"),
        (5.00, None, "<=", ""),
        (None, 1.00, "<=", "MISS"),
        (None, None, "<=", "MISS"),
        (float("nan"), 1.00, "<=", "MISS"),
        (float("nan"), 1.00, ">=", "MISS"),
    ],
)
def test_a_verdict_is_pass_only_where_the_bar_is_kept(value, bar, sense, verdict):
    assert Row("row", None, value, bar=bar, sense=sense).verdict == verdict


def test_a_ratio_is_median_over_median():
    row = report.ratio("stall", seconds(1, 2, 30), seconds(0.5, 1, 1.5), "copy", bar=1.1)
    assert row.value == 2
    assert row.verdict == "MISS"


def test_a_rate_is_decimal_gigabytes_per_second():
    assert seconds(0.5, 1, 2).rate(2_000_000_000).values == (4, 2, 1)


def test_what_could_not_be_measured_is_missed_and_says_why():
    row = report.failed("drain", "no daemon")
    assert row.verdict == "MISS"
    assert row.note == "no daemon"


def test_a_yardstick_stands_before_and_after_every_measurement():
    order = []
    marks, results = measure.interleave(3, lambda: order.append("y"), lambda: order.append("m"))
    assert "".join(order) == "ymymymy"
    assert (len(marks), len(results)) == (4, 3)


def test_cpu_seconds_count_the_work_of_the_call():
    sample = measure.timed(lambda: sum(range(5_000_000)))
    assert isinstance(sample, Sample)
    assert 0 < sample.cpu_s <= 2 * sample.seconds + 0.1


@pytest.fixture
def full_report():
    found = Report({"cores": 2}, {"nbytes": NBYTES}, {"copy": seconds(0.1, 0.2, 0.3)})
    found.rows += [
        report.ratio("stall", seconds(1.0), seconds(1.0), "copy", bar=1.1),
        report.ratio("drain", seconds(1.0), seconds(2.0), "writes", bar=0.9, sense=">="),
        report.failed("many", "no daemon"),
    ]
    found.peers.append(PeerResult("torch.save", 2.0, seconds(1.0, 1.5), seconds(1.0, 1.5), seconds(1.0, 1.5), None))
    return found


def test_the_table_says_which_bars_were_missed(full_report):
    console = Console(width=200)
    with console.capture() as capture:
        report.show(full_report, NBYTES, console)
    printed = capture.get()
    assert "1 of 3 bars kept" in printed
    assert printed.count("MISS") == 2
    assert "no daemon" in printed
    assert [row.name for row in full_report.missed] == ["drain", "many"]


def test_the_json_holds_every_value_and_verdict(full_report, tmp_path):
    path = tmp_path / "results.json"
    report.write_json(full_report, path)
    data = json.loads(path.read_text())
    assert [row["verdict"] for row in data["rows"]] == ["pass", "MISS", "MISS"]
    assert data["yardsticks"]["copy"]["values"] == [0.1, 0.2, 0.3]
    assert data["peers"][0]["lost"]["median"] == 1.25


def test_the_picture_is_drawn_from_what_there_is(full_report, tmp_path):
    report.draw(full_report, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    report.draw(Report({}, {}), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()
