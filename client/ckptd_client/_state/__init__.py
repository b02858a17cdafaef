"""A state as named leaves: tree, tensors, encodings, replicas, shards."""
