"""The one error of the demo."""


class DemoError(Exception):
    """The demo did not show what it promises. The message says what was seen instead."""
