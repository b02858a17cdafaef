"""A store in a directory: of a parallel file system, or of any other that renames atomically and syncs."""
