"""`python -m zerolap` is the command `zerolap`."""

from zerolap_cli import main

main()
