"""`python -m slipstream`."""

from slipstream.cli.main import main

if __name__ == "__main__":
    main()
