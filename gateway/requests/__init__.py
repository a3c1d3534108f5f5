"""One request's life: order, hold, engine, output, settlement."""
