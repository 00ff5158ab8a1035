"""The console script `zendelta` and `python -m zendelta`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line on the arguments of this process and return the exit code."""
    try:
        from zendelta.cli.run import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while the command line itself was being imported, or just after it ended
        return 130


if __name__ == "__main__":
    sys.exit(main())
