"""Files of DeepSpeed's that contradict themselves, or are made to do harm to who reads them."""

import os
import pickle
import resource
import shutil
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.checkpoint.export.deepspeed.source import ZeroCheckpoint
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.torchfile.pickle_read import Made
from tests import pythons

GOLDEN = Path(__file__).parents[1] / "golden" / "zero"
TAG = "global_step3"
TAGS = {"stage1": TAG, "stage2": TAG, "stage3": TAG, "pipeline": "global_step2"}
OPTIMIZER, MODEL = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
HEAD, END = b"\x80\x02", b"."
RANKS = b"}X\x0f\x00\x00\x00partition_count"


def rewritten(path, change):
    """The same archive with another pickle, all its checksums right."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in entries:
            new.writestr(name, change(data) if name.endswith("/data.pkl") else data)


def opened(path):
    """All that an export would look at."""
    checkpoint = ZeroCheckpoint(str(path))
    return checkpoint.tensors(checkpoint.names), checkpoint.stock_leaves(), checkpoint.paths, checkpoint.files


@pytest.fixture
def copy(tmp_path):
    return lambda stage: Path(shutil.copytree(GOLDEN / stage / TAG, tmp_path / stage))


class _Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_what_a_pickle_names_is_never_called(copy, tmp_path):
    harm = pickle.dumps(_Harm(tmp_path / "harm"), 2)
    found = pickle_read.loads(harm, where="x")
    assert (type(found), found.of) == (Made, "posix.mkdir")
    path = copy("stage2")
    rewritten(path / MODEL, lambda data: data.replace(b"K\x03", harm[2:-1], 1))
    opened(path)
    assert not (tmp_path / "harm").exists()
    pickle.loads(harm)  # noqa: S301
    assert (tmp_path / "harm").exists()  # it would have


def doubled(count):
    """Lists of two of the list before: 2^count things in few bytes."""
    return HEAD + b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(count)) + END


def tuple_keys(count):
    """A dict whose key takes 2^count steps to hash."""
    made = b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(count))
    return HEAD + b"}K\x01q\x000" + made + b"h%cK\x02s." % count


LARGE = b"(" + b"K\x01" * 200_000 + b"tq\x00"
BOMBS = {
    "doubled": doubled(200),
    "tuple keys": tuple_keys(200),
    "deep": HEAD + b"]" * 200_000 + b"a" * 199_999 + END,
    "deep calls": HEAD + b"cx\ny\nq\x00" + b"0" + b"h\x00" * 100_000 + b")R" + b"\x85R" * 99_999 + END,
    "sizes": HEAD + LARGE + b"\x85q\x01ctorch\nSize\nq\x02" + b"0h\x02h\x01R" * 100_000 + END,
    "calls": HEAD + LARGE + b"ctorch._utils\n_rebuild_tensor_v2\nq\x02" + b"0h\x02h\x00R" * 100_000 + END,
    "names": HEAD + b"X\x00\x00\x00\x01" + b"x" * (1 << 24) + b"q\x00" + b"0h\x00h\x00\x93" * 100_000 + END,
    "claims": HEAD + b"\x8d" + b"\xff" * 7 + b"\x3f" + END,
    "claims a number": HEAD + b"\x8b\xff\xff\xff\x7f" + END,
    "memo": HEAD + b"]r\xff\xff\xff\xff" + END,
    "no mark": HEAD + b"t" * 10 + END,
    "nothing": HEAD + END,
    "no end": HEAD + b"N" * 100_000,
    "extension": HEAD + b"\x82\x01" + END,
}  # fmt: skip


@pytest.mark.timeout(240)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_takes_no_more_than_its_length_allows(bomb, tmp_path):
    """In a process of its own, with 1 GiB and 20 s."""
    (tmp_path / "bomb").write_bytes(BOMBS[bomb])
    code = """
import resource, sys
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.base.errors import DamagedError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    pickle_read.loads(open(sys.argv[1], "rb").read(), where="bomb")
except DamagedError as error:
    assert "bomb" in str(error) and len(str(error)) < 500
