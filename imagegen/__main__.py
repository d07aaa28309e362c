"""`python -m imagegen COMMAND …`: the same as `imagegen COMMAND …`."""

import sys

from imagegen.commands.registry import main

if __name__ == "__main__":
    sys.exit(main())
