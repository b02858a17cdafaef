"""The classes under all integrations."""
