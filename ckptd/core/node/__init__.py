"""The node half of a job: decisions about the slots of one node. Pure."""
