"""What the sampler's draws must look like together, written plainly: one row, a sort, doubles."""

import numpy as np

from engine.protocol import Sampling


def naive_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability [v] of each token. Equal logits stay or go together."""
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    descending = np.sort(scaled)[::-1]
    if 0 < sampling.top_k < len(logits):
        scaled[scaled < descending[sampling.top_k - 1]] = -np.inf
    weights = np.exp(scaled)
    if sampling.top_p < 1:
        _, places = np.unique(-scaled, return_inverse=True)  # the likeliest first
        masses = np.bincount(places, weights)
        above = (np.cumsum(masses) - masses)[places]
        weights[(above >= sampling.top_p * weights.sum()) & (scaled < scaled.max())] = 0
    return np.asarray(weights / weights.sum())
