"""The bytes of every message between processes of ckptd: they change only when somebody means it.

The names of classes stand nowhere in them: tags and names of fields do. If a change is meant: ``make golden-wire``, and
another version of the protocol (``ckptd.peers.packets.VERSION``, ``ckptd.store.messages.VERSION``).
"""

from typing import get_args

import msgspec
import pytest

from ckptd.shared.protocol import node_messages
from tests.golden import wire

ALL = [(name, message) for name in wire.WIRES for message in wire.examples(wire.WIRES[name])]


@pytest.mark.parametrize("name", wire.WIRES)
def test_every_message_has_golden_bytes_and_no_others_are_there(name):
    assert list(wire.read(name)) == list(wire.examples(wire.WIRES[name]))


@pytest.mark.parametrize(("name", "message"), ALL)
def test_golden_bytes(name, message):
    of, example, golden = wire.WIRES[name], wire.examples(wire.WIRES[name])[message], wire.read(name)[message]
    assert of.encode(example).hex() == golden.hex()
    back = of.decode(golden)
    assert (back, repr(back)) == (
        example,
        repr(example),
    )  # as True and 1 compare equal


def test_every_member_of_each_union_is_there():
    """By tag, from the unions themselves: an example that forgot one would be found here."""
    for name, of in wire.WIRES.items():
        found = {message.split(" ")[0] for message in wire.read(name)}
        assert found == {str(cls.__struct_config__.tag or cls.__name__) for cls in get_args(of.union) or (of.union,)}
    facts = {message.split(" ")[1] for message in wire.read("node_messages") if message.startswith("report ")}
    assert facts == {str(cls.__struct_config__.tag) for cls in get_args(node_messages.Fact)}


def nested(value):
    """All structs in a value."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, field) for field in value.__struct_fields__]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from nested(item)


@pytest.mark.parametrize(("name", "message"), ALL)
def test_fields_of_arrays_differ(name, message):
    """Two that changed places would not show in the bytes of an array if they had one value."""
    for one in nested(wire.examples(wire.WIRES[name])[message]):
        if one.__struct_config__.array_like:
            values = [repr(getattr(one, field)) for field in one.__struct_fields__]
            required = values if "(bare)" not in message else values[: len(values) - len(one.__struct_defaults__)]
            assert len(set(required)) == len(required), one
