"""Bytes between daemons: a server of sealed ranges, and its client."""
