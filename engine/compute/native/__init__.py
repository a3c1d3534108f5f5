"""The CPU's own kernels: a Llama step in C, compiled on the machine that runs it."""
