"""`python -m signed_align.cli`."""

from signed_align.cli import main

if __name__ == "__main__":
    main()
