"""``python -m ckptd`` is the command line."""

from ckptd.cli import main

main()
