"""The control plane between daemons: identities, links between processes, sockets."""
