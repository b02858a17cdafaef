"""``load_from``: files that other programs saved."""
