"""The arena: the directory on tmpfs with the slots, its budget, and what it remembers between daemons."""
