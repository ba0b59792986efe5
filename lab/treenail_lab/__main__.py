"""The entry point of ``treenail-lab``; Ctrl-C while the modules load ends without a traceback."""

import sys


def main() -> int:
    """Run `treenail_lab.command.main`."""
    try:
        from treenail_lab import command  # loading takes a second

        return command.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
