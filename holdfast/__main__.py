"""``python -m holdfast``: the command line, for when the script ``holdfast`` is not on the PATH."""

from holdfast.cli import main

main()
