"""The CPU kernels: a Llama step in C, compiled on the machine that runs it."""
