"""Former paths that recipes of one's own import; the code is in metrics/."""
