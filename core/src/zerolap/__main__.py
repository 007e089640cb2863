"""`python -m zerolap` is the command `zerolap`."""

from zerolap.cli import main

main()
