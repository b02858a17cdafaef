"""The one error of the demo."""


class DemoError(Exception):
    """A promise of the demo was broken; the message has the details."""
