"""`python -m llmc` is the `llmc` command."""

from .compiler.cli import main

if __name__ == "__main__":
    main()
