"""The whole command line: `python -m ballast`, and the script `ballast`."""

import signal
import sys

from ballast import _native


def main() -> None:
    """Runs the command line with the arguments of this process and exits with its code."""
    # Python's handler would run only after the command; a command that needs a handler installs its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
