"""Charts of a job's cost against its number of nodes: constants measured here, times from simulated jobs."""
