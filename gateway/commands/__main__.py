"""`python -m gateway.commands` runs `kvmeter`."""

from gateway.commands import main

main()
