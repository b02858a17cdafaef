"""What a load says that can restore nothing: the first causes, and where the rest is to be seen."""

from ckptd.core.coordinator.empty_loads import Asked, Found, Refusal, answer
from ckptd.shared.base.ids import JobKey

JOB = JobKey("/store", "job")


def refusal(notes):
    found = answer(JOB, Asked(None, None), Found([], [], notes, [], None), None)
    assert isinstance(found, Refusal)
    return found


def test_of_much_damage_the_first_is_named_and_how_to_see_the_rest():
    said = refusal([f"/store/job/step-1/r{rank:05}: missing" for rank in range(64)])
    assert "r00000: missing; " in said.message
    assert said.message.endswith("; and 60 more: ckptd verify /store/job")
    assert "r00004" not in said.message
    assert said.hint == "ckptd verify /store/job"


def test_of_little_damage_all_is_named():
    assert refusal(["a: missing", "b: missing"]).message == "no checkpoint can be restored: a: missing; b: missing"
