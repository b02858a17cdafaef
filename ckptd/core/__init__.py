"""What to do: pure decisions. No sockets, clocks, files, threads or logs in here."""
