"""A save: slots filled, segments sealed and handed over."""
