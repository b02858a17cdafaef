"""The one tree of errors. Each has a stable code, a message that says what and where, and a hint: what to do next."""

from ckptd.shared.base.wording import cut

_HINT = "\n  hint: "
_MAX_CHARS = 8000  # a name that a file chose may be longer than any screen


class CkptdError(Exception):
    """Base of every error ckptd raises on purpose. A longer message than 8,000 characters is cut off."""

    code = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        message, hint = cut(message, _MAX_CHARS), cut(hint, _MAX_CHARS)
        super().__init__(joined(message, hint))
        self.message = message
        self.hint = hint


def joined(message: str, hint: str) -> str:
    """What str(error) gives of an error with these."""
    return f"{message}{_HINT}{hint}" if hint else message


def parted(text: str) -> tuple[str, str]:
    """The message and the hint, which may be empty, of what str(error) gave."""
    message, _, hint = text.partition(_HINT)
    return message, hint


class UsageError(CkptdError):
    """A misuse that only the caller can correct: a value that cannot be saved, a step saved twice. Raised at once."""

    code = "usage"


class ConfigError(CkptdError):
    """A setting that is unknown, malformed or impossible on this machine."""

    code = "config"


class BudgetError(CkptdError):
    """The state does not fit the arena's memory budget. Names the numbers and the setting to change."""

    code = "budget"


class ConnectError(CkptdError):
    """No daemon answers, or the daemon refused the job."""

    code = "connect"


class WrongStoreError(CkptdError):
    """The store at the path is not the one that the job was saved to, or is missing. Says where the path lies now."""

    code = "wrong-store"


class StaleIncarnationError(CkptdError):
    """The sender belongs to an incarnation that a newer one has replaced."""

    code = "stale"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "a newer start of the job has replaced this one: end this process")


class SaveFailedError(CkptdError):
    """A save can no longer reach the milestone that `wait` waits for. Names the reason."""

    code = "save-failed"


class WaitTimeoutError(CkptdError, TimeoutError):
    """The milestone was not reached in the time given; it may still be."""

    code = "timeout"


class RestoreError(CkptdError):
    """Nothing could be restored, though something should have been: names what is missing or damaged."""

    code = "restore"


class MismatchError(RestoreError):
    """The state does not fit the checkpoint: lists the first differences."""

    code = "mismatch"


class DamagedError(CkptdError):
    """Bytes that do not match their digest, or a structure that breaks the format. Names file and place."""

    code = "damaged"


class OtherVersionError(DamagedError):
    """Bytes in memory of another version of the format than this program reads. Names both versions."""


class IntegrityError(DamagedError):
    """Bytes that are proved in another way than this reader asks for: not keyed, or with another key.

    Says which, and how to give the key or to go without.
    """

    code = "integrity"


class GatherError(CkptdError):
    """Another rank did not take part in a gather to its end."""

    code = "gather"


class ProtocolError(CkptdError):
    """A message that is malformed, too large or of another version."""

    code = "protocol"


class UnknownMessageError(ProtocolError):
    """A message of a kind that this release does not have: the other side is of another one. ``kind`` is its tag."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"message {kind!r} is not known here")
        self.kind = kind


class PeerError(CkptdError):
    """Another node's daemon did not answer, or said why it cannot. Names the node."""

    code = "peer"


def of_code(code: str, message: str, hint: str = "") -> CkptdError:
    """The error of a code that another process sent; of the base class for a code that is none of ours."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and vars(kind).get("code") == code]
    kind: type[CkptdError] = kinds[0] if kinds else CkptdError
    return kind(message, hint=hint)


def is_failure(error: BaseException | None) -> bool:
    """Whether it ends a training that had more to do; Ctrl-C and an exit with code 0 do not."""
    return isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code not in {None, 0})
