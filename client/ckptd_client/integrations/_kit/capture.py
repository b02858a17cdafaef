"""What a framework's own saver would write below a directory, as files to be staged.

The saver runs as it is, so what it writes is right for that release, its plug-ins and classes derived from it. Only
torch.save and safetensors' save_file, in the thread that saves, keep the tensors instead of writing them; small files
are really written, to a temporary directory. So is what a saver writes in another way: right too, copied once more.
A saver of the user's own, a hook too, may change the tensors when it has saved them, as one does that saves an average
of the weights and puts them back: what comes through its hands is copied at once, and once more when it is staged.
"""

# ruff: noqa: SLF001 - frames have no public name

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from ckptd_client._image.file_bytes import FileBytes
from ckptd_client.files import SafetensorsFile, TorchFile, TrainerFile

# Where frameworks keep a name of their own for safetensors.torch.save_file.
_SAVE_FILE = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
# Whose savers leave alone, until the checkpoint is whole, the tensors that they have saved.
_KNOWN = sys.stdlib_module_names | {"accelerate", "peft", "safetensors", "torch", "transformers"}
_one = threading.Lock()  # the functions are the process's


class Capture:
    """A context manager: while it is entered, what is saved below ``directory`` is kept.

    The tensors are referred to, not copied, but those that go through code of the user's own: they may not change until
    the files are staged. Blocks while another thread captures.
    """

    def __init__(self) -> None:
        self.directory = ""
        self._kept: dict[str, TorchFile | SafetensorsFile | FileBytes] = {}
        self._undo: list[tuple[Any, str, Any]] = []
        self._thread = 0
        self._frame: FrameType | None = None  # that entered

    def files(self, below: str = "") -> dict[str, TrainerFile]:
        """By their paths below the directory, or one in it. To be called before the end of the context."""
        top = os.path.join(self.directory, below) if below else self.directory
        found: dict[str, TrainerFile] = {}
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, top)] = file.read()
        for path, kept in self._kept.items():
            name = os.path.relpath(path, top)
            if not name.startswith(os.pardir):
                found.setdefault(name, kept)  # the file there was written later
        return dict(sorted(found.items()))

    def __enter__(self) -> Self:
        _one.acquire()
        try:
            self.directory = tempfile.mkdtemp(prefix="ckptd-save-")
            self._thread = threading.get_ident()
            self._frame = sys._getframe(1)
            self._replace(torch, "save", self._torch_save)
            import safetensors.torch  # noqa: PLC0415 - needed by frameworks, not by the client

            save_file = safetensors.torch.save_file
            for module, name in _SAVE_FILE:
                if getattr(sys.modules.get(module), name, None) is save_file:
                    self._replace(sys.modules[module], name, self._save_file)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())
        shutil.rmtree(self.directory, ignore_errors=True)
        self._kept, self._frame = {}, None
        _one.release()

    def _replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(module, name)
        self._undo.append((module, name, original))
        setattr(module, name, make(original))

    def _torch_save(self, original: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
            path = self._path(f)
            if path is None or args or options:  # another pickle module or format
                return original(obj, f, *args, **options)
            return self._keep(path, TorchFile(obj))

        return save

    def _save_file(self, original: Any) -> Any:
        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
            path = self._path(filename)
            if path is None:
                return original(tensors, filename, metadata)
            return self._keep(path, SafetensorsFile(dict(tensors), metadata))

        return save_file

    def _path(self, target: Any) -> str | None:
        """Where below the directory it is to be kept; None for what is none of ours."""
        if threading.get_ident() != self._thread or not isinstance(target, (str, os.PathLike)):
            return None
        path = os.path.abspath(os.fsdecode(target))
        return path if path.startswith(self.directory + os.sep) else None

    def _keep(self, path: str, file: TorchFile | SafetensorsFile) -> None:
        if os.path.lexists(path):
            os.unlink(path)
        self._kept[path] = file.lay_out().own() if self._is_through_others() else file

    def _is_through_others(self) -> bool:
        """Whether what saves just now goes back to code of the user's own before all is staged."""
        frame: FrameType | None = sys._getframe(3)  # of who called torch.save, or save_file
        while frame is not None and frame is not self._frame:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _KNOWN:
                return True
            frame = frame.f_back
        return False
