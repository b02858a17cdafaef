"""The connection to this node's daemon: settings, rendezvous, channel, link."""
