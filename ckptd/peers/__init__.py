"""The control plane between daemons: who they are, links between their lives, sockets."""
