"""This host: configuration, logs, locks, mounts, niceness, units, failpoints."""
