"""Files that torch reads: archives, pickles read without running code, DCP metadata. Pure."""
