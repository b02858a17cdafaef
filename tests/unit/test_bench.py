"""The benchmark's own arithmetic: states of the promised shape, verdicts that mean what they say."""

import importlib.util
import json
import math

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("matplotlib") is None:  # imported by the tests that draw
    pytest.skip("matplotlib is not installed", allow_module_level=True)

from rich.console import Console  # noqa: E402

from bench import launch, loop, measure, mesh, mesh_report, pages, peer_report, report, states  # noqa: E402
from bench.measure import Sample, Series  # noqa: E402
from bench.mesh import MeshResult  # noqa: E402
from bench.node import scratch  # noqa: E402
from bench.peer_report import PeerResult  # noqa: E402
from bench.peers import CKPTD, DEEPSPEED, KINDS, OVERLAPPED, Kind  # noqa: E402
from bench.report import Report, Row  # noqa: E402
from bench.run import against_peers  # noqa: E402
from tests import pythons  # noqa: E402
from tests.long_form import in_long  # noqa: E402

NBYTES = 8 << 20


def seconds(*values):
    return Series("s", values, 0.5)


def peer(name, ranks, *lost, **rest):
    return PeerResult(
        name, ranks, 2.0, seconds(0.1), seconds(*lost), seconds(1.0, 1.5), seconds(0.3), nbytes=1 << 30, **rest
    )


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
    found.peers += [peer("torch.save", 1, 1.0, 1.5), PeerResult.absent(KINDS[-1], 2, "not installed: pip install it")]
    found.mesh.append(MeshResult("8 blocks", "rows", 101, 100.0, seconds(0.1), seconds(0.2)))
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


def test_the_json_says_who_did_not_run_and_why(full_report, tmp_path):
    path = tmp_path / "results.json"
    report.write_json(full_report, path)
    absent, rows = json.loads(path.read_text())["peers"][1], json.loads(path.read_text())["mesh"]
    assert (absent["why"], absent["lost"]) == ("not installed: pip install it", None)
    assert rows[0]["ratio"] == pytest.approx(1.01)


def test_pictures_are_drawn_from_what_there_is(full_report, tmp_path):
    report.draw(full_report, tmp_path / "budget.svg")
    peer_report.draw(full_report.peers, tmp_path / "peers.svg")
    mesh_report.draw(full_report.mesh, tmp_path / "mesh.svg")
    assert all("<svg" in (tmp_path / f"{name}.svg").read_text() for name in ("budget", "peers", "mesh"))
    report.draw(Report({}, {}), tmp_path / "empty.svg")
    peer_report.draw([PeerResult.absent(KINDS[0], 1, "no wheel")], tmp_path / "empty.svg")
    mesh_report.draw([], tmp_path / "empty.svg")
    assert not (tmp_path / "empty.svg").exists()


def test_the_same_numbers_give_the_same_picture(full_report, tmp_path):
    for name in ("one", "two"):
        peer_report.draw(full_report.peers, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_tables_go_between_their_marks_in_the_page(full_report, tmp_path):
    machine = dict.fromkeys(("cores", "memory_gib", "kernel", "python", "torch", "load"), 2)
    found = Report(machine, {}, peers=full_report.peers, mesh=full_report.mesh)
    page = tmp_path / "bench.md"
    marks = ("peers-1", "peers-2", "mesh", "machine")
    page.write_text("first\n" + "".join(f"<!-- {mark} -->\nold\n<!-- /{mark} -->\n" for mark in marks) + "last\n")
    pages.write(found, page)
    text = page.read_text()
    assert text.startswith("first\n<!-- peers-1 -->\n| how |")
    assert text.endswith("<!-- /machine -->\nlast\n")
    assert "not installed: pip install it" in text
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="peers-1"):
        pages.write(found, page)


def test_an_overlapped_save_is_held_against_the_best_peer_of_one_rank():
    peers = [peer("slow", 1, 1.0), peer("best", 1, 0.5), peer("other ranks", 2, 0.1), peer(OVERLAPPED, 1, 0.1)]
    peers.append(PeerResult.absent(KINDS[0], 1, "no wheel"))
    (row,) = against_peers(peers, full=True)
    assert (row.yardstick_name, row.value, row.verdict) == ("best", pytest.approx(0.2), "pass")


