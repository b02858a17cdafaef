"""A load: rounds with the daemon, checked reads, the fit onto the state."""
