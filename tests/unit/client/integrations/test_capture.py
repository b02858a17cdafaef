"""What a framework's saver writes below a directory is kept for staging; everything else is written as ever."""

import io
import os
import pathlib
import threading

import pytest
import safetensors.torch
import torch

from ckptd_client.files import SafetensorsFile, TorchFile, lay_out
from ckptd_client.integrations._kit.capture import Capture


@pytest.fixture
def originals():
    """The functions that a capture replaces; they are back in their place at the end."""
    before = torch.save, safetensors.torch.save_file
    yield before
    assert (torch.save, safetensors.torch.save_file) == before


def test_tensors_are_kept_and_small_files_are_read(originals):
    weights, state = {"w": torch.ones(3)}, {"step": torch.tensor(2)}
    with Capture() as capture:
        top = pathlib.Path(capture.directory)
        os.mkdir(top / "sub")
        torch.save(state, top / "sub" / "optimizer.pt")
        safetensors.torch.save_file(weights, str(top / "model.safetensors"), metadata={"format": "pt"})
        (top / "config.json").write_text("{}")
        files = capture.files()
        assert sorted(os.listdir(top)) == ["config.json", "sub"]
    assert list(files) == ["config.json", "model.safetensors", "sub/optimizer.pt"]
    assert files["config.json"] == b"{}"
    kept = files["model.safetensors"]
    assert isinstance(kept, SafetensorsFile)
    assert (kept.tensors["w"] is weights["w"], kept.metadata) == (True, {"format": "pt"})
    assert isinstance(files["sub/optimizer.pt"], TorchFile)
    assert files["sub/optimizer.pt"].value is state
    assert not top.exists()


def test_of_one_folder_below(originals):
    with Capture() as capture:
        os.mkdir(os.path.join(capture.directory, "a"))
        torch.save(1, os.path.join(capture.directory, "a", "one.pt"))
        torch.save(2, os.path.join(capture.directory, "two.pt"))
        pathlib.Path(capture.directory, "a", "small").write_bytes(b"s")
        assert list(capture.files("a")) == ["one.pt", "small"]


def test_what_is_saved_elsewhere_is_written(originals, tmp_path):
    with Capture() as capture:
        torch.save(5, tmp_path / "five.pt")
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
        with open(os.path.join(capture.directory, "open.pt"), "wb") as file:
            torch.save(7, file)
        assert list(capture.files()) == ["open.pt"]
    assert torch.load(tmp_path / "five.pt") == 5
    assert list(safetensors.torch.load_file(tmp_path / "w.safetensors")) == ["w"]


def test_what_another_thread_saves_is_written(originals):
    """It may change its tensors as soon as it has saved them."""
    with Capture() as capture:
        path = os.path.join(capture.directory, "theirs.pt")
        thread = threading.Thread(target=torch.save, args=(3, path))
        thread.start()
        thread.join()
        assert torch.load(path) == 3


def test_another_format_is_written(originals):
    with Capture() as capture:
        path = os.path.join(capture.directory, "old.pt")
        torch.save(3, path, _use_new_zipfile_serialization=False)
        assert isinstance(capture.files()["old.pt"], bytes)


def test_the_last_writer_of_a_path_counts(originals):
    with Capture() as capture:
        path = pathlib.Path(capture.directory, "a.pt")
        torch.save(1, path)
        path.write_bytes(b"later")
        assert capture.files() == {"a.pt": b"later"}
        torch.save(2, path)
        assert capture.files()["a.pt"].value == 2


def test_an_error_leaves_nothing(originals):
    capture = Capture()
    with pytest.raises(RuntimeError, match="on purpose"), capture:
        raise RuntimeError("on purpose")
    assert not os.path.exists(capture.directory)
    with Capture():
        pass


def test_what_code_of_the_users_own_saves_is_copied_at_once(originals):
    """Whoever calls torch.save, or calls a framework that does: it may put other weights back when it has saved."""
    weights = {"w": torch.ones(3)}

    def averaging(save):
        save()
        weights["w"].zero_()

    with Capture() as capture:
        averaging(lambda: torch.save(weights, os.path.join(capture.directory, "a.pt")))
        weights["w"].fill_(1)
        averaging(lambda: safetensors.torch.save_file(weights, os.path.join(capture.directory, "a.safetensors")))
        found = {name: saved(lay_out(file)) for name, file in capture.files().items()}
    assert torch.load(io.BytesIO(found["a.pt"]))["w"].tolist() == [1, 1, 1]
    assert safetensors.torch.load(found["a.safetensors"])["w"].tolist() == [1, 1, 1]


def saved(laid):
    data = bytearray(laid.nbytes)
    for at, piece in [*laid.known, *((at, bytes(flat.numpy())) for at, flat in laid.copies)]:
        data[at : at + len(piece)] = piece
    return bytes(data)
