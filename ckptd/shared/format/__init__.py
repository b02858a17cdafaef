"""Bytes in files and slots: seal, layout, header, manifest, digests. Pure."""
