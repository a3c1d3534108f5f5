"""Who owes what: price cards, holds, settlement, ledger; counts tokens, never sees text."""
