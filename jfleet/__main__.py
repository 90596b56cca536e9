"""``python -m jfleet``; see ``jfleet.cli``."""

import sys

from jfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
