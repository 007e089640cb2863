"""The demo, as a program for torchrun. It lives in core/src/zerolap/cli/demo.py, so that an installed zerolap includes it."""

from zerolap.cli.demo import main

if __name__ == "__main__":
    main()
