"""Hypothesis profiles: the default keeps `make test` quick, HYPOTHESIS_PROFILE=long searches for hours."""

import os
import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background: what tests start is to hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "quick", max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile(
    "long", max_examples=3000, stateful_step_count=80, deadline=None, suppress_health_check=_SLOW, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
