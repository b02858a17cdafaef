"""``ckptd demo``: trains a small GPT, kills and resumes it twice, and compares its loss curve bit for bit.

Two sides. The story (`orchestrate`, `narration`, `ranks`, `daemon`, `workspace`, `promises`, `report`, `told`) starts
and kills processes and does not use torch. The training (`train`, `training`, `saving`, `model`) is what
it kills. Both use `plan` and `journal`.
"""


class DemoError(Exception):
    """A promise of the demo was broken; the message has the details."""
