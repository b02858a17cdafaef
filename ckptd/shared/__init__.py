"""Everything that the client may import from ckptd. Imports nothing else of ours."""
