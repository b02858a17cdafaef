"""The parallel file system: the worker process, drain, commit, scan, removal, publication."""
