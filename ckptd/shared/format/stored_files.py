"""How files are read from a store: each reader of a checkpoint uses this, each kind of store implements it."""

from typing import Protocol

from ckptd.shared.format.integrity import Integrity


class StoredFile(Protocol):
    """One file, open. For several threads."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def read(self, into: memoryview, offset: int, nbytes: int) -> int:
        """Fills into with the bytes from offset on. Returns how many of nbytes there were: fewer where the file ends.

        into has nbytes rounded up to whole pages, of memory that starts at a page, and offset is whole pages too:
        then nothing is copied on the way. Else open the file ``cached``. Raises OSError.
        """

    def close(self) -> None:
        """Nothing can be read any more. Idempotent."""


class StoredFiles(Protocol):
    """The files at one location of a store: a checkpoint's, as a rule.

    Names have at most two folders, as ``sets/e00000001-0123abcd/node1.vote``. Only regular files are
    read: a link or a pipe raises OSError, at once. integrity: how what is read must be proved; by a keyed one, with
    that key.
    """

    location: str  # printable; ends in the name of what lies there
    integrity: Integrity

    def where(self, name: str) -> str:
        """Location of one of the files, for people."""

    def names(self, folder: str = "") -> list[str]:
        """Names there, in order. Raises OSError: FileNotFoundError where there is nothing, NotADirectoryError."""

    def below(self, name: str) -> "StoredFiles":
        """The files of what has a name there: of a checkpoint of the job whose location this is."""

    def modified(self, name: str) -> float:
        """When a file was written, in seconds since 1970. Raises OSError."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError, ELOOP for a symbolic link."""

    def read(self, name: str, max_nbytes: int) -> bytes:
        """Content of a file. Raises OSError EFBIG, before it is read, when there is more than max_nbytes of it."""

    def open(self, name: str, *, cached: bool = False) -> StoredFile:
        """A file, to be closed by the caller. cached: it is read in small parts, or by several processes of the node.

        Raises OSError.
        """

    def is_replaced(self, name: str, path: str) -> bool:
        """Whether path, at which a file of a committed checkpoint was published, has other bytes since.

        False when nothing lies there, or it cannot be known.
        """

    def job(self) -> str | None:
        """The job at whose place on its store this is; None for a copy that lies somewhere."""


def read_exactly(file: StoredFile, offset: int, into: memoryview) -> None:
    """Fills into, of a file opened ``cached``. Raises OSError, EOFError where the file ends before."""
    found = file.read(into, offset, len(into))
    if found < len(into):
        raise EOFError(f"ends at byte {offset + found}")


def read_some(file: StoredFile, offset: int, nbytes: int) -> bytes:
    """Bytes of a file opened ``cached``, fewer where it ends. Raises OSError."""
    into = bytearray(nbytes)
    with memoryview(into) as view:
        found = file.read(view, offset, nbytes)
    return bytes(into[:found])
