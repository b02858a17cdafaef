"""Names, errors and how both are worded. Pure."""
