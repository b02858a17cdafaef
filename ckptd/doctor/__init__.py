"""``ckptd doctor``: probes (with effects) and the rules that judge their facts (pure)."""
