"""Which sequences compute what in each step, and the blocks that they use."""
