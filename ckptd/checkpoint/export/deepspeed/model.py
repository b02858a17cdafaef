"""The model files: parameters and their shapes, tied parameters, and the tensors that ZeRO does not partition."""

from collections.abc import Sequence
from typing import Any

from ckptd.checkpoint.export.deepspeed.archives import Archive, Range
from ckptd.checkpoint.export.deepspeed.partitions import check_distinct
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.placement import Shape
from ckptd.shared.torchfile.pickle_read import Stored

_TIED = "tied_modules"  # what several layers of a pipeline share
_MAX_DIMS = 8  # of a parameter: a range of one with more could be a hundred boxes


class Model:
    """Of ZeRO-1 and 2 one file, whose tensors are whole; of ZeRO-3 one for each rank, first that of rank 0.

    names: of all tensors, in the model's order. shapes: of the trained ones, a dict for each group, in the order in
    which they were cut. Raises DamagedError, naming the file, for what does not have these.
    """

    def __init__(self, archives: Sequence[Archive], *, cut: bool) -> None:
        self._archives = archives
        self._cut = cut
        first = archives[0]
        shapes = first.field("param_shapes")
        shapes = shapes if isinstance(shapes, list) else [shapes]
        check_distinct(first, shapes)
        self.shapes = [_shapes(named, first) for named in shapes]
        self.trained = {name: shape for named in self.shapes for name, shape in named.items()}
        self.frozen = _shapes(first.at_dict("frozen_param_shapes"), first)
        tied = first.at_dict("shared_params")
        self._tied = {name: held for name, held in tied.items() if isinstance(name, str) and isinstance(held, str)}
        named = first.at("buffer_names")
        self._buffers = {name for name in (named if isinstance(named, list) else ()) if isinstance(name, str)}
        self._others = self._uncut_of(first.at_dict("module"))
        there = {*self.trained, *self.frozen, *self._others}
        module = [name for name in first.at_dict("module") if isinstance(name, str)]
        ordered = [name for name in (*module, *self.trained, *self.frozen, *self._tied) if self.holder(name) in there]
        self.names = list(dict.fromkeys(ordered))

    @property
    def parallel(self) -> int | None:
        """Into how many stages or slices the model was cut, where that is said."""
        ranks = self._archives[0].at("mp_world_size")
        return ranks if type(ranks) is int else None

    @property
    def sliced(self) -> bool:
        """Whether its tensors are themselves slices of larger ones."""
        return self._archives[0].at("checkpoint_parallel_dimensions", "tp_degree") not in (None, 1)

    @property
    def step(self) -> int:
        """Steps of the optimizer, as the engine counted them."""
        steps = self._archives[0].at("global_steps")
        return steps if type(steps) is int and steps >= 0 else 0

    def holder(self, name: str) -> str:
        """The name that a tied one shares its tensor with; any other itself."""
        return self._tied.get(name, name)

    def uncut(self, name: str) -> tuple[Shape, list[Range]]:
        """Shape and place of a tensor that the optimizer does not know: a buffer, or a frozen parameter."""
        if name not in self.frozen:
            archive, tensor = self._others[name]
            return tensor.shape, [archive.range_of(tensor, name)]
        found = []
        for archive in self._archives if self._cut else self._archives[:1]:
            fragment = archive.at_dict("frozen_param_fragments").get(name)
            if not isinstance(fragment, Stored):
                raise DamagedError(f"{archive.path} has nothing of the frozen parameter {name}")
            found.append(archive.range_of(fragment, name))
        return self.frozen[name], found

    def add_layers(self, layers: Sequence[tuple[int, Archive]], stages: Sequence["Model"]) -> None:
        """What else the files of a pipeline's layers hold, of all stages: buffers, and frozen parameters.

        A tied layer's file has what the optimizer knows by another name, and nothing else. Raises DamagedError for a
        layer without one.
        """
        trained = {name for stage in stages for name in stage.trained}
        buffers = {name for stage in stages for name in stage._buffers}  # noqa: SLF001
        ties = any(name.partition(".")[0] == _TIED for name in trained)
        for number, archive in layers:
            content = archive.value if isinstance(archive.value, dict) else {}
            held = {f"{number}.{key}": value for key, value in content.items() if isinstance(value, Stored)}
            if not ties or held.keys() & (trained | buffers):
                self._others |= {name: (archive, value) for name, value in held.items() if name not in trained}
        self.names += [name for name in self._others if name not in self.names]
        there = {str(number) for number, _ in layers}
        lost = min((name for name in trained | buffers if name.partition(".")[0] not in {*there, _TIED}), default=None)
        if lost is not None:
            raise DamagedError(
                f"{self._archives[0].path}: the file of the layer that has {lost} is missing (layer_*-model_states.pt)",
                hint="copy it from the node that wrote it, or take another tag",
            )

    def _uncut_of(self, module: dict[Any, Any]) -> dict[str, tuple[Archive, Stored]]:
        """What of the module's own tensors is not said elsewhere. Of ZeRO-3 only buffers are: the rest has no bytes."""
        known = self.trained.keys() | self.frozen.keys() | self._tied.keys()
        return {
            name: (self._archives[0], value)
            for name, value in module.items()
            if isinstance(name, str) and isinstance(value, Stored) and name not in known
            if not self._cut or name in self._buffers
        }


def _shapes(named: object, archive: Archive) -> dict[str, Shape]:
    if isinstance(named, dict) and all(isinstance(name, str) and _is_shape(shape) for name, shape in named.items()):
        return named
    raise DamagedError(f"{archive.path}: the shapes of the parameters are none")


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, tuple) and len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    )
