"""`python -m gateway.commands` is `kvmeter`."""

from gateway.commands import main

main()
