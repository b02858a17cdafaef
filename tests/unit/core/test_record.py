"""Which saves of older lives too much is lost of, once a job went on from an older one."""

import pytest

from ckptd.core.coordinator.save_record import Phase, Record, obsolete_since
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End
from tests.runs import RUN

LOADED, NEWER = SaveId(8, 1, 10, RUN), SaveId(8, 2, 20, RUN)


def record(save=NEWER, phase=Phase.STAGED, end=None, held=(0,)):
    return Record(save, 2, 0.0, phase=phase, end=end, held={rank: {"a"} for rank in held})


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record(phase=Phase.STAGING, end=End.ABANDONED),  # as a coordinator sees it that was not there when it was whole
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
        record(phase=Phase.STAGING),  # more of it may be found
    ],
)
def test_what_may_be_of_use_is_not(one):
    assert obsolete_since([one], LOADED, 9) == []
