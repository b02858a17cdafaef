"""Preemption: signals, the step that all ranks save at, and how it is asked for."""
