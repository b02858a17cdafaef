"""Coinages that this project used once, and the standard terms that replace them; ``test_words`` finds the rest.

A term is a regular expression. A row of NAMES is looked for in the names of the rooms that it lists, a row of PROSE in
their comments, docstrings and texts. ``test_document_words`` has the table of documents.
"""

from typing import NamedTuple

PRODUCT = ("ckptd/", "client/")
CODE = (*PRODUCT, "bench/", "tests/")
DAEMON = ("ckptd/daemon/", "ckptd/core/", "ckptd/peers/", "tests/unit/daemon/", "tests/unit/core/", "tests/simulation/")
PARITY = ("ckptd/parity/", "ckptd/core/", "ckptd/daemon/", "ckptd/shared/protocol/", "ckptd/checkpoint/repair/")


class Row(NamedTuple):
    """``coined``: a pattern; ``standard``: what to write; ``where``: paths that begin so."""

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
        "Board|OpenGate|Gate|_?gates?|_?[Hh]alls?|_Hall|[Cc]ompany|MAX_(COMPANY|GATES)",
        "NodeGroup, PeerExchange, Participants",
        PRODUCT,
    ),
    Row("Landing", "Destination", PRODUCT),
    Row("_?life|_?lives", "process instance", ("ckptd/peers/",)),
)
PROSE = (  # comments, docstrings, texts
    Row(r"at the door|the door\b|\bknock(s|ed)?\b", "waits to join", PRODUCT),
    Row(r"\broll call\b", "inventory", PRODUCT),
    Row(r"\banew\b", "again", PRODUCT),
    Row(r"\bbesides\b", "in addition to, also", PRODUCT),
    Row(r"\b(diary|survey)\b", "event log, query", PRODUCT),
    Row(r"\b(is|are|was|were|be|been) told\b", "a subject and a verb: the daemon sends, the rank receives", PRODUCT),
)
