"""Who owes what: price cards, holds, settlement, double-entry ledger; counts tokens, never sees text."""
