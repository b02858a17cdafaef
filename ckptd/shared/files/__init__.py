"""Files and mappings that daemon and client open the same way."""
