"""`python -m amp_compiler` is the command `amp-compiler`."""

from amp_compiler.cli.main import main

if __name__ == "__main__":
    main()
