"""``ckptd demo``: a small GPT is trained, killed twice and resumed, and its loss curve compared bit for bit.

Two sides. The story (`orchestrate`, `telling`, `nodes`, `ranks`, `daemon`, `workspace`, `promises`, `report`) starts
and kills processes and has no use for torch. The training (`train`, `training`, `saving`, `model`, `data`) is what it
kills. Both know `plan` and `journal`.
"""
