"""Which saves of older lives too much is lost of, once a job went on from an older one."""

import pytest

from ckptd.core.coordinator.save_record import Record, obsolete_since
from ckptd.core.coordinator.save_states import State
from ckptd.shared.base.ids import SaveId
from tests.runs import RUN

LOADED, NEWER = SaveId(8, 1, 10, RUN), SaveId(8, 2, 20, RUN)


def record(save=NEWER, state=State.QUEUED, held=(0,)):
    staged = state is State.QUEUED
    return Record(save, 2, 0.0, state=state, staged=staged, held={rank: {"a"} for rank in held})


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record(state=State.ABANDONED),  # as a coordinator sees it that was not there when it was whole
    ],
)
def test_what_is_newer_and_not_whole_is_lost(one):
    assert obsolete_since([one], LOADED, 9) == [NEWER]


@pytest.mark.parametrize(
    "one",
    [
        record(held=(0, 1)),
        record(held=()),
        record(save=SaveId(8, 0, 0, RUN)),
        record(save=SaveId(9, 1, 30, RUN)),  # of this life
        record(state=State.STAGING),  # more of it may be found
    ],
)
def test_what_may_be_of_use_is_not(one):
    assert obsolete_since([one], LOADED, 9) == []
