"""`python -m rmsnorm`: the command line."""

import sys

from rmsnorm.cli import main

if __name__ == "__main__":
    sys.exit(main())
