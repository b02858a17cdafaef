"""Every reader of every kind of file, as calls of a directory. Each raises errors of ckptd's, or none."""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import traceback

import msgspec
import torch

from ckptd.arena.arena import Arena
from ckptd.arena.journal_files import found_journals
from ckptd.arena.saved_topology import kept_topologies
from ckptd.checkpoint.export import run
from ckptd.checkpoint.export.run import Order
from ckptd.checkpoint.finish import finish
from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.scrub import scrub_piece
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd.daemon.adoption import Adoption  # noqa: F401
from ckptd.daemon.liveness import Liveness, job_of, somebody_waits
from ckptd.daemon.status_query import decode_answer
from ckptd.parity.files import Parities
from ckptd.peers.identity import identify
from ckptd.peers.keys import read_keys
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.regular import open_followed
from ckptd.shared.format import slot
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import messages
from ckptd.shared.protocol.publication import Publication
from ckptd.shared.protocol.scrubbing import BEGIN
from ckptd.shared.protocol.status import Status
from ckptd.shared.stores.kinds import open_files
from ckptd.shared.torchfile import dcp_metadata  # noqa: F401 - imported before time is taken
from ckptd.store.facts import Committer
from ckptd.store.journal import read_journal
from ckptd.store.messages import FrameReader, decode_request, hello_frame
from ckptd.store.posix.identity import STORE_FILE, store_id_at
from ckptd.store.posix.links import is_linked_to
from ckptd.store.posix.publish import publish
from ckptd.store.posix.removal import remove_checkpoint, sweep_trash
from ckptd.store.posix.scan import scan
from ckptd.system.config import load_config
from ckptd.system.files import FileLayer
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._load.reader import open_slot
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import SAVE
from tests.hostile import reader
from tests.on_meshes import rank_of, spread
from tests.records import pinned, superseded, take, taken_over_by
from tests.runs import RUN, STORE_ID, TAKER

GROUP = Group(0, 1, "test")


def key_of(final):
    """The job of a checkpoint's directory."""
    return JobKey(str(pathlib.Path(final).parents[1]), pathlib.Path(final).parent.name)


def quietly(*words):
    """A verb, whose exit status says what it found."""
    assert invoke(list(words)) in (0, 1, 2)


def exported(form):
    def read(path):
        with tempfile.TemporaryDirectory(prefix="ckptd-mutant-") as folder:
            out = f"{folder}/out" + (".pt" if form == "torch" else "")
            run.export(Order(source=path, out=out, format=form))

    return read


def numbered(final):
    key, fs = key_of(final), FileLayer()
    take(fs, key, TAKER)
    taken_over_by(fs, key, SAVE, Committer(1, "session", STORE_ID))
    superseded(fs, key)
    pinned(fs, key)
    scan(fs, key)
    sweep_trash(fs, key)


def pruned(final):
    key, fs = key_of(final), FileLayer()
    for entry in scan(fs, key).committed[1:]:
        remove_checkpoint(fs, key, entry.committed.save)


def of_boxes(call):
    """A reader of the state with boxes, which the words of the command say."""

    def read(final):
        before, sys.argv = sys.argv, ["reader", "", "boxes"]
        try:
            call(final)
        finally:
            sys.argv = before

    return read


def published(final):
    key = key_of(final)
    root = pathlib.Path(final).parents[2]
    to = Publication(str(root / "out"), whole=True, pointer=str(root / "latest"), text="tag")
    publish(FileLayer(), key, SAVE, {SAVE: to})
    is_linked_to(FileLayer(), key, os.path.basename(final))


def plugin(final):
    """What a class of torch's does not take, DCP passes on as it is raised."""
    try:
        reader.plugin(final)
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        if any(frame.name == "load_state_dict" for frame in traceback.extract_tb(error.__traceback__)):
            raise reader.RefusedError(str(error)) from error
        raise


def scrubbed(final):
    """Piece by piece, each of one block."""
    at = BEGIN
    while at is not None:
        at = scrub_piece(final, at, 1, XXH3).next


CHECKPOINT = {
    "load": reader.load,
    "load_two": reader.load_two,
    "load_from": reader.load_from,
    "plugin": plugin,
    "verify": verify_path,
    "scrub": scrubbed,
    "list": lambda final: quietly("list", os.path.dirname(final)),
    "export torch": exported("torch"),
    "export dcp": exported("dcp"),
    "export safetensors": exported("safetensors"),
    "pin": lambda final: quietly("pin", final),
    "numbers": numbered,
    "publish": published,
    "rebuild": rebuild,
    "prune": pruned,
}
JOURNAL = {"journal": lambda path: read_journal(open_files(str(path), XXH3))}
BOXES = {name: of_boxes(call) for name, call in CHECKPOINT.items()}


def rows_of_four(rank):
    """What each of four ranks saves: parts of tensors, of which not every rank has one, and values of its own."""
    rows, _ = spread("rows", (512, 96), range(4), (2, 2), (0, 1))
    few, _ = spread("few", (3, 2), range(4), (4,), (0,))
    return {"rows": rows, "few": few, "plain": torch.ones(3), "rank": rank}


