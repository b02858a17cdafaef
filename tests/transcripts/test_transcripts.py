"""Each .txt here is a story: what the core hears (>) and what it has done (<). A change of behaviour is a diff of it.

TRANSCRIPTS=rewrite makes the files anew from what the core does now; review the diff as you would review code.
"""

import os
import pathlib
import shlex

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence
from tests.runs import RUN
from tests.seals import a_seal
from tests.unit.core.a_job import KEY, AJob

HERE = pathlib.Path(__file__).parent
STORIES = sorted(HERE.glob("*.txt"))
HIDDEN = {
    "version",
    "release",
    "job",
    "reply_to",
    "client_started",
    "node",
    "nbytes",
    "session",
    "capacity",
    "run",
    "store_id",
    "after",
}


def save_of(text):
    return SaveId(*map(int, text.split(".")), RUN)


def show(value):
    if isinstance(value, SaveId):
        return f"{value.incarnation}.{value.counter}.{value.step}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    if hasattr(value, "__struct_fields__"):
        return line(value)
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def fields(value):
    names = getattr(value, "__struct_fields__", None) or [
        name for kind in reversed(type(value).__mro__) for name in getattr(kind, "__slots__", ())
    ]
    return {name: getattr(value, name) for name in names}


def line(value):
    """Name and telling fields; what is empty says nothing."""
    if isinstance(value, act.ToRank):
        return f"rank {value.rank} of {value.session}: {line(value.message)}"
    words = [
        f"{k}={show(v)}" for k, v in fields(value).items() if k not in HIDDEN and v not in (None, "", False, 0, [], ())
    ]
    if type(value).__name__ in ("AllocateSlots", "SlotReady"):
        words = [f"rank={value.rank}", *[w for w in words if not w.startswith("rank=")]]
    return " ".join([type(value).__name__, *words])


class Story:
    """Says the lines of a story to a job."""

    def __init__(self):
        self.job = AJob()

    def say(self, text):
        verb, *words = shlex.split(text)
        flags = dict(w.split("=", 1) if "=" in w else (w, "") for w in words if not w[0].isdigit() or "=" in w)
        plain = [w for w in words if w[0].isdigit() and "=" not in w]
        self.job.take()
        getattr(self, f"do_{verb}")(plain, flags)
        return [line(action) for action in self.job.take()]

    def do_job(self, plain, flags):
        steps = int(flags.pop("steps", 1))
        numbers = {k: float(v) if "_s" in k and k != "slots_per_rank" else int(v) for k, v in flags.items()}
        self.job = AJob(cadence=Cadence(steps=steps), **numbers)

    def do_attach(self, plain, flags):
        self.job.attach(
            int(plain[0]), flags.get("as", "a"), incarnation=int(flags.get("incarnation", 0)),
            takeover="takeover" in flags, world=int(flags.get("world", 0)),
        )  # fmt: skip

    def do_number(self, plain, flags):
        self.job.number(int(plain[0]))

    def do_scan(self, plain, flags):
        halves = tuple(ev.Partial(save_of(s), complete=True) for s in flags.get("complete", "").split(",") if s)
        self.job.scan(*map(save_of, plain), partials=halves, problem=flags.get("problem", ""))

    def do_slots(self, plain, flags):
        """Asks, and all that is allocated for it comes."""
        capacity = int(flags.get("capacity", 4096))
        self.job.ask(int(plain[0]), flags.get("as", "a"), capacity)
        for action in self.job.of(act.AllocateSlots):
            for _ in range(action.count):
                self.job.ready(action.rank, capacity)

    def do_stage(self, plain, flags):
        session = flags.get("as", "a")
        self.job.stage(int(plain[0]), save_of(plain[1]), session=session, slot=flags.get("in", ""))

    def do_skip(self, plain, flags):
        self.job.say(ev.SaveSkipped(
            job=KEY, request=self.job.request(), rank=int(plain[0]), session="a", save=save_of(plain[1]),
            reason="no slot was free",
        ))  # fmt: skip

    def do_digests(self, plain, flags):
        self.job.digest_all(save_of(plain[0]))

    def do_drained(self, plain, flags):
        self.job.say(ev.Drained(job=KEY, save=save_of(plain[0]), problem=flags.get("problem", "")))

    def do_voted(self, plain, flags):
        self.job.say(ev.VoteWritten(job=KEY, save=save_of(plain[0]), problem=flags.get("problem", "")))

    def do_committed(self, plain, flags):
        self.job.say(ev.CommitEnded(job=KEY, save=save_of(plain[0]), nbytes=20, problem=flags.get("problem", "")))

    def do_gone(self, plain, flags):
        self.job.gone(int(plain[0]), flags.get("as", "a"))

    def do_close(self, plain, flags):
        self.job.detach(int(plain[0]), flags.get("as", "a"))

    def do_force(self, plain, flags):
        self.job.say(ev.DrainAsked(job=KEY, request=self.job.request(), rank=0, session="a"))

    def do_load(self, plain, flags):
        self.job.ask_load(int(plain[0]), flags.get("as", "a"))

    def do_read(self, plain, flags):
        session = flags.get("as", "a")
        self.job.report(int(plain[0]), save_of(plain[1]), flags["from"], flags.get("problem", ""), session=session)

    def do_wait(self, plain, flags):
        self.job.tick(float(plain[0]))

    def do_restart(self, plain, flags):
        """The daemon dies; the next one finds what is told by the lines up to `adopted`."""
        self.job.catalogue = AJob(world=self.job.world).catalogue

    def do_slot(self, plain, flags):
        save = save_of(plain[1]) if len(plain) > 1 else None
        self.job.say(ev.SlotAdopted(
            job=KEY, rank=int(plain[0]), slot=flags["name"], capacity=4096, world_size=self.job.world, save=save,
            nbytes=10, seal=a_seal(KEY, save, int(plain[0])) if "digested" in flags else None,
        ))  # fmt: skip

    def do_lives(self, plain, flags):
        self.job.say(ev.RankFound(job=KEY, rank=int(plain[0]), session=flags.get("as", "a"), pid=1, host="host"))

    def do_adopted(self, plain, flags):
        self.job.did += self.job.catalogue.adopted(KEY, self.job.now)


def told(text):
    """The story as the core tells it: its comments and lines (>) with what follows from each (<)."""
    story, out = Story(), []
    for row in text.splitlines():
        if row.startswith("<"):
            continue
        out.append(row)
        if row.startswith("> "):
            out += ["< " + done.replace("\n", "\\n") for done in story.say(row[2:])]
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path):
    text = path.read_text()
    now = told(text)
    if os.environ.get("TRANSCRIPTS") == "rewrite":
        path.write_text(now)
    else:
        assert now == text


def test_there_are_stories():
    assert len(STORIES) >= 8