def test_without_a_core_to_spare_saves_are_held_against_the_engine_that_writes_in_the_loop():
    peers = [peer(DEEPSPEED, 2, 0.65), peer(CKPTD, 2, 1.3), peer(OVERLAPPED, 2, 0.6)]
    assert [row.verdict for row in against_peers(peers, full=True)] == ["MISS", "pass"]


def test_bars_in_seconds_are_facts_for_a_state_of_another_size():
    assert [row.verdict for row in against_peers([peer(CKPTD, 1, 9.0)], full=False)] == ["", ""]


# --- one row ---


def test_what_a_save_cost_is_what_the_loop_took_beyond_undisturbed_iterations():
    quiet = loop._Quiet.around(loop._Quiet([0.4, 0.5], 0.3), loop._Quiet([0.5, 0.9], 0.5))
    taken = loop._Taken(0.1, 1.5, 2.0, 1.5, [0.6, 0.6, 0.6], 7)
    save = taken.beside(quiet)
    assert save.lost_s == pytest.approx(0.5)
    assert save.step_ratio == pytest.approx(1.2)
    assert save.cpu_s == pytest.approx(0.3)
    assert loop._Taken(0.9, 0.9, 0.9, 0.2, [], 7).beside(quiet).lost_s == pytest.approx(0.9)


def test_of_each_save_counts_what_the_slowest_rank_saw():
    def rank(block, ended):
        save = {
            "block_s": block,
            "lost_s": block,
            "durable_s": 2 * block,
            "cpu_s": block,
            "step_ratio": None,
            "nbytes": 10,
        }
        return {"began": 1.0, "ended": ended, "saves": [save, save, save]}

    memory = launch._Memory()
    memory._times, memory._nbytes = [0.5, 1.5, 2.5, 3.5], [100, 300, 200, 900]
    found = launch._result(KINDS[0], [rank(0.1, 2.0), rank(0.2, 3.0)], memory)
    assert found.block.values == (0.2, 0.2)
    assert found.durable.median == 0.4
    assert found.cpu.median == pytest.approx(0.3)
    assert (found.peak_nbytes, found.held_nbytes) == (200, 100)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", pythons.shim())  # imports are no part of what a row measures
    with scratch(tmp_path) as (shm, disk):
        yield launch.Job(NBYTES, 1, 1, shm, disk, deadline_s=600)
        assert not list(shm.iterdir())
        assert not list(disk.iterdir())


def test_a_package_that_is_not_there_is_a_row_that_says_what_to_install(job):
    kind = Kind("nobody", "nobody.Nothing", needs="ckptd_no_such_package", install="pip install nobody")
    assert launch.measure(job, kind, 1).why == "not installed: pip install nobody"


@pytest.mark.timeout(700)
def test_a_rank_that_fails_is_a_row_with_the_reason_and_the_other_is_ended(job):
    found = launch.measure(job, Kind("nobody", "nobody.Nothing"), 2)
    assert found.why.startswith("it failed: ")
    assert "StopIteration" in found.why


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [OVERLAPPED, *in_long("torch.save + fsync")])
def test_a_row_of_two_ranks_is_measured_and_leaves_nothing(job, name):
    kind = next(kind for kind in KINDS if kind.name == name)
    found = launch.measure(job, kind, 2)
    if "shares a page" in found.why:  # docs/failures.md: a neighbour's write may cost a process one late save
        found = launch.measure(job, kind, 2)
    assert found.why == ""
    assert (found.ranks, len(found.lost.values)) == (2, 1)
    assert found.nbytes == pytest.approx(NBYTES / 2, rel=0.2)
    assert found.durable.median > 0


# --- 16 plans ---


@pytest.mark.parametrize(("way", "ratio"), [("one writer", 8.0), ("whole layers", 1.5), ("rows", 1.05)])
def test_rows_are_the_only_even_shares_of_uneven_layers(monkeypatch, way, ratio):
    monkeypatch.setattr(mesh, "_WIDTH", 64)
    monkeypatch.setattr(mesh, "_VOCABULARY", 4096)
    stage = "embedding, 6 blocks, head"
    sizes = [mesh._plan_nbytes(stage, way, rank) for rank in range(mesh.RANKS)]
    nbytes = 14 * sum(math.prod(shape) for layer in mesh.STAGES[stage] for shape in layer().values())
    assert nbytes < sum(sizes) < 1.1 * nbytes  # each byte once, and headers
    found = max(sizes) / (sum(sizes) / len(sizes))
    assert found <= ratio if way == "rows" else found > ratio * 0.95
