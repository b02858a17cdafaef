"""Under which stages of ZeRO and in which numbers the cases of DeepSpeed run; imports no framework."""

NUMBERS = ("fp32", "bf16")
ANY = tuple(f"{stage}-{dtype}" for stage in range(4) for dtype in NUMBERS)
PARTITIONED = tuple(kind for kind in ANY if kind[0] != "0")
FLAT = tuple(kind for kind in ANY if kind[0] in "12")  # optimizers partitioned, weights not
IN_PARTS = tuple(kind for kind in ANY if kind[0] == "3")
PLAIN = ("1-bf16",)  # for what has nothing to do with ZeRO
EXPERTS = ("0-fp32", "1-fp32", "1-bf16", "2-bf16")
PIPELINES = ("0-fp32", "1-fp32", "1-bf16")
PIPELINES_OF_ZERO = PIPELINES[1:]
TENSORS = ("0-fp32", "0-bf16", "1-bf16", "2-bf16")
