"""Bytes between daemons: a server of sealed ranges, and whoever pulls them."""
