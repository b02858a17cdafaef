"""What the daemon and the client agree on: names, bytes and messages. Pure; imports nothing of the daemon."""
