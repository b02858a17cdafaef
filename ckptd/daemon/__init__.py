"""The daemon: its loop, the effects of the core's actions, the status, the ranks' connections."""
