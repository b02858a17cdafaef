"""A job whose nodes are all real daemons on this machine: times of a save, a loss and a load, and what daemons use."""
