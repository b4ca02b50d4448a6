"""`python -m ortlaunch`, where the command is not on PATH."""

from ortlaunch.cli import main

if __name__ == "__main__":
    main()