"""
    pythons.run([sys.executable, "-c", code, str(tmp_path / "bomb")], check=True, timeout=120)


def test_a_pickle_that_is_too_long_is_not_begun():
    with pytest.raises(DamagedError, match=r"bomb: a pickle of .* more than any checkpoint"):
        pickle_read.loads(HEAD + b"N" * pickle_read.MAX_NBYTES + END, where="bomb")


def test_a_part_that_no_rank_has_is_missed(copy):
    path = copy("stage2")
    rewritten(path / OPTIMIZER, lambda data: data.replace(b"embed.weight", b"embed.heavy!"))
    with pytest.raises(DamagedError, match=r"'model.embed.weight' \[13, 6\]: 76 of 78 elements are in no file"):
        opened(path)


@pytest.mark.timeout(240)
def test_one_dict_in_many_places_is_refused_at_once(copy):
    """Each place a few bytes, and each would be gone through."""
    path, began_s = copy("stage1"), time.monotonic()
    names = b"".join(b"X\x07\x00\x00\x00%07d)" % i for i in range(20_000))
    shapes = b"](}q\xff(" + names + b"u" + b"h\xff" * 200_000 + b"e"
    rewritten(path / MODEL, lambda data: _with(data, "param_shapes", shapes))
    with pytest.raises(DamagedError, match="several groups are one"):
        opened(path)
    assert time.monotonic() - began_s < 20


def _with(data, key, value):
    """The pickle of a dict with one more item, of its own opcodes, at its end."""
    name = key.encode()
    assert data.endswith(b"u.")
    return data[:-1] + b"X" + len(name).to_bytes(4, "little") + name + value + b"s."


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        (MODEL, "param_shapes", b"N", "has no param_shapes"),
        (MODEL, "param_shapes", b"](}e", "has no|differ in number"),
        (MODEL, "param_shapes", b"](K\x01K\x02e", "shapes of the parameters are none"),
        (OPTIMIZER, "optimizer_state_dict", b"K\x01", "no file of ZeRO's"),
        (OPTIMIZER, "optimizer_state_dict", b"}", "different numbers of ranks"),
        (OPTIMIZER, "optimizer_state_dict", RANKS + b"J\xff\xff\xff\x7fs", "missing, of 2147483647"),
        (OPTIMIZER, "optimizer_state_dict", RANKS + b"K\x02s", "has no single_partition"),
    ],
)  # fmt: skip
def test_what_says_something_else_is_named(copy, file, key, value, words):
    path = copy("stage2")
    rewritten(path / file, lambda data: _with(data, key, value))
    with pytest.raises(CkptdError, match=words) as raised:
        opened(path)
    assert str(path) in str(raised.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_flipped_is_read_or_refused(data, tmp_path_factory):
    """In a pickle, its checksum made right; or anywhere in a file."""
    stage = data.draw(st.sampled_from(sorted(TAGS)))
    path = Path(shutil.copytree(GOLDEN / stage / TAGS[stage], tmp_path_factory.mktemp("zero") / TAG))
    file = path / data.draw(st.sampled_from(sorted(os.listdir(path))))
    flips = data.draw(
        st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)
    )

    def change(raw):
        made = bytearray(raw)
        for place, byte in flips:
            made[int(place * len(made))] = byte
        return bytes(made)

    if data.draw(st.booleans()):
        rewritten(file, change)
    else:
        file.write_bytes(change(file.read_bytes()))
    why = str(path)
    try:
        opened(path)
    except (CkptdError, OSError) as error:
        why = str(error)
    finally:
        shutil.rmtree(path)
    assert str(path) in why


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [OPTIMIZER, MODEL])
def test_a_pipe_never_holds_the_reader(name, copy):
    path = copy("stage2")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(OSError, match=r"no regular file"):
        opened(path)


def test_a_pickle_that_claims_to_be_long_is_not_read(copy):
    """Its length is looked at before; a compressed one could be anything."""
    path = copy("stage2")
    with zipfile.ZipFile(path / MODEL, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("x/data.pkl", b"\0" * (1 << 27))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="is compressed"):
        opened(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
