"""Model files: how the folder of a model is made, checked and read."""
