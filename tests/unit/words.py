"""Coinages that this project used once, and the standard terms that replace them; ``test_words`` finds the rest.

``coined`` is a regular expression. NAMES are identifiers; TEXTS are comments, docstrings and messages; SENTENCES are
docstrings, comments and documents without code in backquotes. ``where``: paths that begin so.
"""

from typing import NamedTuple

PRODUCT = ("ckptd/", "client/")
CLIENT = ("client/ckptd_client/",)
_ROOMS = ("_gather", "_state", "_local", "_preempt", "_image", "_daemon", "_save", "_load", "demo")
EDITED = ("bench/", *(f"client/ckptd_client/{room}/" for room in _ROOMS))  # rooms whose sentences were rewritten
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/", "deploy/", "systemd/")
CODE = (*PRODUCT, "bench/", "tests/")
DAEMON = ("ckptd/daemon/", "ckptd/core/", "ckptd/peers/", "tests/unit/daemon/", "tests/unit/core/", "tests/simulation/")
PARITY = ("ckptd/parity/", "ckptd/core/", "ckptd/daemon/", "ckptd/shared/protocol/", "ckptd/checkpoint/repair/")


class Row(NamedTuple):
    """A coinage, what to write in its place, and where."""

    coined: str
    standard: str
    where: tuple[str, ...]


NAMES = (  # of variables, functions, classes, modules and fields
    Row("Door|_?door|doors|Knocked|knock(ed|ers)?|Introduced", "admission, join request, JoinRequested", DAEMON),
    Row("Visited|visited|_visits?", "FormerNodeReported", ("ckptd/core/",)),
    Row("_?[Ss]eats?|seated|seat_of", "RankConnection, admitted", DAEMON),
    Row("_?[Ll]etters?", "Incoming, request", ("ckptd/daemon/",)),
    Row("_?[Dd]esk|StatusDesk|StepsDesk|_open_desk", "StatusService, StepsService", CODE),
    Row("_?[Dd]iary", "EventLog", PRODUCT),
    Row("_?[Ss]urveys?|_surveyed", "StatusQuery", PRODUCT),
    Row("Effects|ProtectEffects|effects", "ActionExecutor, ParityExecutor", PRODUCT),
    Row("_?[Kk]eeps|Due|_?roll_call|RollCall", "SlotRetention, DrainCadence, InventoryBarrier", DAEMON),
    Row("_?[Ee]ncodes", "ParityScheduler", ("ckptd/core/",)),
    Row("_?[Pp]ieces?|HeldPiece|DropPiece|Piece(Adopted|Asked|Told)", "ParityChunk, chunk", PARITY),
    Row("Column", "DataColumn", PARITY),
    Row("[Oo]utlived|lost_since", "SavesObsolete, obsolete_since", DAEMON),
    Row(r"_?(judged_|end_)?halves|\bhalf\b", "incomplete saves", ("ckptd/core/",)),
    Row(
        "Boards?|OpenGate|Gate|_?gates?|_?[Hh]alls?|_Hall|[Cc]ompany|MAX_(COMPANY|GATES)",
        "NodeGroup, PeerExchange, Participants",
        PRODUCT,
    ),
    Row("Landing", "Destination", CLIENT),
    Row("Looks?", "Sampling, Sample", CLIENT),
    Row("Word", "RankRecord, RankPlan, Message", (*CLIENT, "ckptd/peers/")),
    Row("Fetch", "DeviceCopy", CLIENT),
    Row("_?life|_?lives", "process instance", ("ckptd/peers/",)),
)
TEXTS = (
    Row(r"at the door|the door\b|\bknock(s|ed)?\b", "waits to join", PRODUCT),
    Row(r"\broll call\b", "inventory", PRODUCT),
    Row(r"\banew\b", "again", PRODUCT),
    Row(r"\bbesides\b", "in addition to, also", PRODUCT),
    Row(r"\b(diary|survey)\b", "event log, query", PRODUCT),
    Row(r"\b(is|are|was|were|be|been) told\b", "a subject and a verb: the daemon sends, the rank receives", PRODUCT),
)
SENTENCES = (
    Row("anew", "again, new", (*DOCUMENTS, *EDITED)),
    Row("as ever", "as usual, unchanged", (*DOCUMENTS, *EDITED)),
    Row("besides", "also, beyond", (*DOCUMENTS, *EDITED)),
    Row("hears?|heard", "receives, learns, gets", (*DOCUMENTS, *EDITED)),
    Row("in vain", "without an answer, without success", (*DOCUMENTS, *EDITED)),
    Row("nobody", "no process, no user: name it", (*DOCUMENTS, *EDITED)),
    Row("somebody|whoever", "a user, another program: name it", (*DOCUMENTS, *EDITED)),
    Row("tells|told", "shows, reports, sends, notifies", (*DOCUMENTS, *EDITED)),
    Row("doors?", "admission", (*DOCUMENTS, *EDITED)),
    Row("news", "updates, messages", (*DOCUMENTS, *EDITED)),
    Row("what is so", "the current state", (*DOCUMENTS, *EDITED)),
    Row("what lies there", "files, segments: name it", (*DOCUMENTS, *EDITED)),
)
