"""The coordinator half of a job: decisions that concern all ranks. Pure."""
