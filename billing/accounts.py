"""The chart of accounts: builds every account id, an organisation's and ours."""

from billing.meters import Meter

# An organisation's own accounts; the id is "<code>:<organization id>".
PREPAID = "prepaid"  # what we owe a customer who paid in advance (grows on the credit side)
UNBILLED = "unbilled"  # what a postpaid customer has used and not been invoiced (debit side)
OVERDRAFT = "overdraft"  # what a prepaid customer used above the balance and owes us (debit side)

# Ours. Money that an operator books in by command comes from here.
OPERATOR_FUNDING = "operator_funding"


def prepaid(organization_id: str) -> str:
    """Return the account that a prepaid organisation pays from."""
    return f"{PREPAID}:{organization_id}"


def unbilled(organization_id: str) -> str:
    """Return the account that collects a postpaid organisation's use."""
    return f"{UNBILLED}:{organization_id}"


def overdraft(organization_id: str) -> str:
    """Return the account of a prepaid organisation's debt."""
    return f"{OVERDRAFT}:{organization_id}"


def of_organization(organization_id: str) -> tuple[str, ...]:
    """Return every account of an organisation, prepaid or postpaid."""
    return prepaid(organization_id), unbilled(organization_id), overdraft(organization_id)


def revenue(meter: Meter) -> str:
    """Return the revenue account of a meter."""
    return f"revenue:{meter.value}"


OUR_ACCOUNTS = (OPERATOR_FUNDING, *(revenue(meter) for meter in Meter))
