"""The connection to this node's daemon: settings, topology, channel, link."""
