"""Coinages that this project used once, and the standard terms that replace them; ``test_words`` finds the rest.

``coined`` is a regular expression. NAMES are identifiers; TEXTS are comments, docstrings and messages; SENTENCES are
docstrings, comments and documents without code in backquotes; TESTS are the words in the name of a test function.
``where``: paths that begin so.
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
REPLICAS = (
    "ckptd/shared/format/", "ckptd/shared/protocol/", "ckptd/core/coordinator/", "ckptd/checkpoint/",
    *(f"client/ckptd_client/{room}/" for room in ("_state", "_image", "_load", "_save/", "dcp")),
)  # fmt: skip
ALL = (*DOCUMENTS, *EDITED, "ckptd/")


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
    Row("let_go", "release", CLIENT),
    Row("[Ss]hares?|MAX_SHARES|replica_shares", "slice, attestation", REPLICAS),
    Row("_?apart|_?(set|check)_apart|APART", "mismatched, differing, unattached, isolate", PRODUCT),
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
    Row("anew", "again, new", ALL),
    Row("as ever", "as usual, unchanged", ALL),
    Row("besides", "also, beyond", ALL),
    Row("hears?|heard", "receives, learns, gets", ALL),
    Row("in vain", "without an answer, without success", ALL),
    Row("nobody", "no process, no user: name it", (*DOCUMENTS, *EDITED)),
    Row("somebody", "a user, another program: name it", (*DOCUMENTS, *EDITED)),
    Row("whoever", "the process, the user, the node that", ALL),
    Row("tells|told", "shows, reports, sends, notifies", ALL),
    Row("(?:goes|go|gone) on", "continues", ("ckptd/",)),
    Row("doors?", "admission", ALL),
    Row("news", "updates, messages", ALL),
    Row("what is so", "the current state", ALL),
    Row("what lies there", "files, segments: name it", (*DOCUMENTS, *EDITED)),
)
TESTS = (  # words in the names of test functions
    Row("nobody|somebody|anybody", "no rank, another user: name it", ("tests/",)),
    Row("told|tells", "is reported, learns, notifies", ("tests/",)),
    Row("hears?|heard", "receives, learns", ("tests/",)),
    Row("anew|as ever|in vain|besides|whoever", "again, as before, without success", ("tests/",)),
    Row("doors?|news|let go|apart", "admission, update, released, separately", ("tests/",)),
)
