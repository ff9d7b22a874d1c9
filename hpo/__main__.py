"""`python -m hpo`: the same commands as the console script."""

from hpo.cli import main

if __name__ == "__main__":
    main()
