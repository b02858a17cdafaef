"""A job of many nodes: real daemons, and others played over real links; the cost at the coordinator."""