def load_others(final):
    """As a rank of two, which needs some images of the four: those that the index names. It gets its own rows."""
    with rank_of(1, 2):
        cuts = {"rows": (512, 96), "few": (3, 2)}
        mine = {name: spread(name, shape, range(2), (2,), (0,), empty=True) for name, shape in cuts.items()}
        state = {"plain": torch.zeros(3), "rank": 0} | {name: tensor for name, (tensor, _) in mine.items()}
        fitted, _, _ = read_checkpoint(final, state, group=Group(1, 2, "test"))
        fitted.finish(state)
        assert all(torch.equal(tensor.to_local(), part) for tensor, part in mine.values())


RANKS = {
    "load": load_others,
    "verify": verify_path,
    "scrub": scrubbed,
    "rebuild": rebuild,
    "list": CHECKPOINT["list"],
    "prune": pruned,
}
UNFINISHED = {
    "list": lambda path: quietly("list", os.path.dirname(path)),
    "verify": lambda path: verify_path(os.path.dirname(path)),
    "numbers": numbered,
    "finish": lambda path: finish(key_of(path), "mutant"),
}
PARITY = {"verify": verify_path, "scrub": scrubbed, "rebuild": rebuild, "list": CHECKPOINT["list"], "prune": pruned}


def load_dcp(path):
    load_from(path, {"w": torch.zeros(4, 3), "b": torch.zeros(5), "lr": 0.0, "seed": None}, GROUP)


def load_tensors(path):
    load_from(path, {"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.int64)}, GROUP)


def load_file(path):
    load_from(os.path.join(path, "1.safetensors"), {"a": torch.zeros(4, 3)}, GROUP)


DCP = {"load_from": load_dcp, "verify": verify_path}
SAFETENSORS = {"load_from": load_tensors, "one file": load_file}


def exported_zero(path):
    exported("torch")(path)


ZERO = {"export torch": exported_zero, "export dcp": exported("dcp"), "export safetensors": exported("safetensors")}


def adopted(path):
    """What a daemon does first with an arena."""
    arena = Arena(path)
    arena.open()
    try:
        for found in arena.scan():
            if found.seal.job is not None:
                with_tail(arena, found)
        Parities(arena).scan()
        jobs = os.path.join(path, "jobs")
        for name in os.listdir(jobs):
            job_of(os.path.join(jobs, name))
            live = Liveness()
            live.look(os.path.join(jobs, name))
            live.close()
        somebody_waits(path)
        kept_topologies(path)
        found_journals(path)
    finally:
        arena.close(remove=False)


def with_tail(arena, found):
    job = found.seal.job
    if found.seal.state is slot.SlotState.DIGESTED and os.path.exists(arena.slot_path(job, found.name)):
        arena.fragments(job, found.name)
        arena.digests(job, found.name, found.seal.save)
        arena.forget_mapping(job, found.name)


def opened(path):
    for found in sorted(pathlib.Path(path).rglob("*.slot")):
        with contextlib.suppress(OSError), open_followed(str(found)) as file:
            file.seek(-slot.SEALS_NBYTES, os.SEEK_END)
            seal = slot.decode_seals(file.read())[2]
            open_slot(str(found), seal.job or JobKey("/store", "demo"), seal.save or SaveId(1, 1, 1, RUN), seal.rank)


ARENA = {"adopt": adopted, "open": opened, "verify": verify_path}


def file_of(path):
    return os.path.join(path, "file")


def bytes_of(path):
    return pathlib.Path(file_of(path)).read_bytes()


def framed(path):
    """As a worker reads it, and as bytes of a frame whose length is a part of it."""
    raw = bytes_of(path)
    for sent in (len(raw).to_bytes(4, "little") + raw, raw):
        frames = FrameReader(decode_request, theirs="the daemon", ours="the worker")
        frames.feed(hello_frame())
        frames.feed(sent)


CONFIG = {"config": lambda path: load_config({}, {"CKPTD_CONFIG": file_of(path)})}
KEYS = {"keys": lambda path: read_keys(file_of(path))}
IDENTITY = {"identity": lambda path: identify(config_in(path))}


def config_in(path):
    os.makedirs(f"{path}/arena", mode=0o700, exist_ok=True)
    shutil.copy(file_of(path), f"{path}/arena/identity")
    os.chmod(f"{path}/arena/identity", 0o600)
    return load_config({"arena": f"{path}/arena", "peer_address": "127.0.0.1"}, {"CKPTD_CONFIG": "/dev/null"})[0]


def status_of(path):
    from ckptd.shared.base.decoding import MALFORMED  # noqa: PLC0415

    try:
        msgspec.json.decode(bytes_of(path), type=Status)
    except MALFORMED:
        return


def decoder(decode):
    return lambda path: decode(bytes_of(path))


def of_wire(name, decode):
    """Of a union of messages."""
    return {"decode": decoder(decode)} | ({"frame": framed} if name == "store_requests" else {})


def store_at(path):
    shutil.copy(file_of(path), os.path.join(path, STORE_FILE))
    store_id_at(FileLayer(), path)


STORE = {"id": store_at}
MESSAGES = {
    "REQUESTS": {"decode": decoder(messages.decode_request)},
    "REPLIES": {"decode": decoder(messages.decode_reply)},
    "survey": {"decode": decoder(decode_answer)},
    "status": {"decode": status_of},
}
