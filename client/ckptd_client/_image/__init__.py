"""A rank's part of a checkpoint as one file image: plan, layout, stock objects."""
