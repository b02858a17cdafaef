"""``ckptd demo``: trains a small GPT, kills and resumes it twice, and compares its loss curve bit for bit.

Two sides. The story (`orchestrate`, `narration`, `nodes`, `ranks`, `daemon`, `workspace`, `promises`, `report`) starts
and kills processes and does not use torch. The training (`train`, `training`, `saving`, `model`, `data`) is what
it kills. Both use `plan` and `journal`.
"""
