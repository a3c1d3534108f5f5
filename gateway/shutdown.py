"""The time budget of an ordered stop: 15 seconds, divided among its phases.

Every limit on the way out is one of these. The parts follow one another: running requests, their
settlement, the gateway's own end; then the engine, which the settlement needed until here.
"""

TOTAL_SECONDS = 15.0  # what `kvmeter up` promises between the signal and its exit

RUNNING_SECONDS = 10.0  # requests that run may still end by themselves
SETTLING_SECONDS = 2.0  # those that did not: one engine step, one commit, their last events
LEAVING_SECONDS = 1.0  # the engine link, the database, the interpreter: its end takes most of it
GATEWAY_SECONDS = RUNNING_SECONDS + SETTLING_SECONDS + LEAVING_SECONDS

ENGINE_SECONDS = 1.0  # its current step and its journal; a kill after that loses nothing

SLACK_SECONDS = TOTAL_SECONDS - GATEWAY_SECONDS - ENGINE_SECONDS  # `up`'s own end, likewise

# How long open connections may last (a whole number: uvicorn's). They outlive the running requests,
# whose clients still need an error, and are cut before the gateway exits.
CONNECTIONS_SECONDS = int(RUNNING_SECONDS + SETTLING_SECONDS)
