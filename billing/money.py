"""Money in integers: rates in pico-USD a token, amounts in nano-USD, and the one rounding rule."""

PICO_PER_NANO = 1_000
NANOS_PER_USD = 1_000_000_000
QUANTITY_MAX = 2**31 - 1
RATE_PICO_MAX = 2**31 - 1  # 2,147 USD a million tokens; keeps quantity x rate inside 64 bits


def amount_nanos(*, quantity: int, rate_pico: int) -> int:
    """Return the price of a quantity, rounded half up to the nano-dollar.

    The same formula is a CHECK on every metered transfer, in both databases.
    """
    return (quantity * rate_pico + 500) // PICO_PER_NANO


def amounts_nanos_max(*, total_pico: int, num_rounded: int) -> int:
    """Return the most that amounts can come to that are worth this together.

    `num_rounded` is how many of them are of a rate that is not a whole nano-dollar.
    """
    return (total_pico + 500 * num_rounded) // PICO_PER_NANO


def usd(nanos: int) -> str:
    """Return the amount in dollars as an exact decimal string with nine places."""
    dollars, rest = divmod(abs(nanos), NANOS_PER_USD)
    return f"{'-' if nanos < 0 else ''}{dollars}.{rest:09d}"
